"""Slots that share the cores of one computer take turns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.pipelines import pipelines
from tests.unit.morphing.steps import FACTS, PROFILE, plan

from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.simulate.replica import Link, StageTimes, simulate_pipeline
from spottrain.morphing.simulate.sharing import OWN_CORE, SharedCores, shared_cores
from spottrain.morphing.simulate.simulator import simulate_step
from spottrain.wire.model import Crowding

NEAR = 1e-6
"""Tasks end at whole nanoseconds."""
works = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 7.0]), st.floats(0, 9)), min_size=1)
Pipeline = tuple[Schedule, list[StageTimes], list[Link]]


CROWDING = Crowding(
    ranks=4,
    cores=2,
    task_growth=1.5,
    core_growth=1.25,
    commit_s_per_byte=0.01,
    commit_s=3.0,
)


def on_one(ranks: int, cores: int) -> SharedCores:
    return SharedCores(computers=(0,) * ranks, cores=(cores,))


@given(works, st.integers(1, 4))
def test_works_on_shared_cores_take_at_least_their_time_and_lose_none(
    given_works: list[tuple[float, float]], cores: int
) -> None:
    ready_s, works_s = map(list, zip(*given_works, strict=True))
    done_s = on_one(len(works_s), cores).finish_s(ready_s, works_s)
    for at_s, work_s, end_s in zip(ready_s, works_s, done_s, strict=True):
        assert end_s >= at_s + work_s - NEAR
    total_s = math.fsum(works_s)
    assert max(done_s) >= min(ready_s) + total_s / cores - NEAR
    # While the last one runs, either all cores are busy or it has one of its own.
    assert max(done_s) <= max(ready_s) + total_s / cores + max(works_s) + NEAR


def test_equal_works_share_cores_equally() -> None:
    assert on_one(3, 2).finish_s([0.0] * 3, [1.0] * 3) == [1.5] * 3
    assert on_one(3, 2).finish_s([0.0, 0.0, 5.0], [1.0] * 3) == [1.0, 1.0, 6.0]
    apart = SharedCores(computers=(0, 0, OWN_CORE), cores=(1,))
    assert apart.finish_s([0.0] * 3, [1.0] * 3) == [2.0, 2.0, 1.0]


def test_only_computers_whose_slots_leave_no_core_over_are_shared() -> None:
    assert shared_cores([("a", 3), ("a", 3), ("b", 1), ("", 0), ("", 0)]) is None
    assert shared_cores([("a", 2), ("a", 2), ("b", 1)]) == SharedCores(
        computers=(0, 0, OWN_CORE), cores=(2,)
    )
    assert shared_cores([("a", 1), ("b", 2), ("a", 1), ("", 0)]) == SharedCores(
        computers=(0, OWN_CORE, 0, OWN_CORE), cores=(1,)
    )


@given(st.lists(st.integers(0, 2), min_size=1, max_size=3), st.data())
def test_replicas_get_all_cores_by_their_work(computers: list[int], data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    used = sorted(set(computers))
    computers = [used.index(computer) for computer in computers]
    cores = (1, 2, 3)[: len(used)]
    sharing = SharedCores(computers=tuple(computers) * len(counts), cores=cores)
    every = sharing.of_replicas(len(computers), counts)
    for computer in set(computers):
        parts = [own[computer] for _, own in every]
        assert math.fsum(parts) == pytest.approx(cores[computer])
        assert parts[0] * counts[-1] == pytest.approx(parts[-1] * counts[0])


@given(pipelines())
def test_a_core_for_each_stage_changes_nothing(pipeline: Pipeline) -> None:
    depth = len(pipeline[1])
    shares = ((0,) * depth, (float(depth),))
    assert simulate_pipeline(*pipeline, shares=shares) == simulate_pipeline(*pipeline)


@given(pipelines(), st.sampled_from([0.5, 1.0, 1.5, 2.0]))
def test_a_pipeline_on_few_cores_takes_at_least_its_work_over_them(
    pipeline: Pipeline, cores: float
) -> None:
    shares = ((0,) * len(pipeline[1]), (cores,))
    run = simulate_pipeline(*pipeline, shares=shares)
    assert max(run.finish_s) >= math.fsum(run.busy_s) / cores - NEAR
    assert max(run.finish_s) >= max(run.busy_s) / min(1.0, cores) - NEAR


@given(pipelines())
def test_a_pipeline_on_one_core_takes_its_work_and_the_way_of_its_messages(
    pipeline: Pipeline,
) -> None:
    schedule, stages, _ = pipeline
    links = [Link()] * (len(stages) - 1)
    run = simulate_pipeline(schedule, stages, links, shares=((0,) * len(stages), (1.0,)))
    assert max(run.finish_s) == pytest.approx(math.fsum(run.busy_s))


def test_bubbles_leave_cores_to_others() -> None:
    # Two stages on one core and a half: each alone at first and at last, then both.
    stage = StageTimes(forward_s=1.0, recompute_s=0.0, backward_s=1.0)
    schedule = compact_schedule("gpipe", 2, 2, recompute=False)
    run = simulate_pipeline(schedule, [stage] * 2, [Link()], shares=((0, 0), (1.5,)))
    # F1 | F2 F1 | F2 | B1 | B2 B1 | B2: two of six moments are shared.
    assert max(run.finish_s) == pytest.approx(4 * 1.0 + 2 * 2 / 1.5)


def test_a_step_shares_its_cores_to_the_end() -> None:
    some = plan(2, 2, 8)
    alone = simulate_step(some, PROFILE, FACTS, reduction="fast")
    same = simulate_step(some, PROFILE, FACTS, reduction="fast", sharing=on_one(4, 4))
    assert same.step_s == pytest.approx(alone.step_s)
    half = simulate_step(some, PROFILE, FACTS, reduction="fast", sharing=on_one(4, 2))
    one = simulate_step(some, PROFILE, FACTS, reduction="fast", sharing=on_one(4, 1))
    assert alone.step_s < half.step_s < one.step_s
    assert one.pipeline_s >= 2 * math.fsum(one.busy_s)


@pytest.mark.parametrize(("depth", "cores"), [(2, 1), (4, 2), (4, 3)])
def test_long_mini_batches_take_all_their_work_over_the_cores(depth: int, cores: int) -> None:
    """They are not simulated as a whole."""
    count = 100_000
    long = simulate_step(
        plan(depth, 1, count),
        PROFILE,
        FACTS,
        reduction="fast",
        sharing=on_one(depth, cores),
    )
    work_s = math.fsum(long.busy_s)
    assert work_s >= count * 4 * 3.0 - NEAR
    assert work_s / cores <= long.pipeline_s <= work_s / cores * 1.05


def test_a_replica_elsewhere_is_as_fast_as_ever() -> None:
    apart = SharedCores(computers=(0, 0, OWN_CORE, OWN_CORE), cores=(1,))
    some = plan(2, 2, 2000)
    alone = simulate_step(some, PROFILE, FACTS, reduction="fast")
    mixed = simulate_step(some, PROFILE, FACTS, reduction="fast", sharing=apart)
    assert mixed.pipeline_s > 1.5 * alone.pipeline_s


@given(st.integers(1, 20), st.integers(1, 4))
def test_tasks_grow_with_the_ranks_per_core_up_to_what_was_measured(ranks: int, cores: int) -> None:
    grown = on_one(ranks, cores).task_growth(0, CROWDING)
    assert 1.25 <= grown <= CROWDING.task_growth
    assert grown <= on_one(ranks + 1, cores).task_growth(0, CROWDING)
    if ranks <= cores:
        assert grown == 1.25
    if ranks == 2 * cores:
        assert grown == pytest.approx(CROWDING.task_growth)
    assert on_one(ranks, cores).task_growth(0, None) == 1
    steps = replace(CROWDING, step_growth=1.5)
    assert on_one(ranks, cores).step_growth(steps) == 1.5
    assert on_one(ranks, cores).step_growth(None) == 1
    assert SharedCores((OWN_CORE,) * ranks, ()).step_growth(steps) == 1
    assert SharedCores((OWN_CORE,) * ranks, (1,)).task_growth(0, CROWDING) == 1


def test_a_computer_counts_as_shared_if_the_fleets_slots_leave_no_core_over() -> None:
    fleet = [("a", 3)] * 3 + [("b", 2)]
    ranks = [("b", 2), ("a", 3), ("a", 3)]
    assert shared_cores(ranks) is None
    assert shared_cores(ranks, fleet) == SharedCores(computers=(OWN_CORE, 0, 0), cores=(3,))


def test_a_step_in_a_crowd_takes_its_tasks_and_commits_as_measured() -> None:
    some, crowded = plan(1, 4, 4), replace(PROFILE, crowding=CROWDING)
    before, after = (
        simulate_step(some, profile, FACTS, reduction="fast", sharing=on_one(4, 2))
        for profile in (PROFILE, crowded)
    )
    assert after.pipeline_s == pytest.approx(1.5 * before.pipeline_s)
    # Each of four ranks on two cores: its own part twice as long.
    param_bytes = sum(section.param_bytes for section in FACTS.sections)
    update_s = 2 * param_bytes * PROFILE.optimizer_s_per_byte
    commit_s = 2 * (param_bytes * CROWDING.commit_s_per_byte + CROWDING.commit_s)
    sums_s = before.step_s - before.pipeline_s - update_s - 2 * 0.25
    grown_s = after.step_s - after.pipeline_s - commit_s - 2 * 0.25
    assert grown_s == pytest.approx(1.5 * sums_s)
    waits = replace(PROFILE, crowding=replace(CROWDING, step_growth=1.2))
    waiting = simulate_step(some, waits, FACTS, reduction="fast", sharing=on_one(4, 2))
    assert waiting.step_s == pytest.approx(1.2 * after.step_s)


def test_a_crowd_changes_nothing_where_each_has_a_core() -> None:
    crowded = replace(PROFILE, crowding=CROWDING)
    for sharing in (None, SharedCores(computers=(OWN_CORE,) * 4, cores=())):
        assert simulate_step(
            plan(2, 2, 8), crowded, FACTS, reduction="fast", sharing=sharing
        ) == simulate_step(plan(2, 2, 8), PROFILE, FACTS, reduction="fast", sharing=sharing)
