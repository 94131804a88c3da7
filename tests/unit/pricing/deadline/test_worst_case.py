"""The guarantee: limits are kept, and attempts at spot VMs waste little, on any market."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.pricing.deadline_jobs import FLEET, ON_DEMAND, spot, status

from spottrain.pricing.deadline.model import Beginning, Fleet, Holdings, JobStatus
from spottrain.pricing.deadline.tuning import SMALL_FLEET, WASTE
from spottrain.pricing.deadline.worst_case import WorstCase
from spottrain.units import HOUR_S
from spottrain_lab.markets.baselines import CostOptimal, TimeOptimal
from spottrain_lab.markets.replay import play
from spottrain_lab.markets.scenarios import Scenario, Zone, harsh, prolonged

MARKET = (spot(), ON_DEMAND)


def most_usd(job: Scenario) -> float:
    """On-demand VMs alone, and one in a hundred more, or one attempt with the fleet."""
    fleet, (_, alone_usd) = job.fleet, job.on_demand()
    if fleet.max_vms <= SMALL_FLEET:
        return alone_usd * (1 + WASTE)
    attempt_s = fleet.boot_s + 2 * fleet.morph_s + fleet.lost_s
    attempt_usd = fleet.max_vms * job.on_demand_usd_per_hour * attempt_s / HOUR_S
    return alone_usd + max(WASTE * alone_usd, attempt_usd)


@pytest.mark.rotated
@given(st.integers(0, 10**9), st.sampled_from((CostOptimal, TimeOptimal)))
@example(seed=23, rule=CostOptimal)
def test_limits_and_the_bound_of_waste_are_kept_on_harsh_markets(
    seed: int, rule: type[CostOptimal]
) -> None:
    job = harsh(seed)
    outcome = play(prolonged(job), rule())
    assert outcome.in_time
    assert outcome.in_budget
    assert outcome.usd <= most_usd(job) * (1 + 1e-9)


@pytest.mark.parametrize("slack", [2.0, 10.0])
def test_where_vms_die_as_they_boot_it_ends_on_demand(slack: float) -> None:
    fleet = Fleet(examples_per_s=(0.0, 1.0))
    lives = [(60.0 * n, 60.0 * n + 0.9 * fleet.boot_s) for n in range(20_000)]
    train_s = 20 * HOUR_S
    job = Scenario(
        name="by hand",
        zones=(Zone(name="zone", lives=tuple(lives), usd_per_hour=(0.9,)),),
        on_demand_usd_per_hour=3.0,
        notice_s=0.0,
        fleet=fleet,
        examples=train_s,
        deadline_s=slack * train_s,
        max_usd=math.inf,
    )
    outcome = play(replace(job, max_usd=10 * job.on_demand()[1]), CostOptimal())
    assert outcome.in_time
    assert 1.0 < outcome.usd / job.on_demand()[1] <= 1 + WASTE
    assert 1 < outcome.launches < 40


def survived(at: JobStatus, *held: Holdings, **wanted: int) -> bool:
    worst = WorstCase(at, FLEET, MARKET, held)
    named = {name.replace("_", "-"): count for name, count in wanted.items()}
    return worst.is_survived(named, worst.attempts_usd)


def test_what_on_demand_vms_still_boot_is_paid_and_waited_for() -> None:
    boot_usd = 4 * 3.0 * FLEET.boot_s / HOUR_S
    at = status(hours=5 + 120 / HOUR_S, work=5, usd=4 * 3.0 * (5 + 120 / HOUR_S))
    assert survived(at, on_demand=4)
    assert not survived(at)  # another review is too late
    booting = Holdings(name="on-demand", ready=0, booting=4, boots_s=(40.0,) * 4)
    later = replace(at, now_s=60.0, usd_left=at.usd_limit - 0.6 * boot_usd)
    assert survived(later, booting, on_demand=4)
    assert not survived(later, booting, on_demand=3)  # nor can one be paid twice


def test_a_spot_vm_needs_money_for_its_boot_a_review_and_what_is_lost_with_it() -> None:
    alone_usd = 12.0 * (5 + 120 / HOUR_S)
    # 100 s of boot and 60 s at 1 USD an hour, and nothing else of the fleet waits for it.
    needs_usd = 160 / HOUR_S
    for left_usd, is_enough in ((-0.001, False), (0.001, True)):
        at = status(hours=5.2, work=5, usd=alone_usd + needs_usd + left_usd)
        assert survived(at, spot=1) is is_enough
        unsaved = replace(at, examples_unsaved=0.0, examples_per_checkpoint=340.0)
        assert not survived(unsaved, spot=1)


def test_work_that_is_not_saved_counts_only_without_spot_vms() -> None:
    held = (Holdings(name="on-demand", ready=3), Holdings(name="spot", ready=1))
    at = replace(status(hours=5, work=5), examples_unsaved=0.1 * HOUR_S * FLEET.rates[-1])
    assert survived(at, *held, on_demand=4)
    assert not survived(at, *held, on_demand=3, spot=1)


def test_the_bound_starts_when_limits_are_set_and_moves_with_them() -> None:
    at = status(hours=20, work=5)
    alone_usd = 12.0 * (5 + 120 / HOUR_S)
    begun = Beginning(examples=at.examples_left, usd_spent=0.0)
    worst = WorstCase(replace(at, begun=begun), FLEET, MARKET, ())
    assert worst.attempts_usd == pytest.approx(alone_usd * (1 + WASTE))
    spent = replace(at, begun=replace(begun, usd_spent=10.0))
    worst = WorstCase(spent, FLEET, MARKET, ())
    assert worst.attempts_usd == pytest.approx(alone_usd * (1 + WASTE) - 10.0)
