from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.billing.budget import (
    LAST_CHECKPOINT_S,
    RETURN_S,
    WORTH_S,
    Budget,
    reserve_s,
)
from spottrain.pricing.billing.money import Money, Rate

USD = st.floats(0, 100)


def make(
    max_usd: float | None = None,
    max_usd_per_hour: float | None = None,
    spent_usd: float = 0.0,
    usd_per_hour: float = 0.0,
    side_usd_per_hour: float = 0.0,
    coming_usd: float = 0.0,
) -> Budget:
    return Budget(
        cap=None if max_usd is None else Money.allowed(max_usd),
        hourly_cap=(None if max_usd_per_hour is None else Rate.allowed(max_usd_per_hour)),
        spent=Money.allowed(spent_usd),
        rate=Rate.of(usd_per_hour),
        reserve_s=600.0,
        side_rate=Rate.of(side_usd_per_hour),
        pending=Money.allowed(coming_usd),
    )


def test_without_caps_all_requested_vms_are_affordable() -> None:
    assert make().affords(5.0, 7) == 7
    assert make().lasts_s is None


def test_the_hourly_cap_counts_what_is_rented() -> None:
    assert make(max_usd_per_hour=10.0, usd_per_hour=4.0).affords(2.0, 9) == 3


def test_the_cap_counts_the_reserve_for_the_whole_fleet() -> None:
    # 6 USD/h for the reserve and five minutes are 1.50 USD, also for the one there.
    assert make(max_usd=9.0, spent_usd=3.0, usd_per_hour=6.0).affords(6.0, 9) == 3


def test_free_vms_are_not_limited() -> None:
    assert make(max_usd=0.0).affords(0.0, 5) == 5


def test_the_reserve_includes_traffic_and_storage() -> None:
    # 6 + 12 USD/h for ten minutes; the rest of 10 USD lasts for 20.
    money = make(max_usd=10.0, spent_usd=1.0, usd_per_hour=6.0, side_usd_per_hour=12.0)
    assert money.reserve.usd == 3.0
    assert money.lasts_s == 1200.0
    # For a quarter of an hour 4.50 are gone before another machine comes.
    assert money.affords(6.0, 9) == 3


def test_storage_alone_uses_up_a_budget() -> None:
    assert make(max_usd=2.0, side_usd_per_hour=1.0).lasts_s == 6600.0


def test_the_reserve_includes_data_that_vms_fetch_when_they_boot() -> None:
    money = make(max_usd=10.0, coming_usd=4.0)
    assert money.reserve.usd == 4.0
    assert money.affords(4.0, 9) == 6
    assert money.affords(4.0, 9, once=Money.allowed(2.0)) == 2
    assert money.affords(0.0, 9, once=Money.allowed(2.0)) == 3


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0])
def test_an_offer_without_a_price_is_not_affordable(price: float) -> None:
    assert make().affords(price, 5) == 0


@pytest.mark.parametrize("spent", [5.0, 7.0])
def test_a_spent_budget_affords_nothing(spent: float) -> None:
    assert make(max_usd=5.0, spent_usd=spent).affords(1.0, 3) == 0


def test_the_reserve_pays_two_checkpoints_the_return_and_a_lease() -> None:
    assert reserve_s(60.0) == 2 * LAST_CHECKPOINT_S + RETURN_S + 60.0


@given(
    max_usd=USD,
    per_hour=USD,
    spent=USD,
    rate=USD,
    side_rate=USD,
    pending=USD,
    price=st.floats(0.01, 50),
    once=USD,
)
def test_what_is_afforded_fits_under_both_caps_and_one_more_does_not(
    max_usd: float,
    per_hour: float,
    spent: float,
    rate: float,
    side_rate: float,
    pending: float,
    price: float,
    once: float,
) -> None:
    budget = make(max_usd, per_hour, spent, rate, side_rate, pending)
    assert budget.cap is not None
    assert budget.hourly_cap is not None
    count = budget.affords(price, 20, Money.allowed(once))

    def fits(machines: int) -> bool:
        assert budget.cap is not None
        assert budget.hourly_cap is not None
        total = budget.rate + Rate.of(price) * machines
        reserve = (total + budget.side_rate).over(budget.reserve_s + WORTH_S)
        fetched = budget.pending + Money.allowed(once) * machines
        needed = budget.spent + reserve + fetched
        return total <= budget.hourly_cap and needed <= budget.cap

    assert 0 <= count <= 20
    assert count == 0 or fits(count)
    assert count == 20 or not fits(count + 1)


@given(max_usd=USD, spent=USD, rate=st.floats(0.01, 100), side_rate=USD, pending=USD)
def test_a_fleet_that_ends_in_time_keeps_its_reserve(
    max_usd: float, spent: float, rate: float, side_rate: float, pending: float
) -> None:
    budget = make(max_usd, None, spent, rate, side_rate, pending)
    lasts_s = budget.lasts_s
    assert lasts_s is not None
    assert budget.cap is not None
    if lasts_s > 0:
        then = budget.spent + budget.job_rate.over(lasts_s) + budget.reserve
        assert then.usd == pytest.approx(budget.cap.usd, abs=1e-5)
    else:
        assert budget.committed >= budget.cap
