"""Fast and slow devices in one job, from the choice of the plan to its predicted time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tests.unit.morphing.mixed_fleet import facts, fleet, inputs, profile, profile_at

from spottrain.morphing.plan.choose import NOISE, choose_plan
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.simulator import simulate_step
from spottrain.wire.plan import Plan, ScheduleKind


def chosen(
    devices: tuple[Device, ...],
    previous: Plan | None = None,
    schedule: ScheduleKind | None = "varuna",
) -> Plan:
    case = replace(inputs(devices, previous=previous), schedule=schedule)
    plan = choose_plan(case).plan
    assert plan is not None
    return plan


def speeds(plan: Plan, devices: tuple[Device, ...]) -> list[tuple[float, ...]]:
    """Return those of each replica's devices."""
    of_slot = {device.slot: device.speed for device in devices}
    every = [of_slot[slot] for slot in plan.slots]
    depth = plan.pipeline_depth
    return [tuple(every[i : i + depth]) for i in range(0, len(every), depth)]


def shares(plan: Plan) -> list[int]:
    return [b - a for a, b in itertools.pairwise(plan.replica_bounds)]


def test_two_fast_and_eight_slow_devices_beat_either_kind_alone() -> None:
    both = fleet((2, 4.0), (8, 1.0))
    together, fast, slow = (chosen(f) for f in (both, both[:2], both[2:]))
    own = speeds(together, both)
    assert all(len(set(one)) == 1 for one in own)
    assert own[0][0] == 4.0
    assert {one[0] for one in own[1:]} == {1.0}
    first, *others = shares(together)
    assert first == pytest.approx(4 * others[0], rel=0.1)
    assert max(others) - min(others) <= 1
    for alone in (fast, slow):
        assert alone.predicted_step_s > 1.7 * together.predicted_step_s


def test_shares_by_speed_beat_even_ones() -> None:
    both = fleet((2, 4.0), (8, 1.0))
    plan = chosen(both)
    width, last = plan.data_parallel_width, plan.replica_bounds[-1]
    even = replace(plan, replica_bounds=tuple(last * d // width for d in range(width + 1)))
    flat = [speed for own in speeds(plan, both) for speed in own]
    profiles = list(map(profile_at, flat))
    step = simulate_step(even, profile(), facts(), reduction="fast", profiles=profiles)
    assert step.step_s > 1.4 * plan.predicted_step_s


def test_devices_that_are_too_slow_are_left_out() -> None:
    both = fleet((4, 4.0), (2, 0.004))
    plan = chosen(both)
    assert {speed for own in speeds(plan, both) for speed in own} == {4.0}


def test_a_fast_pair_that_joins_becomes_a_replica_of_its_own() -> None:
    both = fleet((8, 1.0), (2, 4.0))
    before = chosen(both[:8])
    after = chosen(both, previous=before)
    assert after.predicted_step_s < 0.6 * before.predicted_step_s
    assert set(speeds(after, both)[0]) == {4.0}


@pytest.mark.parametrize("slow", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("minibatch_size", [96, 1024])
def test_interleaved_has_to_win_with_the_shares_that_it_can_give(
    slow: float, minibatch_size: int
) -> None:
    """They are multiples of the stages, so that a replica gets more or less than its
    speed deserves."""
    case = inputs(fleet((2, 1.0), (6, slow)), minibatch_size)
    other = choose_plan(replace(case, schedule="varuna")).plan
    free = choose_plan(case)
    best, rows = free.plan, free.candidates
    assert best is not None
    assert other is not None
    assert best.predicted_step_s <= other.predicted_step_s * (1 + NOISE)
    forced = choose_plan(replace(case, schedule="interleaved")).plan
    assert forced is not None
    of_slot = {device.slot: device.speed for device in case.slots}
    for plan in (best, forced):
        profiles = [profile_at(of_slot[slot]) for slot in plan.slots]
        step = simulate_step(plan, profile(), facts(), reduction="fast", profiles=profiles)
        assert plan.predicted_step_s == step.step_s
    assert all(share % forced.pipeline_depth == 0 for share in shares(forced))
    if best.chunks > 1:
        assert best.predicted_step_s < other.predicted_step_s * (1 - NOISE)
    else:
        assert best.predicted_step_s <= forced.predicted_step_s * (1 + NOISE)
    assert rows[0].schedule == best.schedule
