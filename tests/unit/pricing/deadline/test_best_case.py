"""The best case: what no luck with spot VMs can better."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pricing.deadline_jobs import FLEET, ON_DEMAND, spot, status

from spottrain.pricing.deadline.best_case import best_case, feasible_at_best, too_slow
from spottrain.pricing.deadline.model import Holdings
from spottrain.pricing.deadline.tuning import BEST_CASE_TIME
from spottrain.units import HOUR_S


def test_the_best_case_has_all_the_vms_at_once_at_the_lowest_price() -> None:
    found = best_case(status(hours=None, work=10), FLEET, (spot(usd=0.5), ON_DEMAND))
    assert found is not None
    assert (found.vms, found.usd_per_hour) == (4, 0.5)
    assert found.takes_s == pytest.approx(100.0 + BEST_CASE_TIME * 10 * HOUR_S)
    # One VM trains most for its money, however long it takes.
    assert found.usd == pytest.approx(0.5 * (BEST_CASE_TIME * 34 + 100.0 / HOUR_S))


def test_rented_vms_need_no_boot_and_the_reserve_is_paid() -> None:
    at = replace(status(hours=None, work=10), reserve_s=720.0)
    found = best_case(at, FLEET, (spot(),), (Holdings(name="spot", ready=0, booting=1),))
    assert found is not None
    assert found.takes_s == pytest.approx(BEST_CASE_TIME * 10 * HOUR_S)
    assert found.usd == pytest.approx(BEST_CASE_TIME * 34 + 0.2)


def test_the_hourly_cap_bounds_the_fleet() -> None:
    found = best_case(status(hours=None, work=10, cap=2.0), FLEET, (spot(),))
    assert found is not None
    assert found.vms == 2


@pytest.mark.parametrize("cap", [0.5, None])
def test_without_available_vms_there_is_no_best_case(cap: float | None) -> None:
    at = status(hours=1, work=1000, usd=1.0, cap=cap)
    supplies = () if cap is None else (spot(),)
    assert best_case(at, FLEET, supplies) is None
    answer = feasible_at_best(at, FLEET, supplies)
    assert (answer.possible, answer.reason) == (True, "")
    fast = replace(at, min_examples_per_s=3.4 / BEST_CASE_TIME)
    assert not too_slow(fast, FLEET, None)
    assert "4 VMs train 3.78" in too_slow(replace(fast, min_examples_per_s=3.8), FLEET, None)


def test_a_small_budget_is_reported_and_no_obstacle_without_a_deadline() -> None:
    at = status(hours=None, work=1000, usd=5.0)
    answer = feasible_at_best(at, FLEET, (spot(),))
    assert answer.possible
    assert answer.reason == (
        "the budget ends the job before it is done: without preemptions and at today's lowest "
        "price of $1.00 per hour it costs $3,060.03, left to spend: $5.00; raise the budget "
        "to $3,060.03 at least"
    )
    soon = feasible_at_best(replace(at, deadline_s=1e9), FLEET, (spot(),))
    assert not soon.possible
    assert soon.min_usd == pytest.approx(3060.03, abs=0.01)


def test_all_limits_out_of_reach_are_reported_together() -> None:
    at = replace(status(hours=1, work=1000, usd=5.0), min_examples_per_s=1e9)
    answer = feasible_at_best(at, FLEET, (spot(),))
    assert not answer.possible
    for part in (
        "deadline and budget cannot both be met: 4 VMs without preemptions need 900.",
        "h, the deadline is in 1.000 h",
        "slo.min_examples_per_s: 1e+09 is out of reach: 4 VMs train 3.78 examples/s",
        "move the deadline to 900.05 h from now at the earliest",
        "raise the budget to",
        "lower slo.min_examples_per_s",
    ):
        assert part in answer.reason


@given(
    hours=st.floats(0.001, 100),
    work=st.floats(0.01, 50),
    usd=st.floats(0.0, 1000),
    least=st.floats(0.01, 10),
)
def test_suggested_limits_can_be_met(hours: float, work: float, usd: float, least: float) -> None:
    at = replace(status(hours=hours, work=work, usd=usd), min_examples_per_s=least)
    answer = feasible_at_best(at, FLEET, (spot(),))
    assert answer.possible == (not answer.reason)
    if deadline := re.search(r"deadline to ([0-9.,]+) h", answer.reason):
        at = replace(at, deadline_s=float(deadline[1].replace(",", "")) * HOUR_S)
    if budget := re.search(r"budget to \$([0-9.,]+[0-9])", answer.reason):
        at = replace(at, usd_left=float(budget[1].replace(",", "")))
    if "lower slo" in answer.reason:
        at = replace(at, min_examples_per_s=None)
    assert feasible_at_best(at, FLEET, (spot(),)).possible


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    usd=st.floats(0.1, 100.0),
    hours=st.floats(0.01, 30.0),
)
def test_no_fleet_meets_a_limit_out_of_reach(sizes: list[int], usd: float, hours: float) -> None:
    """A fleet of any sizes, half an hour each, that boots once."""
    trained = sum(FLEET.rates[size] for size in sizes) * 0.5 * HOUR_S
    took_s = FLEET.boot_s + 0.5 * HOUR_S * len(sizes)
    cost = sum(sizes) * 0.5 + max(sizes) * FLEET.boot_s / HOUR_S
    work = trained / HOUR_S / FLEET.rates[-1]
    at = status(hours=hours, work=work, usd=usd)
    if took_s <= hours * HOUR_S and cost <= usd:
        assert feasible_at_best(at, FLEET, (spot(),)).possible
