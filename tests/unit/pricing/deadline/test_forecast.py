"""Finish and cost to expect, also where nothing can be guaranteed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pricing.deadline_jobs import FLEET, ON_DEMAND, spot, status

from spottrain.pricing.deadline.forecast import forecast
from spottrain.pricing.deadline.model import Holdings, Supply
from spottrain.pricing.deadline.outlook import MarketOutlook, SpotQuote
from spottrain.units import HOUR_S

SPOT_ONLY = (spot(),)
BOTH = (spot(), ON_DEMAND)
SEEN = MarketOutlook(quotes=((SpotQuote("spot", 1.0, 4),),) * 9, sampled_at_s=0.0)


@pytest.mark.parametrize("supplies", [SPOT_ONLY, BOTH])
@pytest.mark.parametrize("hours", [None, 9.0])
def test_where_the_hourly_cap_allows_no_vm_there_is_no_finish(
    supplies: tuple[Supply, ...], hours: float | None
) -> None:
    at = status(hours=hours, work=5, cap=0.5)
    predicted = forecast(at, FLEET, supplies, (), SEEN, cost_optimal=False)
    assert predicted.finish_s.expected == predicted.finish_s.high == math.inf
    assert predicted.usd.expected == math.inf


def test_the_hourly_cap_slows_the_job_down() -> None:
    at = status(hours=None, work=5, cap=2.0)
    holdings = (Holdings(name="spot", ready=2),)
    for supplies in (SPOT_ONLY, (spot("b", 3.0), *SPOT_ONLY)):
        predicted = forecast(at, FLEET, supplies, holdings, SEEN)
        assert predicted.finish_s.expected == pytest.approx(5 * HOUR_S * 3.4 / 1.9)


def test_what_interruptions_waste_takes_nothing_from_the_cap() -> None:
    at = status(hours=None, work=5, cap=4.0)
    risky = replace(spot(), losses_per_hour=0.5)
    seen = MarketOutlook(quotes=((SpotQuote("spot", 1.0, 4),),) * 9)
    predicted = forecast(at, FLEET, (risky,), (), seen)
    assert predicted.finish_s.expected == pytest.approx(5 * HOUR_S)


@pytest.mark.parametrize("cost_optimal", [True, False])
def test_spot_vms_alone_have_no_latest_finish(cost_optimal: bool) -> None:
    at = status(hours=9, work=5)
    predicted = forecast(at, FLEET, SPOT_ONLY, (), SEEN, cost_optimal=cost_optimal)
    assert predicted.finish_s.expected == pytest.approx(5 * HOUR_S)
    assert predicted.finish_s.high == math.inf


def test_spot_vms_that_are_late_say_when_they_would_be_done() -> None:
    at = status(hours=1, work=5000)
    predicted = forecast(at, FLEET, SPOT_ONLY, (), SEEN)
    assert 1 * HOUR_S < predicted.finish_s.low < predicted.finish_s.expected < math.inf
    assert predicted.finish_s.high == math.inf


def test_late_on_demand_vms_finish_within_an_interval() -> None:
    predicted = forecast(status(hours=1, work=5000), FLEET, BOTH, (), SEEN)
    finish = predicted.finish_s
    assert finish.low < finish.expected < finish.high < math.inf
    assert finish.high - finish.low > 0.1 * finish.expected


@pytest.mark.parametrize("hours", [None, 1e6])
def test_a_budget_that_is_too_small_ends_the_job_first(hours: float | None) -> None:
    at = replace(status(hours=hours, work=5000, usd=5.0), reserve_s=900.0)
    predicted = forecast(at, FLEET, BOTH, (), SEEN)
    assert (
        predicted.finish_s.low == predicted.finish_s.expected == predicted.finish_s.high == math.inf
    )
    # A quarter of an hour of four VMs is kept back.
    assert (predicted.usd.low, predicted.usd.expected, predicted.usd.high) == (
        4.0,
        4.0,
        5.0,
    )


def test_a_job_whose_spot_vms_stayed_is_done_soon_and_one_without_any_near_its_deadline() -> None:
    lone = replace(FLEET, examples_per_s=(0.0, 1.0))
    at = replace(status(hours=40, work=0), examples_left=20 * HOUR_S)
    calm = MarketOutlook(quotes=((SpotQuote("spot", 1.0, 1),),) * 192)
    there = forecast(at, lone, BOTH, (Holdings(name="spot", ready=1),), calm)
    assert there.finish_s.low == pytest.approx(20 * HOUR_S)
    assert there.finish_s.low <= there.finish_s.expected < 21 * HOUR_S
    assert there.finish_s.high < 30 * HOUR_S
    dry = MarketOutlook(quotes=((),) * 192)
    away = forecast(at, lone, (spot(available=0), ON_DEMAND), (), dry)
    assert 35 * HOUR_S < away.finish_s.low < away.finish_s.high == 40 * HOUR_S
    assert there.usd.high < away.usd.low


def test_the_cost_is_less_sure_where_prices_moved() -> None:
    at = status(hours=30, work=20)
    still, moved = (
        MarketOutlook(quotes=tuple((SpotQuote("spot", usd, 4),) for usd in prices * 96))
        for prices in ((1.0, 1.0), (0.7, 1.3))
    )
    steady, unsteady = (forecast(at, FLEET, BOTH, (), seen).usd for seen in (still, moved))
    assert unsteady.high / unsteady.low > steady.high / steady.low


@given(
    hours=st.floats(-1, 50) | st.none(),
    work=st.floats(0, 5000),
    usd=st.floats(0, 1000) | st.none(),
    cap=st.floats(0, 20) | st.none(),
    reserve_s=st.floats(0, 1000),
    free=st.integers(0, 5) | st.none(),
    ready=st.integers(0, 4),
    price=st.floats(0, 4),
    samples=st.lists(st.tuples(st.floats(0.1, 4), st.integers(1, 4)), max_size=4),
    allowed=st.booleans(),
    cost_optimal=st.booleans(),
)
def test_every_interval_is_ordered_and_within_the_budget(
    hours: float | None,
    work: float,
    usd: float | None,
    cap: float | None,
    reserve_s: float,
    free: int | None,
    ready: int,
    price: float,
    samples: list[tuple[float, int]],
    allowed: bool,
    cost_optimal: bool,
) -> None:
    at = status(hours=hours, work=work, usd=usd, cap=cap)
    at = replace(at, reserve_s=reserve_s)
    supplies = (spot(usd=price, available=free), *((ON_DEMAND,) if allowed else ()))
    holdings = (Holdings(name="spot", ready=ready),)
    outlook = MarketOutlook(quotes=tuple((SpotQuote("spot", *look),) for look in samples))
    predicted = forecast(at, FLEET, supplies, holdings, outlook, cost_optimal=cost_optimal)
    for one in (predicted.finish_s, predicted.usd):
        assert 0 <= one.low <= one.expected
        assert one.low <= one.high
    assert predicted.finish_s.expected <= predicted.finish_s.high
    assert usd is None or predicted.usd.high <= usd
    guaranteed = allowed and hours is not None
    if work > 0 and not guaranteed:
        assert predicted.finish_s.high == math.inf
