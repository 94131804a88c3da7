"""Offers and quotas of the adapter on the fake."""

from __future__ import annotations

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
from tests.unit.cloud.azure.renting import launch_request, offer_in, rent, sent

from spottrain.cloud.port.errors import CloudError


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


def test_regions_without_zones_are_rented_in_as_well(azure: FakeAzure) -> None:
    azure.offer("westus", KIND, zones=[])
    azure.ask("stock", zone="westus", instance_type=KIND, count=1)
    provider = azure.provider(regions=(REGION, "westus"))
    (east,) = rent(provider)
    (west,) = provider.launch(
        launch_request(offer_in(provider, "westus"), intent="i-2")
    ).vms
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
    with pytest.raises(CloudError) as told:
        provider.interrupt(vm.vm_id)
    assert type(told.value) is CloudError
