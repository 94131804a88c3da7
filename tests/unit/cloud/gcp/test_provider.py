"""The adapter against the fake: faults, lagging lists, and what only GCP can do."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest
from tests.fakes.gcp import (
    ATTACHED,
    FACTS,
    KIND,
    ON_DEMAND_USD,
    PROJECT,
    REGION,
    SPOT_USD,
    ZONE,
    FakeGcp,
    FakePrices,
)
from tests.unit.cloud.renting import launch_request, rent, sent, settle

from spottrain.cloud.gcp.answers import RETURNED_PER_HOUR
from spottrain.cloud.gcp.provider import GcpProvider
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.port.errors import (
    CloudError,
    MisconfiguredError,
    RegionQuotaError,
)
from spottrain.cloud.port.provider import (
    ANY_FAMILY,
    VmState,
)


def test_only_the_configured_endpoint_is_called(
    gcp: FakeGcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK polls operations through clients of its own that know no endpoint."""
    hosts: set[str] = set()
    resolve = socket.getaddrinfo

    def watched(host: str, *args: Any, **kwargs: Any) -> Any:
        hosts.add(host)
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    settings = GcpSettings(
        project=PROJECT,
        instance_types=(KIND,),
        endpoint=gcp.url,
        public_key="ssh-ed25519 AAAA",
        ssh_from=("192.0.2.1/32",),
    )
    provider = GcpProvider(settings, FACTS, FakePrices())
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert hosts == {"127.0.0.1"}


# --- the market -----------------------------------------------------------------------


def test_offers_are_available_types_with_a_price(gcp: FakeGcp) -> None:
    gcp.ask("withdraw", zone="us-central1-b", kind=KIND)
    offers = gcp.provider().offers()
    assert [(offer.zone, offer.spot, offer.usd_per_hour) for offer in offers] == [
        (ZONE, True, SPOT_USD),
        (ZONE, False, ON_DEMAND_USD),
    ]
    assert {offer.family for offer in offers} == {"NVIDIA_A100_GPUS"}
    both = gcp.provider(regions=(REGION, "us-west1")).offers()
    assert {offer.zone for offer in both} == {ZONE, "us-west1-a"}
    only = gcp.provider(zones=("us-west1-a",)).offers()
    assert {offer.region for offer in only} == {"us-west1"}


def test_attached_gpus_are_offered_where_machine_and_gpu_are_available(
    gcp: FakeGcp,
) -> None:
    gcp.ask("withdraw", zone=ZONE, kind="n1-standard-8+nvidia-tesla-t4")
    gcp.ask("stock", zone="us-central1-b", kind="n1-standard-8+nvidia-tesla-t4", count=1)
    provider = gcp.provider(instance_types=(ATTACHED,))
    offers = provider.offers()
    assert {offer.zone for offer in offers} == {"us-central1-b"}
    (vm,) = provider.launch(launch_request(offers[0])).vms
    assert vm.offer == dataclasses.replace(offers[0], observed_at_s=vm.launched_at_s)


