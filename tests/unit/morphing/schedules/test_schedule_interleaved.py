"""Stages with several chunks: what comes in when, and the executor's way through it."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.pipelines import few, kinds, links_of, stage_times
from tests.unit.morphing.slow_replica import SlowReplica

from spottrain.morphing.schedules.schedule import (
    OrderPolicy,
    StageProgress,
    StageSchedule,
    Task,
    Unit,
    Work,
    arrivals,
    make_schedule,
    max_in_flight,
)
from spottrain.morphing.simulate.replica import simulate_pipeline
from spottrain.wire.plan import ScheduleKind


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[StageSchedule, ...]:
    depth, chunks = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    return make_schedule(
        "interleaved",
        depth,
        depth * draw(st.integers(1, 3)),
        recompute=draw(st.booleans()),
        chunks=chunks,
    )


def chunks_of(lists: tuple[StageSchedule, ...]) -> int:
    return 1 + max(task.chunk for task in lists[0])


class Stage:
    """A stage, what is on its links and what it holds."""

    def __init__(self, lists: tuple[StageSchedule, ...], p: int) -> None:
        self.progress = StageProgress(lists[p], first=p == 0, last=p == len(lists) - 1)
        self.awaited = tuple(map(iter, arrivals(lists, p)))
        self.links: tuple[deque[Unit], deque[Unit]] = deque(), deque()
        self.history: list[Task] = []
        self.graphs: set[Unit] = set()
        self.one_set = {task.chunk for task in lists[p] if task.work is Work.RECOMPUTE}

    def receive(self, way: int) -> None:
        unit = self.links[way].popleft()
        assert unit == next(self.awaited[way])
        if way:
            self.progress.gradient_arrived(unit[1])
        else:
            self.progress.activation_arrived(unit[1])

    def run(self) -> Task:
        task = self.progress.next_task()
        assert task is not None
        self.history.append(task)
        unit = task.microbatch, task.chunk
        if task.work is Work.BACKWARD:
            self.graphs.remove(unit)
        elif task.work is Work.RECOMPUTE or self.progress.keeps_graph(task):
            self.graphs.add(unit)
        self.progress.completed(task)
        assert sum(chunk in self.one_set for _, chunk in self.graphs) <= 1
        return task


@given(interleaved(), st.randoms(use_true_random=False))
def test_with_any_delays_all_lists_are_followed_and_arrivals_come_as_predicted(
    lists: tuple[StageSchedule, ...], random: Random
) -> None:
    depth = len(lists)
    stages = [Stage(lists, p) for p in range(depth)]
    while not all(stage.progress.done for stage in stages):
        ready = [(p, -1) for p, s in enumerate(stages) if s.progress.next_task()]
        waiting = [(p, w) for p, s in enumerate(stages) for w in (0, 1) if s.links[w]]
        p, way = random.choice([*ready, *waiting])
        if way >= 0:
            stages[p].receive(way)
            continue
        task = stages[p].run()
        run = task.chunk * depth + p
        to, way = (run + 1, 0) if task.work is Work.FORWARD else (run - 1, 1)
        if task.work is not Work.RECOMPUTE and 0 <= to < depth * chunks_of(lists):
            stages[to % depth].links[way].append((task.microbatch, to // depth))
    for tasks, stage in zip(lists, stages, strict=True):
        assert stage.progress.peak_in_flight == max_in_flight(tasks)
        skipped = set(tasks) - set(stage.history)
        assert all(task.work is Work.RECOMPUTE for task in skipped)
        assert stage.history == [task for task in tasks if task not in skipped]
        assert not any(stage.links)
        assert [next(ways, None) for ways in stage.awaited] == [None, None]


@given(kinds, st.integers(1, 5), st.integers(1, 8), st.booleans())
def test_without_chunks_micro_batches_come_in_their_order(
    kind: ScheduleKind, depth: int, count: int, recompute: bool
) -> None:
    lists = make_schedule(kind, depth, count, recompute=recompute)
    every = tuple((j, 0) for j in range(count))
    for p in range(depth):
        activations, gradients = arrivals(lists, p)
        assert activations == (every if p > 0 else ())
        assert gradients == (every if p < depth - 1 else ())


def test_a_list_with_chunks_is_followed_in_order_whatever_is_asked_for() -> None:
    lists = make_schedule("interleaved", 2, 2, recompute=False, chunks=2)
    stage = StageProgress(lists[0], first=True, last=False, order_policy=OrderPolicy.OPPORTUNISTIC)
    for microbatch in (0, 1):
        stage.completed(Task(Work.FORWARD, microbatch))

    stage.gradient_arrived(1)
    assert stage.next_task() is None
    stage.activation_arrived(1)
    assert stage.next_task() == Task(Work.FORWARD, 0, 1)


def test_only_the_last_chunk_of_the_last_stage_keeps_graphs_when_others_recompute() -> None:
    lists = make_schedule("interleaved", 2, 4, recompute=True, chunks=2)
    stage = StageProgress(lists[1], first=False, last=True)

    assert not stage.keeps_graph(Task(Work.FORWARD, 0))
    assert stage.keeps_graph(Task(Work.FORWARD, 0, 1))


@given(st.data(), interleaved())
def test_the_simulators_loops_go_the_executors_way(
    data: st.DataObject, lists: tuple[StageSchedule, ...]
) -> None:
    depth = len(lists)
    stages = [data.draw(stage_times(few)) for _ in range(depth)]
    links = [data.draw(links_of(few)) for _ in range(depth)]

    run = simulate_pipeline(lists, stages, links)

    slow = SlowReplica(lists, stages, links, OrderPolicy.STRICT).run()
    assert run.finish_s == pytest.approx(slow.finish_s)
    assert run.busy_s == pytest.approx(slow.busy_s)
    assert run.peak_in_flight == slow.peak_in_flight
