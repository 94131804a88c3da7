from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.schedule import (
    StageProgress,
    StageSchedule,
    Task,
    Work,
    make_schedule,
    max_in_flight,
)
from spottrain.wire.plan import ScheduleKind

kinds: st.SearchStrategy[ScheduleKind] = st.sampled_from(["varuna", "1f1b", "gpipe"])
depths = st.integers(1, 7)
counts = st.integers(1, 20)


def schedule(kind: ScheduleKind, depth: int, count: int, *, recompute: bool) -> list[str]:
    lists = make_schedule(kind, depth, count, recompute=recompute)
    return [" ".join(map(str, tasks)) for tasks in lists]


def tasks(text: str) -> StageSchedule:
    return tuple(Task(Work(word[0]), int(word[1:])) for word in text.split())


def test_varuna_equals_the_original_for_every_known_case(reference: Path) -> None:
    cases = json.loads((reference / "varuna-schedules.json").read_text())
    assert len(cases) >= 70
    for name, expected in cases.items():
        depth, count = (int(part[1:]) for part in name.split("_"))
        assert schedule("varuna", depth, count, recompute=True) == expected, name


def test_varuna_alternates_in_groups_of_three() -> None:
    assert schedule("varuna", 4, 8, recompute=True) == [
        "F0 F1 F2 F3 F4 F5 F6 F7 R0 B0 R1 B1 R2 B2 R3 B3 R4 B4 R5 B5 R6 B6 R7 B7",
        "F0 F1 F2 F3 F4 F5 R0 B0 R1 B1 R2 B2 F6 F7 R3 B3 R4 B4 R5 B5 R6 B6 R7 B7",
        "F0 F1 F2 R0 B0 R1 B1 R2 B2 F3 F4 F5 R3 B3 R4 B4 R5 B5 F6 F7 R6 B6 R7 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_varuna_without_recompute_sends_the_gradient_after_the_backward() -> None:
    # Quanta of the last stage: F0 at 2, B0 at 3 and 4; so B0 at stage 1 from 5 on, by
    # when it has had time for the forwards of quanta 1 to 4.
    assert schedule("varuna", 3, 6, recompute=False) == [
        "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5",
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_1f1b_keeps_no_more_in_flight_than_stages_follow() -> None:
    assert schedule("1f1b", 3, 4, recompute=False) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_runs_all_forwards_first() -> None:
    assert schedule("gpipe", 2, 3, recompute=True) == [
        "F0 F1 F2 R0 B0 R1 B1 R2 B2",
        "F0 F1 F2 B0 B1 B2",
    ]


@pytest.mark.rotated
def test_a_schedule_of_many_micro_batches_is_whole_and_fast() -> None:
    begin_s = time.process_time()
    lists = make_schedule("varuna", 8, 20_000, recompute=True)
    # A second on an idle machine; minutes if time grew with the square.
    assert time.process_time() - begin_s < 60
    assert [len(tasks) for tasks in lists] == [60_000] * 7 + [40_000]


@pytest.mark.parametrize(("depth", "count"), [(0, 1), (1, 0), (-1, 3)])
def test_a_schedule_of_nothing_is_refused(depth: int, count: int) -> None:
    with pytest.raises(PlanError, match="needs a stage and a micro-batch"):
        make_schedule("varuna", depth, count, recompute=True)


@given(kinds, depths, counts, st.booleans())
def test_every_stage_does_each_micro_batch_once_and_in_order(
    kind: ScheduleKind, depth: int, count: int, recompute: bool
) -> None:
    lists = make_schedule(kind, depth, count, recompute=recompute)
    for p, stage in enumerate(lists):
        again = recompute and p < depth - 1
        for work in Work:
            expected = range(count) if work is not Work.RECOMPUTE or again else []
            assert [t.microbatch for t in stage if t.work is work] == list(expected)
        for j in range(count):
            place = {t.work: i for i, t in enumerate(stage) if t.microbatch == j}
            assert place[Work.FORWARD] < place[Work.BACKWARD]
            if again:
                assert place[Work.RECOMPUTE] == place[Work.BACKWARD] - 1


@given(kinds, depths, counts, st.booleans())
def test_stages_that_only_follow_their_lists_never_wait_for_each_other_in_a_ring(
    kind: ScheduleKind, depth: int, count: int, recompute: bool
) -> None:
    lists = make_schedule(kind, depth, count, recompute=recompute)
    done: set[tuple[int, Task]] = set()
    positions = [0] * depth
    moved = True
    while moved:
        moved = False
        for p, stage in enumerate(lists):
            while positions[p] < len(stage):
                task = stage[positions[p]]
                near = p - 1 if task.work is Work.FORWARD else p + 1
                is_local = task.work is Work.RECOMPUTE or not 0 <= near < depth
                if not is_local and (near, task) not in done:
                    break
                done.add((p, task))
                positions[p] += 1
                moved = True
    assert positions == [len(stage) for stage in lists]


@given(depths, counts)
def test_peaks_of_1f1b_and_gpipe_are_known(depth: int, count: int) -> None:
    for p, stage in enumerate(make_schedule("1f1b", depth, count, recompute=True)):
        assert max_in_flight(stage) == min(depth - p, count)
    for stage in make_schedule("gpipe", depth, count, recompute=False):
        assert max_in_flight(stage) == count


# --- next_task --------------------------------------------------------------------------


def progress(text: str, *, bound: int | None = None, done: str = "") -> StageProgress:
    """A middle stage where everything in ``done`` has arrived and been run."""
    stage = StageProgress(tasks(text), first=False, last=False, bound=bound)
    for task in tasks(done):
        if task.work is Work.FORWARD:
            stage.activation_arrived()
        elif task.work is Work.BACKWARD:
            stage.gradient_arrived()
        stage.completed(task)
    return stage


VARUNA = "F0 F1 F2 R0 B0 R1 B1 R2 B2 F3 R3 B3"


def test_nothing_runs_before_its_input_is_here() -> None:
    stage = progress(VARUNA)
    assert stage.next_task() is None
    stage.activation_arrived()
    assert stage.next_task() == Task(Work.FORWARD, 0)


def test_a_recompute_in_its_turn_does_not_wait_for_the_gradient() -> None:
    stage = progress(VARUNA, done="F0 F1 F2")
    assert stage.next_task() == Task(Work.RECOMPUTE, 0)


def test_a_forward_goes_before_a_recompute_whose_gradient_is_late() -> None:
    stage = progress(VARUNA, bound=4, done="F0 F1 F2")
    stage.activation_arrived()
    assert stage.next_task() == Task(Work.FORWARD, 3)
    stage.gradient_arrived()
    assert stage.next_task() == Task(Work.RECOMPUTE, 0)


def test_a_forward_goes_before_a_backward_whose_gradient_is_late() -> None:
    stage = progress(VARUNA, bound=4, done="F0 F1 F2 R0")
    assert stage.next_task() is None
    stage.activation_arrived()
    assert stage.next_task() == Task(Work.FORWARD, 3)
    stage.completed(Task(Work.FORWARD, 3))
    assert stage.next_task() is None
    stage.gradient_arrived()
    assert stage.next_task() == Task(Work.BACKWARD, 0)


def test_the_bound_is_that_of_the_list_unless_another_is_given() -> None:
    stage = progress(VARUNA, done="F0 F1 F2 R0")
    stage.activation_arrived()
    assert stage.next_task() is None


def test_a_backward_goes_before_a_forward_whose_activation_is_late() -> None:
    stage = progress(VARUNA, done="F0")
    stage.gradient_arrived()
    assert stage.next_task() == Task(Work.RECOMPUTE, 0)
    stage.completed(Task(Work.RECOMPUTE, 0))
    assert stage.next_task() == Task(Work.BACKWARD, 0)


def test_a_recompute_out_of_turn_waits_for_its_gradient() -> None:
    assert progress(VARUNA, done="F0 F1").next_task() is None


def test_a_stage_that_may_not_forward_recomputes_ahead() -> None:
    stage = progress(VARUNA, bound=1, done="F0")
    assert stage.next_task() == Task(Work.RECOMPUTE, 0)


def test_a_forward_directly_before_its_own_recompute_keeps_its_graph() -> None:
    stage = progress(VARUNA, done="F0 F1 F2 R0 B0 R1 B1 R2 B2")
    assert stage.keeps_graph(Task(Work.FORWARD, 3))
    stage.activation_arrived()
    stage.completed(Task(Work.FORWARD, 3))
    assert stage.next_task() is None
    stage.gradient_arrived()
    assert stage.next_task() == Task(Work.BACKWARD, 3)


def test_a_forward_that_ran_ahead_keeps_no_graph() -> None:
    stage = progress(VARUNA, bound=4, done="F0 F1 F2 R0")
    assert not stage.keeps_graph(Task(Work.FORWARD, 3))


def test_a_stage_without_recompute_keeps_every_graph() -> None:
    stage = progress("F0 F1 B0 B1")
    assert stage.keeps_graph(Task(Work.FORWARD, 0))


class Watched:
    """A stage, what it ran, and the graphs it must hold for that."""

    def __init__(self, stage: StageProgress) -> None:
        self.stage = stage
        self.history: list[Task] = []
        self.graphs: set[int] = set()

    def run(self) -> Task:
        task = self.stage.next_task()
        assert task is not None
        self.history.append(task)
        j = task.microbatch
        if task.work is Work.BACKWARD:
            self.graphs.remove(j)
        elif task.work is Work.RECOMPUTE or self.stage.keeps_graph(task):
            assert j not in self.graphs
            self.graphs.add(j)
        self.stage.completed(task)
        assert 0 <= self.stage.in_flight <= self.stage.bound
        sets = 1 if self.stage.recomputes else self.stage.bound
        assert len(self.graphs) <= sets
        return task

    def receive(self, work: Work) -> None:
        if work is Work.FORWARD:
            self.stage.activation_arrived()
        else:
            self.stage.gradient_arrived()


@given(
    kinds,
    depths,
    counts,
    st.booleans(),
    st.none() | st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_any_delays_leave_memory_bounded_orders_ascending_and_all_done(
    kind: ScheduleKind,
    depth: int,
    count: int,
    recompute: bool,
    bound: int | None,
    random: Random,
) -> None:
    stages = [
        Watched(StageProgress(tasks, first=p == 0, last=p == depth - 1, bound=bound))
        for p, tasks in enumerate(make_schedule(kind, depth, count, recompute=recompute))
    ]
    on_links: list[tuple[int, Work]] = []
    while not all(watched.stage.done for watched in stages):
        ready = [(p, None) for p, w in enumerate(stages) if w.stage.next_task()]
        p, arriving = random.choice([*ready, *on_links])
        if arriving is not None:
            on_links.remove((p, arriving))
            stages[p].receive(arriving)
            continue
        task = stages[p].run()
        to = {Work.FORWARD: p + 1, Work.BACKWARD: p - 1}.get(task.work, -1)
        if 0 <= to < depth:
            on_links.append((to, task.work))
    for watched in stages:
        for work in (Work.FORWARD, Work.BACKWARD):
            ran = [t.microbatch for t in watched.history if t.work is work]
            assert ran == list(range(count))
