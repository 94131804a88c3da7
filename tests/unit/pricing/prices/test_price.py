"""Which prices are believed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.price import Price, fresh, offers, published, sift, usable
from spottrain.units import DAY_S

FACTS = catalogue()
NOW_S = 1_790_000_000.0


def price(usd: float = 8.0, **changes: Any) -> Price:
    made = Price(
        cloud="aws",
        region="us-east-1",
        zone="us-east-1a",
        instance_type="p4d.24xlarge",
        spot=True,
        usd_per_hour=usd,
        since_s=NOW_S - 60,
        seen_s=NOW_S,
        source="test",
    )
    return replace(made, **changes)


ON_DEMAND = price(21.96, spot=False, zone="us-east-1")


@pytest.mark.parametrize("usd", [math.nan, math.inf, -math.inf, -1.0, 0.0, 700.0 * 8])
def test_an_invalid_price_is_left_out_by_name(usd: float) -> None:
    sifted = sift([price(usd), price(7.0)], FACTS, NOW_S)
    assert [p.usd_per_hour for p in sifted.prices] == [7.0]
    (warning,) = sifted.warnings
    assert warning.startswith("aws us-east-1a p4d.24xlarge spot: price: got ")
    assert warning.endswith("; left out")


def test_impossible_gpu_counts_are_dropped_with_a_warning() -> None:
    """A catalogue in use elsewhere once had 12 GPUs for an 8-GPU machine."""
    sifted = sift([price(gpus=12), price(gpus=8)], FACTS, NOW_S)
    assert len(sifted.prices) == 1
    assert sifted.warnings == (
        "aws us-east-1a p4d.24xlarge spot: GPUs: got 12, the machine has 8; left out",
    )


def test_other_machines_and_future_prices_are_left_out() -> None:
    strange = price(instance_type="m5.large")
    tomorrow = price(since_s=NOW_S + DAY_S)
    assert sift([strange, tomorrow], FACTS, NOW_S) == sift([], FACTS, NOW_S)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_all_remaining_prices_are_valid(usd: float) -> None:
    sifted = sift([price(usd)], FACTS, NOW_S)
    assert len(sifted.prices) + len(sifted.warnings) == 1
    assert all(0 < p.usd_per_hour < math.inf for p in sifted.prices)


@pytest.mark.parametrize(
    ("usd", "left"), [(8.0, True), (21.95, True), (21.96, False), (25.0, False)]
)
def test_spot_at_the_on_demand_price_is_no_usable_spot(usd: float, left: bool) -> None:
    sifted = usable([price(usd), ON_DEMAND])
    assert (price(usd) in sifted.prices) is left
    assert ON_DEMAND in sifted.prices
    assert len(sifted.warnings) == 1 - left


def test_spot_is_compared_in_its_own_region_alone() -> None:
    elsewhere = price(25.0, region="eu-west-1", zone="eu-west-1a")
    assert usable([elsewhere, ON_DEMAND]).warnings == ()


def test_old_prices_are_not_rented_by() -> None:
    old = price(seen_s=NOW_S - 2 * DAY_S)
    listed = replace(ON_DEMAND, seen_s=NOW_S - 80 * DAY_S)
    sifted = fresh([old, price(), listed], NOW_S)
    assert sifted.prices == (price(), listed)
    assert sifted.warnings[0].startswith("aws: 1 spot prices are 2 days old or more")
    assert fresh([listed], NOW_S + 11 * DAY_S).prices == ()


def test_a_clock_that_jumped_back_makes_no_price_old() -> None:
    later = price(seen_s=NOW_S + DAY_S)
    assert later.age_s(NOW_S) == 0.0
    assert not later.is_stale(NOW_S)


def test_offers_carry_the_facts_of_the_machine_and_the_moment_seen() -> None:
    (offer,) = offers([price(), price(instance_type="m5.large")], FACTS)
    assert (offer.zone, offer.usd_per_hour, offer.observed_at_s) == (
        "us-east-1a",
        8.0,
        NOW_S,
    )
    assert (offer.gpus, offer.gpu_memory_bytes) == (8, 40 * 2**30)


def test_shipped_prices_are_by_region_and_dated_those_of_spot_estimates() -> None:
    shipped = published(FACTS)
    assert not sift(shipped, FACTS, 2 * NOW_S).warnings
    assert all(p.zone == p.region and p.spot == p.is_estimate for p in shipped)
    spot, p4d = sorted(
        (p for p in shipped if p.instance_type == "p4d.24xlarge"),
        key=lambda p: not p.spot,
    )
    assert p4d.seen_s == 1784505600.0
    assert not p4d.is_stale(p4d.seen_s)
    assert spot.is_stale(spot.seen_s)
