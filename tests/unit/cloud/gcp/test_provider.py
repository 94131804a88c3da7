"""The adapter against the fake: faults, lagging lists, and what only GCP can do."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import Callable
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
    price_of,
)

from spottrain.cloud.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    QuotaExceededError,
    ThrottledError,
    VmNotFoundError,
)
from spottrain.cloud.gcp.provider import GcpProvider
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.provider import (
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


def wish(offer: Offer, count: int = 1, intent: str = "intent-1") -> LaunchRequest:
    return LaunchRequest(
        token=f"uid-{intent}",
        job="job",
        intent=intent,
        offer=offer,
        count=count,
        lease_s=600,
    )


def rent(provider: GcpProvider, count: int = 1, intent: str = "intent-1") -> list[Vm]:
    return list(provider.launch(wish(spot(provider), count, intent)).vms)


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


def test_nobody_but_the_given_endpoint_is_asked(
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
    provider = GcpProvider(settings, FakeFacts(), price_of)
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert hosts == {"127.0.0.1"}


# --- the market -----------------------------------------------------------------------


def test_offers_are_what_zones_have_and_has_a_price(gcp: FakeGcp) -> None:
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


def test_gpus_that_are_attached_are_offered_where_both_are(gcp: FakeGcp) -> None:
    gcp.ask("withdraw", zone=ZONE, kind="n1-standard-8+nvidia-tesla-t4")
    gcp.ask(
        "stock", zone="us-central1-b", kind="n1-standard-8+nvidia-tesla-t4", count=1
    )
    provider = gcp.provider(instance_types=(ATTACHED,))
    offers = provider.offers()
    assert {offer.zone for offer in offers} == {"us-central1-b"}
    (vm,) = provider.launch(wish(offers[0])).vms
    assert vm.offer == dataclasses.replace(offers[0], observed_at=vm.launched_at)


def test_looking_every_second_asks_for_places_once(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    for _ in range(3):
        assert provider.offers()
    assert sent(gcp) == ["machine_types.aggregated_list"]


def test_a_machine_without_a_price_is_not_offered(gcp: FakeGcp) -> None:
    settings = GcpSettings(project=PROJECT, instance_types=(KIND,), endpoint=gcp.url)
    provider = GcpProvider(settings, FakeFacts(), lambda *_: None)
    assert provider.offers() == ()


def test_quotas_scores_and_past_prices_are_told(gcp: FakeGcp) -> None:
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
    assert [(o.usd_per_hour, o.observed_at) for o in history] == [
        (1.2, now_s - 5000),
        (1.1, now_s - 100),
    ]


def test_vms_of_all_regions_and_jobs_are_found(gcp: FakeGcp) -> None:
    west = "us-west1-a"
    gcp.ask("stock", zone=west, kind=KIND, count=1)
    provider = gcp.provider(regions=(REGION, "us-west1"))
    offers = {offer.zone: offer for offer in provider.offers() if offer.spot}
    east = provider.launch(wish(offers[ZONE], 3)).vms
    there = provider.launch(wish(offers[west], intent="intent-2")).vms
    listed = {vm.vm_id: vm.offer.zone for vm in provider.list_vms("job")}
    assert listed == {vm.vm_id: vm.offer.zone for vm in (*east, *there)}
    forgetful = gcp.provider()  # of the second region
    assert {vm.vm_id for vm in forgetful.list_all()} == listed.keys()
    forgetful.terminate(listed)
    provider.release("job")
    assert gcp.ask("left") == []


# --- when things go wrong -------------------------------------------------------------


@pytest.mark.parametrize(
    ("setup", "kind"),
    [
        (lambda g: g.ask("stock", zone=ZONE, kind=KIND, count=0), NoCapacityError),
        (lambda g: g.ask("withdraw", zone=ZONE, kind=KIND), NoCapacityError),
        (
            lambda g: g.ask("quota", metric="PREEMPTIBLE_NVIDIA_A100_GPUS", limit=0),
            QuotaExceededError,
        ),
        (lambda g: g.ask("expire", expired=True), AuthError),
        (lambda g: g.ask("skew", seconds=7200), AuthError),
    ],
    ids=["stock-out", "not offered", "quota", "expired credentials", "clock skew"],
)
def test_a_refusal_says_what_can_be_done(
    gcp: FakeGcp, setup: Callable[[FakeGcp], None], kind: type[CloudError]
) -> None:
    provider = gcp.provider()
    offer = spot(provider)
    setup(gcp)
    with pytest.raises(kind) as refusal:
        provider.launch(wish(offer))
    assert type(refusal.value) is kind
    assert "\n" not in str(refusal.value)
    assert alive(gcp) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"image": "projects/nobody/global/images/family/none"},
        {"image": "projects/nobody/global/images/none"},
        {"image": "whatever"},
        {"disk_gib": 10},
        {"network": "nowhere"},
        {"network": "theirs", "subnetworks": {REGION: "nowhere"}},
    ],
    ids=["family", "image", "no image", "disk", "network", "subnet"],
)
def test_what_does_not_exist_is_told_before_money_is_spent(
    gcp: FakeGcp, settings: dict[str, object]
) -> None:
    gcp.ask("users_own_network", region=REGION)
    provider = gcp.provider(**settings)
    with pytest.raises(MisconfiguredError) as told:
        provider.launch(wish(spot(provider)))
    assert "\n" not in str(told.value)
    assert alive(gcp) == 0
    assert "instances.bulk_insert" not in sent(gcp)


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "error", "code": "rateLimitExceeded", "status": 403},
        {"kind": "error", "code": "backendError", "status": 503},
        {"kind": "drop"},
        {"kind": "lost"},
    ],
    ids=["throttled", "5xx", "dropped", "reply lost"],
)
def test_the_sdk_tries_again_where_that_helps(
    gcp: FakeGcp, fault: dict[str, object]
) -> None:
    provider = gcp.provider(patience_s=20.0)
    offer = spot(provider)
    for operation in ("bulk_insert", "aggregated_list", "delete"):
        gcp.ask("fail", operation=f"instances.{operation}", **fault)
    (vm,) = provider.launch(wish(offer)).vms
    assert [each.vm_id for each in provider.list_vms("job")] == [vm.vm_id]
    provider.terminate([vm.vm_id])
    finish(gcp)
    assert alive(gcp) == 0
    assert sum(kind == "instances.bulk_insert" for kind in sent(gcp)) == 2
    assert len(gcp.ask("bill")) == 1


def test_a_throttle_that_lasts_is_handed_up(gcp: FakeGcp) -> None:
    gcp.ask(
        "fail",
        operation="instances.aggregated_list",
        kind="error",
        code="rateLimitExceeded",
        status=429,
        times=9,
        headers={"Retry-After": "17"},
    )
    with pytest.raises(ThrottledError) as told:
        gcp.provider().list_vms("job")
    assert told.value.retry_after_s == 17


@pytest.mark.parametrize("kind", ["drop", "lost", "hang"])
def test_a_launch_without_an_answer_is_neither_repeated_nor_forgotten(
    gcp: FakeGcp, kind: str
) -> None:
    provider = gcp.provider(answer_s=0.5 if kind == "hang" else 20.0)
    asked = wish(spot(provider), 2)
    gcp.ask("fail", operation="instances.bulk_insert", kind=kind, seconds=1.0)
    with pytest.raises(CloudError) as told:
        provider.launch(asked)
    assert type(told.value) is CloudError
    ids = {vm.vm_id for vm in provider.launch(asked).vms}
    assert len(ids) == alive(gcp) == 2


def test_a_launch_whose_vms_are_gone_again_is_not_made_again(gcp: FakeGcp) -> None:
    """Even weeks later, when Google has forgotten the id of the request."""
    provider = gcp.provider()
    asked = wish(spot(provider), 2)
    first, second = provider.launch(asked).vms
    gcp.ask("preempt", zone=ZONE, name=first.vm_id.partition(".")[0])
    again = gcp.provider().launch(asked)
    states = {vm.vm_id: vm.state for vm in again.vms}
    assert states == {
        first.vm_id: VmState.TERMINATED,
        second.vm_id: VmState.RUNNING,
    }
    assert sum(kind == "instances.bulk_insert" for kind in sent(gcp)) == 1


def test_a_zone_that_does_not_answer_is_not_an_empty_zone(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    rent(provider)
    gcp.ask("silence", zone=ZONE)
    with pytest.raises(CloudError, match=ZONE):
        provider.list_vms("job")


def test_unknown_and_gone_vms_may_be_terminated(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    vms = rent(provider, 2)
    unknown = [f"nobody.{ZONE}", "x.us-central1-a", "i-1.mars", ""]
    provider.terminate([*unknown, *(vm.vm_id for vm in vms)])
    finish(gcp)
    provider.terminate([vm.vm_id for vm in vms])
    assert alive(gcp) == 0


# --- lists that lag behind ------------------------------------------------------------


def test_a_vm_is_listed_though_the_cloud_does_not_list_it_yet(gcp: FakeGcp) -> None:
    gcp.ask("lag", hide_s=30, linger_s=60)
    provider = gcp.provider()
    (vm,) = rent(provider)
    assert provider.list_vms("job") == (vm,)
    assert gcp.provider().list_vms("job") == ()
    gcp.ask("pass_time", seconds=31)
    assert [each.state for each in provider.list_vms("job")] == [VmState.RUNNING]
    provider.terminate([vm.vm_id])
    finish(gcp)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.STOPPING
    gcp.ask("pass_time", seconds=61)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.TERMINATED


@pytest.mark.parametrize("call", ["preempt", "run_out"])
def test_a_vm_that_was_taken_is_told_with_its_end(gcp: FakeGcp, call: str) -> None:
    provider = gcp.provider()
    first, second = rent(provider, 2)
    gcp.ask(call, zone=ZONE, name=first.vm_id.partition(".")[0])
    listed = {vm.vm_id: vm for vm in provider.list_vms("job")}
    assert listed[second.vm_id].state is VmState.RUNNING
    gone = listed[first.vm_id]
    assert gone.state is VmState.TERMINATED
    (row,) = (row for row in gcp.ask("bill") if row["ended_at"] is not None)
    assert gone.ended_at == row["ended_at"]
    assert gone.launched_at == row["launched_at"]


# --- what VMs share -------------------------------------------------------------------


def test_launches_at_the_same_time_share_one_network(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    offer = spot(provider)
    with ThreadPoolExecutor(3) as pool:
        wishes = [wish(offer, intent=f"intent-{n}") for n in range(3)]
        results = list(pool.map(provider.launch, wishes))
    assert sum(len(result.vms) for result in results) == 3
    assert sent(gcp).count("networks.insert") == 1
    assert sent(gcp).count("firewalls.insert") == 2


def test_a_network_that_somebody_removed_is_made_again(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    gcp.provider().release("job")
    with pytest.raises(CloudError) as told:
        rent(provider, intent="intent-2")
    assert type(told.value) is CloudError
    assert rent(provider, intent="intent-2")


def test_a_second_region_gets_a_subnet_of_other_addresses(gcp: FakeGcp) -> None:
    gcp.ask("stock", zone="us-west1-a", kind=KIND, count=1)
    provider = gcp.provider(regions=(REGION, "us-west1"))
    for number, zone in enumerate((ZONE, "us-west1-a")):
        offer = next(o for o in provider.offers() if o.zone == zone)
        assert provider.launch(wish(offer, intent=f"intent-{number}")).vms
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


def test_a_vm_that_switched_itself_off_loses_its_disk_at_release(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    (vm,) = rent(provider)
    gcp.ask("switch_off", zone=ZONE, name=vm.vm_id.partition(".")[0])
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.STOPPING
    provider.release("job")
    assert gcp.ask("left") == []


# --- interruptions and SSH ------------------------------------------------------------


def test_an_interruption_can_be_asked_for_and_is_seen_as_an_end(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    (vm,) = rent(provider)
    provider.interrupt(vm.vm_id)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.TERMINATED
    assert listed.ended_at is not None
    with pytest.raises(VmNotFoundError):
        provider.interrupt(vm.vm_id)


def test_a_vm_is_entered_by_the_keys_that_its_guest_agent_told(gcp: FakeGcp) -> None:
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
    inside = gcp.provider(public_addresses=False).ssh_target(vm.vm_id)
    assert inside is not None
    assert inside.host == vm.private_address
    with pytest.raises(VmNotFoundError):
        provider.ssh_target(f"nobody.{ZONE}")
