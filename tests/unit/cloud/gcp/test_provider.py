"""The adapter against the fake: faults, lagging lists, and what only GCP can do."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.fakes.gcp import (
    ATTACHED,
    KIND,
    ON_DEMAND_USD,
    PROJECT,
    REGION,
    SPOT_USD,
    ZONE,
    FakeFacts,
    FakeGcp,
    FakePrices,
)

from spottrain.cloud.gcp.provider import GcpProvider
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.port.errors import CloudError, MisconfiguredError, VmNotFoundError
from spottrain.cloud.port.provider import (
    ChecksAccount,
    FindsOrphans,
    LaunchRequest,
    Offer,
    ReachedBySsh,
    ReleasesJob,
    ReportsPlacementScore,
    ReportsPriceHistory,
    ReportsQuota,
    SimulatesInterruption,
    Vm,
    VmState,
)


def spot(provider: GcpProvider) -> Offer:
    return next(offer for offer in provider.offers() if offer.spot)


def launch_request(
    offer: Offer, count: int = 1, intent: str = "intent-1"
) -> LaunchRequest:
    return LaunchRequest(
        token=f"uid-{intent}",
        job="job",
        intent=intent,
        offer=offer,
        count=count,
        lease_s=600,
    )


def rent(provider: GcpProvider, count: int = 1, intent: str = "intent-1") -> list[Vm]:
    return list(provider.launch(launch_request(spot(provider), count, intent)).vms)


def alive(gcp: FakeGcp) -> int:
    return sum(vm["ended_at"] is None for vm in gcp.ask("bill"))


def sent(gcp: FakeGcp) -> list[str]:
    return [r["operation"] for r in gcp.ask("requests")]


def finish(gcp: FakeGcp) -> None:
    gcp.ask("finish_all")


def test_it_can_do_all_that_gcp_can(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    assert isinstance(provider, ChecksAccount)
    assert isinstance(provider, FindsOrphans)
    assert isinstance(provider, ReachedBySsh)
    assert isinstance(provider, ReleasesJob)
    assert isinstance(provider, ReportsPlacementScore)
    assert isinstance(provider, ReportsPriceHistory)
    assert isinstance(provider, ReportsQuota)
    assert isinstance(provider, SimulatesInterruption)


def test_importing_and_making_it_costs_no_sdk() -> None:
    code = (
        "import sys\n"
        "from spottrain.cloud.gcp.provider import GcpProvider as P\n"
        "from spottrain.cloud.gcp.settings import GcpSettings as S\n"
        "P(S(project='p', instance_types=()), None, None)\n"
        "sys.exit(any(n.startswith(('google', 'requests')) for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_type_without_facts_is_refused_before_anything_is_asked(
    gcp: FakeGcp,
) -> None:
    with pytest.raises(MisconfiguredError, match=r"x9-huge"):
        gcp.provider(instance_types=("x9-huge",))


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
    provider = GcpProvider(settings, FakeFacts(), FakePrices())
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
    gcp.ask(
        "stock", zone="us-central1-b", kind="n1-standard-8+nvidia-tesla-t4", count=1
    )
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
    provider = GcpProvider(settings, FakeFacts(), FakePrices("none"))
    assert provider.offers() == ()


def test_quotas_scores_and_past_prices_are_reported(gcp: FakeGcp) -> None:
    gcp.ask("quota", metric="PREEMPTIBLE_NVIDIA_A100_GPUS", limit=16)
    gcp.ask("quota", metric="GPUS_ALL_REGIONS", limit=64)
    gcp.ask("score", zone=ZONE, score=0.7)
    now_s = int(time.time())
    gcp.ask("price", usd=1.5, from_s=now_s - 9000, until_s=now_s - 5000)
    gcp.ask("price", usd=1.2, from_s=now_s - 5000, until_s=now_s - 100)
    gcp.ask("price", usd=1.1, from_s=now_s - 100, until_s=None)
    provider = gcp.provider(zones=(ZONE,))
    rent(provider)
    found = {(q.region, q.family, q.spot): (q.limit, q.used) for q in provider.quotas()}
    assert found == {
        (REGION, "NVIDIA_A100_GPUS", False): (0, 0),
        (REGION, "NVIDIA_A100_GPUS", True): (16, 1),
        ("", "GPUS_ALL_REGIONS", False): (64, 0),
    }
    (score,) = provider.placement_scores(KIND, 2)
    assert (score.zone, score.score) == (ZONE, 0.7)
    history = provider.price_history(now_s - 3600)
    assert [(o.usd_per_hour, o.observed_at_s) for o in history] == [
        (1.2, now_s - 5000),
        (1.1, now_s - 100),
    ]


def test_vms_of_all_regions_and_jobs_are_found(gcp: FakeGcp) -> None:
    west = "us-west1-a"
    gcp.ask("stock", zone=west, kind=KIND, count=1)
    provider = gcp.provider(regions=(REGION, "us-west1"))
    offers = {offer.zone: offer for offer in provider.offers() if offer.spot}
    east = provider.launch(launch_request(offers[ZONE], 3)).vms
    there = provider.launch(launch_request(offers[west], intent="intent-2")).vms
    listed = {vm.vm_id: vm.offer.zone for vm in provider.list_vms("job")}
    assert listed == {vm.vm_id: vm.offer.zone for vm in (*east, *there)}
    forgetful = gcp.provider()  # of the second region
    assert {vm.vm_id for vm in forgetful.list_all()} == listed.keys()
    forgetful.terminate(listed)
    provider.release("job")
    assert gcp.ask("left") == []


# --- what VMs share -------------------------------------------------------------------


def test_launches_at_the_same_time_share_one_network(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    offer = spot(provider)
    with ThreadPoolExecutor(3) as pool:
        launch_requests = [
            launch_request(offer, intent=f"intent-{n}") for n in range(3)
        ]
        results = list(pool.map(provider.launch, launch_requests))
    assert sum(len(result.vms) for result in results) == 3
    assert sent(gcp).count("networks.insert") == 1
    assert sent(gcp).count("firewalls.insert") == 2


def test_firewall_rules_follow_a_manager_that_moves(gcp: FakeGcp) -> None:
    for n, address in enumerate(("192.0.2.1/32", "192.0.2.2/32", "192.0.2.2/32")):
        assert rent(gcp.provider(ssh_from=(address,)), intent=f"intent-{n}")
    assert sent(gcp).count("firewalls.insert") == 2
    assert sent(gcp).count("firewalls.patch") == 1


def test_a_removed_network_is_created_again(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    gcp.provider().release("job")
    with pytest.raises(CloudError) as told:
        rent(provider, intent="intent-2")
    assert type(told.value) is CloudError
    assert rent(provider, intent="intent-2")


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
    gcp.ask("switch_off", zone=ZONE, name=vm.vm_id.partition(".")[0])
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.STOPPING
    provider.release("job")
    assert gcp.ask("left") == []


# --- interruptions and SSH ------------------------------------------------------------


def test_a_requested_interruption_ends_the_vm(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    (vm,) = rent(provider)
    provider.interrupt(vm.vm_id)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.TERMINATED
    assert listed.ended_at_s is not None
    with pytest.raises(VmNotFoundError):
        provider.interrupt(vm.vm_id)


def test_ssh_accepts_the_host_keys_that_the_guest_agent_reports(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    (vm,) = rent(provider)
    assert provider.ssh_target(vm.vm_id) is None
    name = vm.vm_id.partition(".")[0]
    gcp.ask("tell_host_key", name=name, key="ssh-ed25519 AAAA")
    target = provider.ssh_target(vm.vm_id)
    assert target is not None
    assert target.host_keys == ("ssh-ed25519 AAAA",)
    assert (target.user, target.port) == ("spottrain", 22)
    assert target.host not in ("", vm.private_address)
    for from_there in ({"public_addresses": False}, {"inside": True}):
        inside = gcp.provider(**from_there).ssh_target(vm.vm_id)
        assert inside is not None
        assert inside.host == vm.private_address
    with pytest.raises(VmNotFoundError):
        provider.ssh_target(f"nobody.{ZONE}")
