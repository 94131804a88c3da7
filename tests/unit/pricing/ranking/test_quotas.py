"""How many VMs quotas allow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import an_offer

from spottrain.cloud.port.provider import ANY_FAMILY, Offer, Quota
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.quotas import quota_left, with_quotas

SMALL = an_offer(
    cloud="aws",
    region="us-east-1",
    zone="us-east-1a",
    instance_type="g5.xlarge",
    usd_per_hour=0.4,
    gpu_memory_bytes=24 * 10**9,
    family="G and VT",
)
LARGE = replace(SMALL, instance_type="g5.12xlarge", gpus=4)
ON_DEMAND = replace(SMALL, spot=False)
G = Quota(region="us-east-1", family="G and VT", spot=True, limit=64.0, unit="vcpu")


def vms(offer: Offer, *quotas: Quota, unused: bool = False) -> float | None:
    (found,) = with_quotas([offer], quotas, catalogue(), unused=unused)
    return found.quota_vms


def test_a_quota_counts_what_its_unit_says() -> None:
    assert vms(SMALL, G) == 16.0  # 4 virtual CPUs each
    assert vms(LARGE, G) == pytest.approx(64 / 48)
    assert vms(LARGE, replace(G, unit="gpu", limit=8.0)) == 2.0
    assert vms(SMALL, replace(G, used=60.0), unused=True) == 1.0
    assert vms(SMALL, replace(G, used=60.0)) == 16.0


def test_only_quotas_of_the_region_family_and_market_count() -> None:
    assert vms(SMALL) is None
    assert vms(SMALL, replace(G, region="us-west-2")) is None
    assert vms(SMALL, replace(G, family="P")) is None
    assert vms(ON_DEMAND, G) is None
    own = replace(G, spot=False, limit=8.0)
    assert vms(SMALL, own) == 2.0, "without one for spot VMs, that on demand counts"
    assert vms(SMALL, own, G) == 16.0


def test_disks_and_addresses_bound_all_families() -> None:
    disks = Quota(region="us-east-1", family=ANY_FAMILY, spot=False, limit=2.5, unit="vm")
    assert vms(SMALL, G, disks) == 2.5
    assert vms(ON_DEMAND, disks) == 2.5
    assert vms(SMALL, G, replace(disks, region="")) == 2.5


def test_types_of_one_family_share_its_quota() -> None:
    small, large = with_quotas([SMALL, LARGE], [G], catalogue())
    left = quota_left([small, large], {large: 1})
    assert left(small) == 4
    assert left(large) == 0
    # The cloud's list of VMs does not know quotas.
    assert quota_left([small, large], {LARGE: 1})(small) == 4


def test_without_vms_one_is_asked_for_in_any_case() -> None:
    (none,) = with_quotas([SMALL], [replace(G, limit=0.0)], catalogue())
    assert quota_left([none], {})(none) == 1
    assert quota_left([none], {none: 1})(none) == 0
    assert quota_left([SMALL], {SMALL: 5})(SMALL) == math.inf


@given(st.integers(1, 1000), st.lists(st.integers(0, 9), max_size=30))
def test_a_quota_is_used_up_and_never_exceeded(limit: int, asked: list[int]) -> None:
    quota = replace(G, limit=float(limit))
    offers = with_quotas([SMALL, LARGE], [quota], catalogue())
    rented = dict.fromkeys(offers, 0)
    for number, wanted in enumerate(asked):
        offer = offers[number % 2]
        rented[offer] += int(min(wanted, quota_left(offers, rented)(offer)))
    first = 4 * rented[offers[0]] + 48 * rented[offers[1]]
    assert first <= limit or sum(rented.values()) == 1
    for offer in offers:
        more = int(quota_left(offers, rented)(offer))
        rented[offer] += more
    total = 4 * rented[offers[0]] + 48 * rented[offers[1]]
    assert total <= max(limit, 48)
