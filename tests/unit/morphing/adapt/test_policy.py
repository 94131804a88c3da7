"""The morph policy: what pays, what waits, and what is replaced at once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.plan.test_choose import inputs

from spottrain.morphing.adapt.policy import (
    CAUTION,
    UNSEEN_SHARE,
    FleetOutlook,
    MorphOption,
    break_even_s,
    capped_slowdown,
    handover_at_s,
    lag_share,
    morph_at_s,
    slowdown,
)
from spottrain.morphing.plan.choose import choose_plan

CALM = FleetOutlook(since_s=0.0, losses_at_s=(), changed_at_s=0.0, debounce_s=2.0)
SLOW = MorphOption(examples_per_s=10.0)
FAST = MorphOption(examples_per_s=20.0, cost_s=10.0)
"""Has made up for its cost after 20 s."""
times = st.floats(0.0, 1e6)
rates = st.floats(0.1, 1e3)
moments = st.lists(times, max_size=20).map(sorted)


def outlook(losses_at_s: list[float], changed_at_s: float = 0.0) -> FleetOutlook:
    return replace(CALM, losses_at_s=losses_at_s, changed_at_s=changed_at_s)


def test_a_fleet_is_trusted_as_long_as_it_has_been_quiet() -> None:
    assert morph_at_s(SLOW, FAST, CALM, left_s=1e6) == 20.0
    assert morph_at_s(SLOW, FAST, outlook([5.0]), left_s=1e6) == 25.0
    rough = outlook([10.0 * i for i in range(60)])
    assert morph_at_s(SLOW, FAST, rough, left_s=1e6) == 590 + 20


def test_a_fleet_that_used_to_be_quiet_for_long_is_trusted_at_once() -> None:
    calm = outlook([1000.0, 2000.0])
    assert calm.quiet_s(2000.0) == 2000 / 3
    assert morph_at_s(SLOW, FAST, calm, left_s=1e6) == 2000.0


def test_the_longer_it_is_quiet_the_less_short_quiet_times_count() -> None:
    mixed = outlook([3.0 * i for i in range(1, 11)] + [100.0])
    assert mixed.quiet_s(100.0) == pytest.approx((10 * 3 + 70) / 12)
    assert mixed.quiet_s(103.0) == pytest.approx((67 + 3) / 2)
    assert morph_at_s(SLOW, FAST, mixed, left_s=1e6) == 103.0


def test_a_burst_counts_as_one_loss() -> None:
    assert outlook([50.0, 51.0, 52.0]).quiet_s(52.0) == 50 / 2
    assert outlook([50.0, 51.0, 54.5]).quiet_s(54.5) == 53.5 / 3


def test_a_fleet_that_still_changes_is_waited_for() -> None:
    assert morph_at_s(SLOW, FAST, outlook([], changed_at_s=100.0), left_s=1e6) == 102.0


def test_a_plan_that_does_nothing_is_left_at_once() -> None:
    broken = MorphOption(examples_per_s=0.0)
    assert morph_at_s(broken, FAST, outlook([], changed_at_s=9.0), left_s=1.0) == 0.0


def test_a_morph_that_the_rest_of_the_job_cannot_make_up_for_is_declined() -> None:
    assert morph_at_s(SLOW, FAST, CALM, left_s=20.0) == math.inf


def test_a_plan_that_is_no_faster_never_pays() -> None:
    assert morph_at_s(FAST, SLOW, CALM, left_s=1e9) == math.inf


@given(moments, times, rates, rates, st.floats(0.1, 1e4))
def test_when_it_pays_the_quiet_time_to_expect_makes_up_for_the_cost(
    losses_at_s: list[float], changed_at_s: float, slow: float, more: float, cost: float
) -> None:
    seen = outlook(losses_at_s, changed_at_s)
    new = MorphOption(examples_per_s=slow + more, cost_s=cost)
    at_s = morph_at_s(MorphOption(examples_per_s=slow), new, seen, left_s=math.inf)
    last_s = max([0.0, *losses_at_s])
    quiet_s = seen.quiet_s(max(at_s, last_s) + 1e-6)  # past what it outlasts
    gained = (slow + more) * (quiet_s - cost) - slow * quiet_s
    assert at_s >= changed_at_s + 2.0
    assert gained >= -1e-6 * ((slow + more) * (cost + 1) + slow * quiet_s)


@given(moments, times, times)
def test_there_is_no_earlier_time_from_which_so_much_quiet_can_be_expected(
    losses_at_s: list[float], from_s: float, quiet_s: float
) -> None:
    seen = outlook(losses_at_s)
    at_s = seen.quiet_at_s(quiet_s, from_s)
    begin_s = max([from_s, *losses_at_s])
    assert at_s >= begin_s
    for share in (0.0, 0.3, 0.9):
        sooner_s = begin_s + share * (at_s - begin_s)
        if sooner_s < at_s:
            assert seen.quiet_s(sooner_s) <= quiet_s * (1 + 1e-9) + 1e-6


@given(moments, rates, rates, st.floats(0.1, 1e4), st.floats(1.0, 10.0))
def test_a_more_expensive_morph_never_pays_sooner(
    losses_at_s: list[float], slow: float, more: float, cost: float, factor: float
) -> None:
    seen, present = outlook(losses_at_s), MorphOption(examples_per_s=slow)
    cheap = MorphOption(examples_per_s=slow + more, cost_s=cost)
    costly = replace(cheap, cost_s=cost * factor)
    assert morph_at_s(present, cheap, seen, math.inf) <= morph_at_s(present, costly, seen, math.inf)


def test_a_notice_waits_for_others_but_not_past_a_quarter_of_its_lead() -> None:
    assert handover_at_s(10.0, 130.0, debounce_s=2.0) == 12.0
    assert handover_at_s(10.0, 14.0, debounce_s=2.0) == 11.0


def test_something_is_at_stake_before_the_first_loss_too() -> None:
    assert lag_share(CALM, 300.0, 100.0) == UNSEEN_SHARE
    assert lag_share(outlook([10.0]), 300.0, 610.0) == 0.5


def test_one_replica_falls_back_at_any_loss_and_three_hardly_ever() -> None:
    assert slowdown(8, 1, 0.5) == 1.5
    assert slowdown(8, 2, 0.45) == pytest.approx(1.03)
    assert slowdown(8, 3, 0.9) == 1.0


@given(st.integers(1, 100), st.integers(1, 100), st.floats(0.0, 1e6))
def test_little_speed_is_given_up_for_safety(depth: int, width: int, share: float) -> None:
    assert 1.0 <= capped_slowdown(depth, width, share) <= 1 + CAUTION


def test_where_losses_are_frequent_a_plan_that_survives_them_is_chosen() -> None:
    calm = inputs(vms=4, virtual_nodes=64)
    fastest = choose_plan(calm).plan
    rough = choose_plan(replace(calm, lag_share=0.5)).plan
    assert fastest is not None
    assert rough is not None
    assert rough.predicted_step_s <= fastest.predicted_step_s * (1 + CAUTION)
    assert rough.data_parallel_width >= fastest.data_parallel_width


def test_a_warm_spare_takes_the_lost_vm_s_place() -> None:
    fleet = inputs(vms=5, sections=4, virtual_nodes=16, memory_bytes=112 * 2**20)
    before = choose_plan(fleet).plan
    assert before is not None
    assert len(before.slots) == 4, "one is to spare"
    for lost in before.slots:
        left = tuple(d for d in fleet.slots if d.slot != lost)
        after = choose_plan(replace(fleet, slots=left, previous=before)).plan
        assert after is not None
        stages = [
            {slot: rank % plan.pipeline_depth for rank, slot in enumerate(plan.slots)}
            for plan in (before, after)
        ]
        (spare,) = stages[1].keys() - stages[0].keys()
        assert stages[1].pop(spare) == stages[0].pop(lost)
        assert stages[1] == stages[0], "who survives keeps its stage"


@pytest.mark.parametrize(
    ("current", "new", "cost_s", "expected_s"),
    [
        (10.0, 20.0, 10.0, 20.0),
        (10.0, 11.0, 10.0, 110.0),
        (10.0, 10.0, 0.0, math.inf),
        (10.0, 5.0, 1.0, math.inf),
        (10.0, 20.0, 0.0, 0.0),
        (0.0, 1.0, 200.0, 0.0),
        (0.0, 0.0, 1.0, math.inf),
    ],
)
def test_a_morph_pays_when_the_new_plan_lasts_long_enough(
    current: float, new: float, cost_s: float, expected_s: float
) -> None:
    assert break_even_s(current, new, cost_s) == pytest.approx(expected_s)
