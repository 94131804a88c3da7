from __future__ import annotations

import itertools
import time
from operator import le

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.morphing.pipelines import few, kinds, links_of, stage_times

from spottrain.morphing.memory.loads import StageLoad, stage_loads
from spottrain.morphing.schedules.lists import compact_schedule
from spottrain.morphing.schedules.schedule import (
    StageSchedule,
    Task,
    Work,
    make_schedule,
    max_in_flight,
)
from spottrain.morphing.simulate.replica import Link, StageTimes, simulate_pipeline
from spottrain.wire.plan import ScheduleKind


def needed_recomputes(tasks: StageSchedule) -> int:
    """Count at length the recomputes that do not come right after their forward."""
    return sum(
        task.work is Work.RECOMPUTE and before != Task(Work.FORWARD, task.microbatch, task.chunk)
        for before, task in itertools.pairwise(tasks)
    )


def counts_at_most(tasks: StageSchedule, chunks: int) -> tuple[int, ...]:
    """Follow a list at length: in flight of each chunk when most are in flight."""
    now, found = [0] * chunks, (0,) * chunks
    for task in tasks:
        if task.work is Work.FORWARD:
            now[task.chunk] += 1
            if (sum(now), now[0]) >= (sum(found), found[0]):
                found = tuple(now)
        elif task.work is Work.BACKWARD:
            now[task.chunk] -= 1
    return found


@given(
    st.sampled_from(["varuna", "1f1b", "gpipe", "interleaved"]),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(2, 4),
    st.booleans(),
)
def test_run_length_encoded_lists_expand_to_the_full_lists(
    kind: ScheduleKind, depth: int, count: int, chunks: int, recompute: bool
) -> None:
    if kind == "interleaved":
        assume(depth > 1)
        count *= depth
    else:
        chunks = 1
    lists = make_schedule(kind, depth, count, recompute=recompute, chunks=chunks)
    loads = stage_loads(kind, depth, count, recompute, chunks=chunks)
    assert [load.in_flight for load in loads] == list(map(max_in_flight, lists))
    assert [load.recomputes for load in loads] == list(map(needed_recomputes, lists))
    assert [load.counts for load in loads] == [counts_at_most(tasks, chunks) for tasks in lists]
    for load, tasks in zip(loads, lists, strict=True):
        again = {task.chunk for task in tasks if task.work is Work.RECOMPUTE}
        if chunks > 1:
            assert load.keeping == tuple(k not in again for k in range(chunks))


def test_inputs_wait_for_as_many_as_the_stage_before_has_in_flight() -> None:
    loads = stage_loads("1f1b", 3, 8, recompute=True)
    assert [load.in_flight for load in loads] == [3, 2, 1]
    assert [load.inputs_held for load in loads] == [3, 3, 2]
    assert [load.recomputes for load in loads] == [8, 8, 0]
    assert [load.gradients_waiting for load in loads] == [1, 1, 0]


def test_the_first_stage_of_a_ring_holds_one_that_waits() -> None:
    loads = stage_loads("interleaved", 2, 4, recompute=False, chunks=2)
    assert [load.inputs_held for load in loads] == [
        loads[0].in_flight + 1,
        loads[0].in_flight,
    ]


def test_gradients_pile_up_where_all_forwards_come_first() -> None:
    loads = stage_loads("gpipe", 3, 12, recompute=True)
    assert [load.gradients_waiting for load in loads] == [4, 4, 0]


@pytest.mark.parametrize("kind", ["varuna", "1f1b", "gpipe"])
@pytest.mark.parametrize("bound", [1, 2, 100])
def test_a_bound_of_the_plan_s_own_holds_on_every_stage(kind: ScheduleKind, bound: int) -> None:
    free = stage_loads(kind, 3, 12, recompute=False)
    bounded = stage_loads(kind, 3, 12, recompute=False, in_flight_bound=bound)
    most = min(bound, 12)
    last = min(bound, free[-1].in_flight)
    assert [load.in_flight for load in bounded] == [most, most, last]
    assert [load.inputs_held for load in bounded] == [most, most, most]


bounds = st.none() | st.integers(1, 25)


@given(
    kinds,
    st.lists(stage_times(few), min_size=1, max_size=5),
    st.lists(links_of(few), min_size=4, max_size=4),
    st.integers(1, 20),
    st.booleans(),
    bounds,
)
def test_no_simulation_has_more_in_flight_than_the_model_allows_for(
    kind: ScheduleKind,
    stages: list[StageTimes],
    links: list[Link],
    count: int,
    recompute: bool,
    bound: int | None,
) -> None:
    depth = len(stages)
    run = simulate_pipeline(
        compact_schedule(kind, depth, count, recompute=recompute),
        stages,
        links[: depth - 1],
        bound=bound,
    )
    loads = stage_loads(kind, depth, count, recompute, in_flight_bound=bound)
    assert all(map(le, run.peak_in_flight, [load.in_flight for load in loads]))


@given(kinds, st.integers(1, 6), st.integers(1, 40), st.booleans(), bounds)
def test_with_a_slow_last_stage_just_as_many_are_in_flight(
    kind: ScheduleKind, depth: int, count: int, recompute: bool, bound: int | None
) -> None:
    quick = StageTimes(forward_s=1e-6, recompute_s=1e-6, backward_s=1e-6)
    slow = StageTimes(forward_s=1.0, recompute_s=1.0, backward_s=2.0)
    run = simulate_pipeline(
        compact_schedule(kind, depth, count, recompute=recompute),
        [quick] * (depth - 1) + [slow],
        [Link()] * (depth - 1),
        bound=bound,
    )
    loads = stage_loads(kind, depth, count, recompute, in_flight_bound=bound)
    assert list(run.peak_in_flight) == [load.in_flight for load in loads]


@pytest.mark.parametrize("kind", ["varuna", "1f1b", "gpipe"])
def test_a_million_micro_batches_take_no_longer_than_a_few(kind: ScheduleKind) -> None:
    def least_s(count: int) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            stage_loads(kind, 8, count, recompute=True)
            times.append(time.perf_counter() - began)
        return min(times)

    assert least_s(1_000_000) < 10 * least_s(100) + 0.05


def test_one_run_of_sections_keeps_every_graph_unless_it_recomputes() -> None:
    some = StageLoad(in_flight=3, inputs_held=3, recomputes=8)
    assert (some.counts, some.keeping) == ((3,), (False,))
    none = StageLoad(in_flight=3, inputs_held=3, recomputes=0)
    assert none.keeping == (True,)
