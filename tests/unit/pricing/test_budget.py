from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.budget import Budget, cost_usd

MONEY = st.floats(0, 100)


def make(
    max_usd: float | None = None,
    max_usd_per_hour: float | None = None,
    spent_usd: float = 0.0,
    rate_usd_per_hour: float = 0.0,
) -> Budget:
    return Budget(
        max_usd=max_usd,
        max_usd_per_hour=max_usd_per_hour,
        spent_usd=spent_usd,
        rate_usd_per_hour=rate_usd_per_hour,
        reserve_s=600.0,
    )


def test_a_rate_costs_by_the_second() -> None:
    assert cost_usd(3.6, 1000.0) == 1.0


def test_without_caps_one_may_rent_all_that_is_asked_for() -> None:
    assert make().affords(5.0, 2, 7) == 7


def test_the_hourly_cap_counts_what_is_rented() -> None:
    assert make(max_usd_per_hour=10.0, rate_usd_per_hour=4.0).affords(2.0, 1, 9) == 3


def test_the_cap_counts_reserves_for_the_whole_fleet() -> None:
    # 6 USD/h for ten minutes is 1 USD; two reserves each for the one there and the new.
    budget = make(max_usd=9.0, spent_usd=1.0, rate_usd_per_hour=6.0)

    assert budget.affords(6.0, 2, 9) == 3


def test_what_costs_nothing_is_limited_by_nothing() -> None:
    assert make(max_usd=0.0).affords(0.0, 2, 5) == 5


@given(
    max_usd=MONEY,
    per_hour=MONEY,
    spent=MONEY,
    rate=MONEY,
    price=st.floats(0.01, 50),
    most=st.integers(0, 20),
)
def test_what_is_afforded_fits_under_both_caps_and_one_more_does_not(
    max_usd: float, per_hour: float, spent: float, rate: float, price: float, most: int
) -> None:
    budget = make(max_usd, per_hour, spent, rate)

    count = budget.affords(price, 2, most)

    def fits(machines: int) -> bool:
        total = rate + machines * price
        in_hour = total <= per_hour + 1e-6
        return in_hour and spent + 2 * cost_usd(total, 600.0) <= max_usd + 1e-6

    assert 0 <= count <= most
    assert count == 0 or fits(count)
    assert count == most or not fits(count + 2)


@pytest.mark.parametrize("spent", [5.0, 7.0])
def test_a_spent_budget_affords_nothing(spent: float) -> None:
    assert make(max_usd=5.0, spent_usd=spent).affords(1.0, 1, 3) == 0