def test_availability_is_cached_between_polls(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    for _ in range(3):
        assert provider.offers()
    assert sent(gcp) == ["machine_types.aggregated_list"]


def test_a_machine_without_a_price_is_not_offered(gcp: FakeGcp) -> None:
    settings = GcpSettings(project=PROJECT, instance_types=(KIND,), endpoint=gcp.url)
    provider = GcpProvider(settings, FACTS, FakePrices("none"))
    assert provider.offers() == ()


def test_quotas_are_reported(gcp: FakeGcp) -> None:
    gcp.ask("quota", metric="PREEMPTIBLE_NVIDIA_A100_GPUS", limit=16)
    gcp.ask("quota", metric="GPUS_ALL_REGIONS", limit=64)
    provider = gcp.provider(zones=(ZONE,))
    rent(provider)
    found = {(q.region, q.family, q.spot): (q.limit, q.used) for q in provider.quotas()}
    assert found == {
        (REGION, "NVIDIA_A100_GPUS", False): (0, 0),
        (REGION, "NVIDIA_A100_GPUS", True): (16, 1),
        ("", "GPUS_ALL_REGIONS", False): (64, 0),
    }


def test_quotas_of_disks_and_addresses_are_in_vms(gcp: FakeGcp) -> None:
    gcp.ask("quota", metric="SSD_TOTAL_GB", limit=500)
    gcp.ask("quota", metric="IN_USE_ADDRESSES", limit=8)
    provider = gcp.provider(disk_gib=200)
    rent(provider)
    shared = [(q.limit, q.used) for q in provider.quotas() if q.family == ANY_FAMILY]
    assert shared == [(2.5, 1.0), (8.0, 1.0)]
    private = gcp.provider(public_addresses=False, disk_gib=200).quotas()
    assert [q.limit for q in private if q.family == ANY_FAMILY] == [2.5]


def test_a_quota_refuses_a_call_as_a_whole(gcp: FakeGcp) -> None:
    gcp.ask("stock", zone=ZONE, kind=KIND, count=9)
    gcp.ask("quota", metric="SSD_TOTAL_GB", limit=500)
    provider = gcp.provider(disk_gib=200)
    with pytest.raises(RegionQuotaError, match="Quota 'SSD_TOTAL_GB' exceeded"):
        rent(provider, 3)
    assert len(rent(provider, 2, intent="intent-2")) == 2


@pytest.mark.parametrize(
    ("constraint", "advice"),
    [
        ("vmExternalIpAccess", "gcp.public_addresses: false"),
        ("requireOsLogin", "have the project excepted"),
    ],
)
def test_a_policy_of_the_organisation_says_what_to_do(
    gcp: FakeGcp, constraint: str, advice: str
) -> None:
    gcp.ask("enforce", constraint=constraint)
    with pytest.raises(MisconfiguredError, match=f"{constraint}.*{advice}"):
        rent(gcp.provider())


def test_a_laptop_that_moves_is_let_in_and_its_old_address_is_not(gcp: FakeGcp) -> None:
    provider = gcp.provider(ssh_from=("192.0.2.1/32",))
    rent(provider)
    settle(gcp)
    provider.admit("job", ["198.51.100.7/32"])
    (patch,) = [r["body"] for r in gcp.ask("requests") if r["operation"] == "firewalls.patch"]
    assert patch["sourceRanges"] == ["198.51.100.7/32"]
    provider.admit("job", ["198.51.100.7/32"])
    assert sent(gcp).count("firewalls.patch") == 1
    gcp.provider(network_tags=("theirs",)).admit("job", ["203.0.113.1/32"])
    assert sent(gcp).count("firewalls.patch") == 1


def test_preemptions_and_scores_of_each_zone_are_reported(gcp: FakeGcp) -> None:
    """There is no history of GPUs that are attached to machines."""
    gcp.ask("stock", zone=ZONE, kind="n1-standard-8+nvidia-tesla-t4", count=1)
    gcp.ask("score", zone=ZONE, score=0.7)
    gcp.ask("preempted", zone=ZONE, shares=[0.4, 0.6])
    provider = gcp.provider(instance_types=(KIND, ATTACHED), zones=(ZONE,))
    pools = {pool.instance_type: pool for pool in provider.spot_pools(2)}
    assert {pool.zone for pool in pools.values()} == {ZONE}
    assert pools[KIND].obtainability == pools[ATTACHED].obtainability == 0.7
    assert pools[KIND].losses_per_hour == pytest.approx(RETURNED_PER_HOUR)
    assert pools[ATTACHED].losses_per_hour is None


def test_what_google_does_not_say_of_spot_vms_is_unknown(gcp: FakeGcp) -> None:
    gcp.ask("fail", operation="advice.capacity", kind="error", status=403, code="forbidden")
    (pool,) = gcp.provider(zones=(ZONE,)).spot_pools(1)
    assert (pool.losses_per_hour, pool.obtainability) == (None, None)


# --- what VMs share -------------------------------------------------------------------


def test_firewall_rules_follow_a_manager_that_moves(gcp: FakeGcp) -> None:
    for n, address in enumerate(("192.0.2.1/32", "192.0.2.2/32", "192.0.2.2/32")):
        assert rent(gcp.provider(ssh_from=(address,)), intent=f"intent-{n}")
    assert sent(gcp).count("firewalls.insert") == 2
    assert sent(gcp).count("firewalls.patch") == 1


def test_each_region_gets_its_own_address_range(gcp: FakeGcp) -> None:
    gcp.ask("stock", zone="us-west1-a", kind=KIND, count=1)
    provider = gcp.provider(regions=(REGION, "us-west1"))
    for number, zone in enumerate((ZONE, "us-west1-a")):
        offer = next(o for o in provider.offers() if o.zone == zone)
        assert provider.launch(launch_request(offer, intent=f"intent-{number}")).vms
    made = [
        r["body"]["ipCidrRange"]
        for r in gcp.ask("requests")
        if r["operation"] == "subnetworks.insert"
    ]
    assert made == ["10.64.0.0/20", "10.64.16.0/20"]


def test_named_networks_are_used_and_left_alone(gcp: FakeGcp) -> None:
    gcp.ask("users_own_network", region=REGION)
    provider = gcp.provider(
        network="theirs", subnetworks={REGION: "theirs"}, network_tags=("let-in",)
    )
    (vm,) = rent(provider)
    made = [kind for kind in sent(gcp) if kind.endswith("s.insert")]
    assert made == []
    with pytest.raises(CloudError, match=vm.vm_id):
        provider.release("job")
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert gcp.ask("left") == []


def test_release_deletes_the_disk_of_a_vm_that_shut_down(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    (vm,) = rent(provider)
    gcp.ask("switch_off", zone=ZONE, name=vm.vm_id.split(".")[1])
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.STOPPING
    provider.release("job")
    assert gcp.ask("left") == []


# --- SSH ----------------------------------------------------------------------------
