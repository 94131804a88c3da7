"""Long mini-batches, and the simulator that Varuna's authors published."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.original import original_finish_s
from tests.unit.morphing.pipelines import (
    few,
    links_of,
    originals_inputs,
    pipelines,
    reference_rows,
    stage_times,
)

from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.simulate.replica import (
    Conditions,
    Link,
    StageTimes,
    simulate_pipeline,
)
from spottrain.wire.plan import ScheduleKind

# --- The original -----------------------------------------------------------------------


@pytest.mark.nightly
def test_every_row_of_the_original_is_met(reference: Path) -> None:
    for row in reference_rows(reference):
        stages, links = originals_inputs(row)
        schedule = compact_schedule("varuna", int(row["P"]), int(row["M"]), recompute=True)
        finish_s = original_finish_s(schedule, stages, links)
        batch_us = finish_s * 1e6 + int(row["allreduce_us"])
        # To the microsecond, coincidences and all; 0.1 % would do.
        assert round(batch_us) == int(row["batch_us_nojitter"]), row


@pytest.mark.rotated
def test_beyond_the_originals_end_a_closed_form_holds_in_its_conditions() -> None:
    count = 6000  # it stops, silently, at 5,000
    for depth in (1, 2, 4):
        stages = [StageTimes(forward_s=0.001, recompute_s=0.001, backward_s=0.002)]
        schedule = compact_schedule("1f1b", depth, count, recompute=False)
        finish_s = original_finish_s(schedule, stages * depth, [Link()] * (depth - 1))
        assert finish_s == pytest.approx((count + depth - 1) * 0.003)


# --- Fast-forward ------------------------------------------------------------------------------


@given(pipelines(longest=400), st.sampled_from(Conditions), st.booleans())
def test_a_leap_ends_where_the_whole_way_ends(
    pipeline: tuple[Schedule, list[StageTimes], list[Link]],
    conditions: Conditions,
    asynchronous: bool,
) -> None:
    play = partial(simulate_pipeline, *pipeline, conditions=conditions, asynchronous=asynchronous)
    assert play() == play(fast_forward=False)


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 120), st.booleans(), st.data())
def test_so_it_does_where_chunks_are_interleaved(
    depth: int, chunks: int, groups: int, recompute: bool, data: st.DataObject
) -> None:
    stages = data.draw(st.lists(stage_times(few), min_size=depth, max_size=depth))
    links = data.draw(st.lists(links_of(few), min_size=depth, max_size=depth))
    links = links[: depth if chunks > 1 else depth - 1]
    schedule = compact_schedule(
        "interleaved", depth, depth * groups, recompute=recompute, chunks=chunks
    )
    short = simulate_pipeline(schedule, stages, links)
    assert short == simulate_pipeline(schedule, stages, links, fast_forward=False)


@pytest.mark.parametrize("kind", ["varuna", "1f1b", "gpipe", "interleaved"])
def test_ten_million_micro_batches_take_as_many_instants_as_a_few(
    kind: ScheduleKind,
) -> None:
    depth, count = 4, 10_000_000
    chunks = 2 if kind == "interleaved" else 1
    schedule = compact_schedule(kind, depth, count, recompute=True, chunks=chunks)
    stages = [StageTimes(forward_s=0.012, recompute_s=0.011, backward_s=0.024)] * 3
    stages.append(StageTimes(forward_s=0.014, recompute_s=0.0, backward_s=0.026))
    begin_s = time.process_time()
    got = simulate_pipeline(schedule, stages, [Link(latency_s=0.001)] * 3)
    assert time.process_time() - begin_s < 60  # played: hours
    assert max(got.finish_s) >= count * 0.047
    once_s, twice_s = (
        max(
            simulate_pipeline(
                compact_schedule(kind, depth, some, recompute=True, chunks=chunks),
                stages,
                [Link(latency_s=0.001)] * 3,
                fast_forward=False,
            ).finish_s
        )
        for some in (600, 1200)
    )
    straight_s = twice_s + (count - 1200) / 600 * (twice_s - once_s)
    assert max(got.finish_s) == pytest.approx(straight_s, rel=1e-6)
