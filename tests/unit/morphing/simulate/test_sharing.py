"""Slots that share the cores of one computer take at least their work over the cores."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tests.unit.morphing.steps import FACTS, PROFILE, plan

from spottrain.morphing.simulate.reducing import Reducer, gather_s
from spottrain.morphing.simulate.sharing import OWN_CORE, SharedCores, shared_cores
from spottrain.morphing.simulate.simulator import (
    StepTime,
    expect_step,
    simulate_step,
    stale_step,
)


def on_one(ranks: int, cores: int) -> SharedCores:
    return SharedCores(computers=(0,) * ranks, cores=(cores,))


def test_only_computers_whose_slots_leave_no_core_over_are_shared() -> None:
    assert shared_cores([("a", 3), ("a", 3), ("b", 1), ("", 0), ("", 0)]) is None
    assert shared_cores([("a", 2), ("a", 2), ("b", 1)]) == SharedCores(
        computers=(0, 0, OWN_CORE), cores=(2,)
    )
    assert shared_cores([("a", 1), ("b", 2), ("a", 1), ("", 0)]) == SharedCores(
        computers=(0, OWN_CORE, 0, OWN_CORE), cores=(1,)
    )


def test_a_computer_counts_as_shared_if_the_fleets_slots_leave_no_core_over() -> None:
    fleet = [("a", 3)] * 3 + [("b", 2)]
    ranks = [("b", 2), ("a", 3), ("a", 3)]
    assert shared_cores(ranks) is None
    assert shared_cores(ranks, fleet) == SharedCores(computers=(OWN_CORE, 0, 0), cores=(3,))


def test_the_busiest_computer_bounds_a_time() -> None:
    sharing = SharedCores(computers=(0, 1, 0, OWN_CORE), cores=(2, 1))
    assert sharing.least_s([1.0, 1.5, 3.0, 9.0]) == 2.0
    assert sharing.least_s([1.0, 3.0, 3.0, 9.0]) == 3.0


def test_a_step_takes_its_work_over_the_cores_from_its_tasks_to_its_updates() -> None:
    some = plan(2, 2, 8)
    alone, same, one = (
        simulate_step(some, PROFILE, FACTS, reduction="fast", sharing=sharing)
        for sharing in (None, on_one(4, 4), on_one(4, 1))
    )
    assert same == alone
    assert one.busy_s == alone.busy_s == (24.0, 24.0)
    assert one.pipeline_s == 4 * 24.0
    stage_bytes = sum(section.param_bytes for section in FACTS.sections[:2])
    sum_s = Reducer(some, PROFILE, "fast").sum_s(0, stage_bytes)
    update_s = stage_bytes * PROFILE.optimizer_s_per_byte
    assert one.step_s == pytest.approx(4 * (24.0 + sum_s + update_s) + gather_s(PROFILE, 4, True))


@pytest.mark.parametrize("step", [expect_step, stale_step])
def test_a_step_is_slower_on_fewer_cores(step: Callable[..., StepTime]) -> None:
    some = plan(2, 2, 200)
    times_s = [
        step(some, PROFILE, FACTS, reduction="fast", sharing=on_one(4, cores)).step_s
        for cores in (4, 2, 1)
    ]
    assert times_s[0] < times_s[1] < times_s[2]


def test_a_replica_elsewhere_leaves_the_cores_to_the_other() -> None:
    apart = SharedCores(computers=(0, 0, OWN_CORE, OWN_CORE), cores=(1,))
    some = plan(2, 2, 2000)
    alone = simulate_step(some, PROFILE, FACTS, reduction="fast")
    mixed = simulate_step(some, PROFILE, FACTS, reduction="fast", sharing=apart)
    assert mixed.pipeline_s == pytest.approx(math.fsum(alone.busy_s))
