from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.billing.money import (
    FREE,
    NOTHING,
    Money,
    MoneyError,
    Rate,
    ceil_us,
    cost_usd,
    floor_us,
    is_amount,
    total,
    total_rate,
)

USD = st.floats(0, 1e6)
SECONDS = st.floats(0, 1e7)


def test_a_price_by_the_hour_costs_by_the_microsecond() -> None:
    assert Rate.of(3.6).over(1000.0).microusd == 1_000_000
    assert Rate.of(3.6).over(0.001).microusd == 1
    assert cost_usd(3.6, 1000.0) == 1.0


def test_prices_are_read_as_they_were_written() -> None:
    assert Rate.of(0.1).nanousd_per_hour == 100_000_000
    assert Rate.of(32.7726).nanousd_per_hour == 32_772_600_000
    assert Money.allowed(0.1).microusd == 100_000


def test_what_we_owe_is_rounded_up_and_what_we_may_spend_is_rounded_down() -> None:
    assert Rate.of(1e-10).nanousd_per_hour == 1
    assert Rate.allowed(1e-10) == FREE
    assert Money.allowed(9.999_999_9).microusd == 9_999_999
    assert Rate(1).over_us(1).microusd == 1


def test_data_costs_by_the_byte() -> None:
    assert Money.of_bytes(0.02, 8 * 10**9).usd == 0.16
    assert Money() < Money.of_bytes(0.02, 1) <= Money.of_bytes(0.02, 10**9)


@given(usd_per_gb=st.floats(0, 10), num_bytes=st.integers(0, 10**15))
def test_data_never_costs_less_than_exactly_nor_a_grain_more(
    usd_per_gb: float, num_bytes: int
) -> None:
    nano = Rate.of(usd_per_gb).nanousd_per_hour
    grains = Money.of_bytes(usd_per_gb, num_bytes).grains
    assert 0 <= grains - Fraction(nano * num_bytes * 3_600_000_000, 10**9) < 1


@given(grains=st.integers(0, 10**24), period_s=st.floats(1e-6, 1e6))
def test_a_periodic_payment_is_rounded_up_to_an_hourly_rate(grains: int, period_s: float) -> None:
    period_us = math.floor(period_s * 1e6)
    paid = Rate.every(Money(grains), period_s).over_us(period_us)
    assert Money(grains) <= paid < Money(grains + period_us)


@pytest.mark.parametrize("usd", [math.nan, math.inf, -math.inf, -0.01])
def test_an_invalid_amount_is_refused(usd: float) -> None:
    assert not is_amount(usd)
    for make in (Rate.of, Rate.allowed, Money.allowed):
        with pytest.raises(MoneyError, match="must be dollars, 0 to"):
            make(usd)


@pytest.mark.parametrize("at_s", [math.nan, math.inf, -math.inf, 1e305])
def test_an_invalid_time_is_refused(at_s: float) -> None:
    for use in (Rate(1).over, ceil_us, floor_us):
        with pytest.raises(MoneyError, match="must be seconds"):
            use(at_s)


@given(price=USD, seconds=SECONDS)
def test_a_cost_is_never_below_the_exact_one_nor_above_by_more_than_rounding(
    price: float, seconds: float
) -> None:
    cost = Rate.of(price).over(seconds)
    exact = Fraction(price) * Fraction(seconds) / 3600 * 10**6
    assert cost.microusd >= exact * (1 - Fraction(1, 10**12))
    most = exact + 2 + Fraction(seconds) / 3_600_000 + Fraction(price) / 3600
    assert cost.microusd <= most * (1 + Fraction(1, 10**12))


@given(parts=st.lists(st.tuples(USD, SECONDS)), seed=st.integers())
def test_a_sum_does_not_depend_on_the_order_of_its_parts(
    parts: list[tuple[float, float]], seed: int
) -> None:
    amounts = [Rate.of(price).over(seconds) for price, seconds in parts]
    shuffled = random.Random(seed).sample(amounts, len(amounts))
    assert total(amounts) == total(shuffled)
    assert total_rate(Rate.of(price) for price, _ in parts) >= FREE


@given(rate=st.floats(0.001, 100), amount=USD)
def test_a_fleet_that_runs_for_as_long_as_an_amount_lasts_costs_that_amount(
    rate: float, amount: float
) -> None:
    money = Money.allowed(amount)
    lasts_s = Rate.of(rate).lasts_s(money)
    assert Rate.of(rate).over(lasts_s).usd == pytest.approx(money.usd, abs=2e-6)


def test_a_rate_of_zero_lasts_for_ever() -> None:
    assert FREE.lasts_s(Money.allowed(1.0)) == math.inf


def test_amounts_are_added_compared_and_shared() -> None:
    ten, four = Money.allowed(10.0), Money.allowed(4.0)
    assert (ten - four + four * 2).usd == 14.0
    assert NOTHING < four < ten
    assert ten.share(0.8).usd == 8.0
    assert (Rate.of(7.0) - Rate.of(1.0)) // Rate.of(2.0) == 3
    assert (Rate.of(0.5) * 3).usd_per_hour == 1.5
