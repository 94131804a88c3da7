from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.budget import (
    LAST_CHECKPOINT_S,
    RETURN_S,
    WORTH_S,
    Budget,
    reserve_s,
)
from spottrain.pricing.money import FREE, Money, Rate

USD = st.floats(0, 100)


def make(
    max_usd: float | None = None,
    max_usd_per_hour: float | None = None,
    spent_usd: float = 0.0,
    usd_per_hour: float = 0.0,
) -> Budget:
    return Budget(
        cap=None if max_usd is None else Money.allowed(max_usd),
        hourly_cap=(
            None if max_usd_per_hour is None else Rate.allowed(max_usd_per_hour)
        ),
        spent=Money.owed(spent_usd),
        rate=Rate.of(usd_per_hour),
        reserve_s=600.0,
    )


def test_without_caps_one_may_rent_all_that_is_asked_for() -> None:
    assert make().affords(5.0, 7) == 7
    assert make().lasts_s is None


def test_the_hourly_cap_counts_what_is_rented() -> None:
    assert make(max_usd_per_hour=10.0, usd_per_hour=4.0).affords(2.0, 9) == 3


def test_the_cap_counts_the_reserve_for_the_whole_fleet() -> None:
    # 6 USD/h for the reserve and five minutes are 1.50 USD, also for the one there.
    assert make(max_usd=9.0, spent_usd=3.0, usd_per_hour=6.0).affords(6.0, 9) == 3


def test_what_costs_nothing_is_limited_by_nothing() -> None:
    assert make(max_usd=0.0).affords(0.0, 5) == 5


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0])
def test_what_has_no_price_is_not_rented(price: float) -> None:
    assert make().affords(price, 5) == 0


@pytest.mark.parametrize("spent", [5.0, 7.0])
def test_a_spent_budget_affords_nothing(spent: float) -> None:
    assert make(max_usd=5.0, spent_usd=spent).affords(1.0, 3) == 0


def test_the_reserve_pays_two_checkpoints_the_return_and_a_lease() -> None:
    assert reserve_s(60.0) == 2 * LAST_CHECKPOINT_S + RETURN_S + 60.0


@given(max_usd=USD, per_hour=USD, spent=USD, rate=USD, price=st.floats(0.01, 50))
def test_what_is_afforded_fits_under_both_caps_and_one_more_does_not(
    max_usd: float, per_hour: float, spent: float, rate: float, price: float
) -> None:
    budget = make(max_usd, per_hour, spent, rate)
    assert budget.cap is not None
    assert budget.hourly_cap is not None
    count = budget.affords(price, 20)

    def fits(machines: int) -> bool:
        assert budget.cap is not None
        assert budget.hourly_cap is not None
        total = budget.rate + Rate.of(price) * machines
        kept = total.over(budget.reserve_s + WORTH_S)
        return total <= budget.hourly_cap and budget.spent + kept <= budget.cap

    assert 0 <= count <= 20
    assert count == 0 or fits(count)
    assert count == 20 or not fits(count + 1)


@given(max_usd=USD, spent=USD, rate=st.floats(0.01, 100))
def test_a_fleet_that_ends_in_time_keeps_its_reserve(
    max_usd: float, spent: float, rate: float
) -> None:
    budget = make(max_usd, None, spent, rate)
    lasts_s = budget.lasts_s
    assert lasts_s is not None
    assert budget.cap is not None
    if lasts_s > 0:
        then = budget.spent + budget.rate.over(lasts_s) + budget.kept
        assert then.usd == pytest.approx(budget.cap.usd, abs=1e-5)
    else:
        assert budget.committed >= budget.cap or budget.rate == FREE
