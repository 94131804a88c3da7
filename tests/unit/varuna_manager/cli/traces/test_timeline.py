"""What ranks have measured by different clocks becomes one timeline."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.schedules.lists import compact_schedule
from spottrain.morphing.simulate.replica import (
    Link,
    MessageSpan,
    PipelineTrace,
    StageTimes,
    trace_pipeline,
)
from spottrain.varuna_manager.cli.simulate.timeline import write_timeline
from spottrain.varuna_manager.cli.traces.timeline import merge, stage_times
from spottrain.wire.timeline import (
    ArrivedAt,
    PhaseTimes,
    RankTimeline,
    SentAt,
    TaskTimes,
)

WALL_S = 1.9e9
SMALL_S = 1e-5
"""Unix times are kept to a fraction of a microsecond."""


def simulated(depth: int, microbatches: int, latency_s: float) -> PipelineTrace:
    stages = [StageTimes(forward_s=1.0, recompute_s=0.0, backward_s=2.0)] * depth
    return trace_pipeline(
        compact_schedule("1f1b", depth, microbatches, recompute=False),
        stages,
        [Link(latency_s=latency_s)] * (depth - 1),
    )


def by_arrival(message: MessageSpan) -> float:
    return message.end_s


def measured(trace: PipelineTrace, ahead_s: list[float]) -> list[RankTimeline]:
    """Return what each stage would have measured.

    Args:
        trace: What happens.
        ahead_s: How much each stage's clock is ahead.
    """
    depth = len(ahead_s)
    return [
        RankTimeline(
            replica=0,
            stage=stage,
            pipeline_depth=depth,
            wall_s=WALL_S + stage + ahead_s[stage],  # records begin at different times
            tasks=tuple(
                TaskTimes(
                    work=span.task.work.value,
                    microbatch=span.task.microbatch,
                    chunk=0,
                    start_s=span.start_s - stage,
                    end_s=span.end_s - stage,
                )
                for span in trace.tasks
                if span.stage == stage
            ),
            sent=tuple(
                SentAt(
                    is_gradient=one.is_gradient,
                    microbatch=one.microbatch,
                    at_s=one.start_s - stage,
                )
                for one in trace.messages
                if one.sender == stage
            ),
            arrived=tuple(
                ArrivedAt(is_gradient=one.is_gradient, at_s=one.end_s - stage)
                for one in sorted(trace.messages, key=by_arrival)
                if one.receiver == stage
            ),
            phases=(
                PhaseTimes(
                    phase="reduction",
                    start_s=trace.run.finish_s[stage] - stage,
                    end_s=trace.run.finish_s[stage] - stage + 0.5,
                ),
            ),
        )
        for stage in range(depth)
    ]


@given(
    depth=st.integers(2, 5),
    microbatches=st.integers(1, 9),
    latency_s=st.floats(0.01, 3.0),
    data=st.data(),
)
def test_clocks_that_contradict_messages_are_set(
    depth: int, microbatches: int, latency_s: float, data: st.DataObject
) -> None:
    apart = st.floats(1.01 * latency_s, 100.0) | st.floats(-100.0, -1.01 * latency_s)
    # Of each against the first, to which those before it have been set.
    ahead_s = [0.0, *(data.draw(apart) for _ in range(depth - 1))]
    trace = simulated(depth, microbatches, latency_s)
    found = merge(measured(trace, ahead_s))
    expected = {(span.stage, span.task): span.start_s for span in trace.tasks}
    for span in found.tasks:
        assert span.start_s == pytest.approx(expected[span.stage, span.task], abs=SMALL_S)
    assert len(found.messages) == len(trace.messages)
    for message in found.messages:
        took_s = message.end_s - message.start_s
        assert took_s == pytest.approx(latency_s, abs=SMALL_S)


def test_clocks_within_a_messages_time_are_believed() -> None:
    trace = simulated(3, 4, 1.0)
    found = merge(measured(trace, [0.0, 0.25, 0.5]))
    took_s = {(one.sender, one.receiver): one.end_s - one.start_s for one in found.messages}
    assert took_s[0, 1] == pytest.approx(1.25, abs=SMALL_S)
    assert took_s[1, 0] == pytest.approx(0.75, abs=SMALL_S)


def test_a_measured_mini_batch_is_drawn_and_added_up(tmp_path: Path) -> None:
    trace = simulated(3, 4, 0.5)
    found = merge(measured(trace, [0.0] * 3))
    for stage, row in enumerate(stage_times(found)):
        assert row["stage"] == f"0, {stage}"
        assert row["forward_s"] == pytest.approx(4.0, abs=SMALL_S)
        assert row["backward_s"] == pytest.approx(8.0, abs=SMALL_S)
        assert row["reduction_s"] == pytest.approx(0.5, abs=SMALL_S)
        waited_s = trace.run.finish_s[stage] - 12.0
        assert row["wait_s"] == pytest.approx(waited_s, abs=SMALL_S)
    write_timeline(tmp_path / "a.svg", found)
    write_timeline(tmp_path / "a.json", found)
    drawn = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    lines = list(drawn.iter("{http://www.w3.org/2000/svg}line"))
    assert len(lines) == len(trace.messages) == 16
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "reduction" for event in events) == 3
