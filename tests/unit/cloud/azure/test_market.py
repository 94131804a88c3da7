"""Offers and quotas of the adapter on the fake."""

from __future__ import annotations

import math

import pytest
from tests.fakes.azure import (
    FAMILY,
    KIND,
    ON_DEMAND_USD,
    REGION,
    SPOT_USD,
    ZONE,
    FakeAzure,
)
from tests.unit.cloud.renting import launch_request, offer_in, rent, sent

from spottrain.cloud.azure.market import eviction_query
from spottrain.cloud.port.errors import (
    MisconfiguredError,
    RegionQuotaError,
)
from spottrain.cloud.port.provider import ANY_FAMILY


def test_offers_are_in_each_zone_that_is_open_to_the_account(azure: FakeAzure) -> None:
    offers = azure.provider().offers()
    assert {(offer.zone, offer.spot, offer.usd_per_hour) for offer in offers} == {
        (zone, spot, usd)
        for zone in (ZONE, "eastus-2")
        for spot, usd in ((True, SPOT_USD), (False, ON_DEMAND_USD))
    }
    assert {offer.family for offer in offers} == {"lowPriorityCores", FAMILY}
    only = azure.provider(zones=("eastus-2",)).offers()
    assert {offer.zone for offer in only} == {"eastus-2"}


@pytest.mark.parametrize(
    ("size", "zones"),
    [
        ({"closed": ["1"]}, {("eastus-2", True), ("eastus-2", False)}),
        ({"closed": ["1", "2"]}, set()),
        ({"closed": ["*"]}, set()),
        ({"spot": False}, {("eastus-1", False), ("eastus-2", False)}),
        ({"zones": []}, {("eastus", True), ("eastus", False)}),
    ],
    ids=["a zone", "all zones", "the region", "no spot", "no zones"],
)
def test_restricted_sizes_are_not_offered(
    azure: FakeAzure, size: dict[str, object], zones: set[tuple[str, bool]]
) -> None:
    azure.offer(REGION, KIND, **size)
    found = {(offer.zone, offer.spot) for offer in azure.provider().offers()}
    assert found == zones


def test_sizes_and_prices_are_cached_between_polls(azure: FakeAzure) -> None:
    provider = azure.provider()
    first = provider.offers()
    assert [provider.offers() for _ in range(3)] == [first] * 3
    assert sent(azure) == ["LIST skus"]


def test_eviction_rates_are_those_of_our_sizes_and_regions(azure: FakeAzure) -> None:
    """Per hour, as Azure publishes them; rows of other sizes and unknown bands are out."""
    west = "westus"
    for region, kind, rate in (
        (REGION, KIND, "5-10"),
        (west, KIND, "20+"),
        ("northeurope", KIND, "0-5"),
        (REGION, "Standard_NC6s_v3", "0-5"),
    ):
        azure.ask("eviction_rate", region=region, name=kind, rate=rate)
    found = azure.provider(regions=(REGION, west)).spot_pools(4)
    rates = {(p.region, p.zone, p.instance_type): p.losses_per_hour for p in found}
    assert rates == {
        (REGION, REGION, KIND): pytest.approx(-math.log(1 - 0.075)),
        (west, west, KIND): pytest.approx(-math.log(1 - 0.25)),
    }
    azure.ask("eviction_rate", region=REGION, name=KIND, rate="new band")
    assert azure.provider().spot_pools(4) == []


def test_eviction_rates_are_asked_of_the_tenant() -> None:
    """Within a subscription the table is empty."""
    assert "subscriptions" not in eviction_query([KIND], [REGION])


def test_quotas_are_reported_by_region_and_family(azure: FakeAzure) -> None:
    azure.ask("quota", region=REGION, family="lowPriorityCores", vcpus=64)
    provider = azure.provider()
    rent(provider)
    found = {(q.family, q.spot): (q.limit, q.used) for q in provider.quotas()}
    assert found == {
        ("lowPriorityCores", True): (64, 4),
        (FAMILY, False): (100, 0),
        ("cores", False): (100, 0),
    }


def test_public_addresses_are_a_quota_too(azure: FakeAzure) -> None:
    """A student's subscription has three (MicrosoftDocs/azure-docs 106096)."""
    name = "StandardSkuPublicIpAddresses"
    azure.ask("address_quota", region=REGION, name=name, limit=1)
    azure.ask("address_quota", region=REGION, name="VirtualNetworks", limit=50)
    provider = azure.provider()
    rent(provider)
    shared = [(q.limit, q.used) for q in provider.quotas() if q.family == ANY_FAMILY]
    assert shared == [(1.0, 1.0)]
    with pytest.raises(RegionQuotaError, match="more than 1 public IP addresses"):
        rent(provider, intent="intent-2")


def test_a_laptop_that_moves_is_let_in_and_its_old_address_is_not(
    azure: FakeAzure,
) -> None:
    provider = azure.provider(ssh_from=("192.0.2.1/32",), regions=(REGION, "westus"))
    rent(provider)
    provider.admit("job", ["198.51.100.7/32"])
    rules = [
        r["body"]["properties"]["securityRules"][0]["properties"]
        for r in azure.ask("requests")
        if r["operation"] == "PUT networkSecurityGroups"
    ]
    froms = [rule["sourceAddressPrefixes"] for rule in rules]
    assert froms == [["192.0.2.1/32"], ["198.51.100.7/32"]]


def test_a_policy_that_demands_tags_says_what_to_do(azure: FakeAzure) -> None:
    azure.ask("demand_tag", name="cost-center")
    with pytest.raises(MisconfiguredError, match=r"Require cost-center.*azure\.tags"):
        rent(azure.provider())
    assert len(rent(azure.provider(tags={"cost-center": "42"}), intent="i-2")) == 1


def test_regions_without_zones_are_rented_in_as_well(azure: FakeAzure) -> None:
    azure.offer("westus", KIND, zones=[])
    azure.ask("stock", zone="westus", instance_type=KIND, count=1)
    provider = azure.provider(regions=(REGION, "westus"))
    (east,) = rent(provider)
    (west,) = provider.launch(launch_request(offer_in(provider, "westus"), intent="i-2")).vms
    listed = {vm.vm_id: vm.offer.zone for vm in provider.list_vms("job")}
    assert listed == {east.vm_id: ZONE, west.vm_id: "westus"}
    provider.terminate(listed)
    provider.release("job")
    assert azure.ask("left") == []


def test_on_demand_machines_are_no_spot_vms(azure: FakeAzure) -> None:
    provider = azure.provider()
    (vm,) = provider.launch(launch_request(offer_in(provider, spot=False))).vms
    assert not vm.offer.spot
    assert vm.offer.usd_per_hour == ON_DEMAND_USD
