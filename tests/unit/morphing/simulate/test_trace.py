"""What a timeline holds agrees with the simulation that it is of."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from tests.unit.morphing.pipelines import pipelines

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.schedules.schedule import Task, Work, expand
from spottrain.morphing.simulate.replica import (
    Link,
    StageTimes,
    TaskSpan,
    simulate_pipeline,
    trace_pipeline,
)

Pipeline = tuple[Schedule, list[StageTimes], list[Link]]
STAGE = StageTimes(forward_s=1.0, recompute_s=1.0, backward_s=2.0)


def by_stage(tasks: tuple[TaskSpan, ...]) -> dict[int, list[TaskSpan]]:
    found: defaultdict[int, list[TaskSpan]] = defaultdict(list)
    for span in tasks:
        found[span.stage].append(span)
    return found


@given(pipelines())
def test_tasks_fill_the_time_that_stages_are_busy(pipeline: Pipeline) -> None:
    schedule, stages, links = pipeline
    trace = trace_pipeline(schedule, stages, links)
    if schedule.pipeline_depth > 1:
        assert trace.run == simulate_pipeline(schedule, stages, links)
    lists = expand(schedule)
    for stage, spans in by_stage(trace.tasks).items():
        busy_s = sum(span.end_s - span.start_s for span in spans)
        assert busy_s == pytest.approx(trace.run.busy_s[stage], abs=1e-6)
        assert spans[-1].end_s == trace.run.finish_s[stage]
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.start_s
        ran = Counter(s.task for s in spans if s.task.work is not Work.RECOMPUTE)
        listed = Counter(t for t in lists[stage] if t.work is not Work.RECOMPUTE)
        assert ran == listed


@given(pipelines())
def test_messages_lead_from_a_task_to_the_next_stage_s(pipeline: Pipeline) -> None:
    schedule, stages, links = pipeline
    trace = trace_pipeline(schedule, stages, links)
    starts = {(span.stage, span.task): span.start_s for span in trace.tasks}
    ends = {(span.stage, span.task): span.end_s for span in trace.tasks}
    if schedule.chunks > 1:
        return
    assert len(trace.messages) == 2 * (len(stages) - 1) * schedule.num_microbatches
    for message in trace.messages:
        work = Work.BACKWARD if message.is_gradient else Work.FORWARD
        task = Task(work, message.microbatch)
        assert ends[message.sender, task] <= message.start_s <= message.end_s
        assert message.end_s <= starts[message.receiver, task]


def test_recomputes_are_of_their_micro_batch() -> None:
    schedule = compact_schedule("varuna", 3, 5, recompute=True)
    trace = trace_pipeline(schedule, [STAGE] * 3, [Link()] * 2)
    for spans in by_stage(trace.tasks).values():
        ended = {span.task: span for span in spans}
        for span in spans:
            if span.task.work is Work.RECOMPUTE:
                assert ended[span.task._replace(work=Work.FORWARD)].end_s <= span.start_s
                backward = ended[span.task._replace(work=Work.BACKWARD)]
                assert span.end_s <= backward.start_s


def test_a_timeline_of_too_many_tasks_is_refused() -> None:
    schedule = compact_schedule("1f1b", 2, 10**6, recompute=False)
    with pytest.raises(PlanError, match="a timeline has at most"):
        trace_pipeline(schedule, [STAGE] * 2, [Link()])
