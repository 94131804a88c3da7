"""The adapter against the fake: faults, lagging lists, and what only Azure can do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fakes.azure import (
    CREDENTIALS,
    FAMILY,
    KIND,
    ON_DEMAND_USD,
    REGION,
    SPOT_USD,
    ZONE,
    FakeAzure,
)
from tests.fakes.azure_world import SUBSCRIPTION

from spottrain.cloud.azure.provider import AzureProvider
from spottrain.cloud.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    PriceTooHighError,
    QuotaExceededError,
    ThrottledError,
    VmNotFoundError,
)
from spottrain.cloud.provider import (
    ChecksAccount,
    FindsOrphans,
    LaunchRequest,
    Offer,
    ReachedBySsh,
    ReleasesJob,
    ReportsQuota,
    SimulatesInterruption,
    Vm,
    VmState,
)

NO_SUBNET = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/nobodys/providers/"
    "Microsoft.Network/virtualNetworks/none/subnets/none"
)


def offer_in(provider: AzureProvider, zone: str = ZONE, *, spot: bool = True) -> Offer:
    offers = provider.offers()
    return next(offer for offer in offers if (offer.zone, offer.spot) == (zone, spot))


def wish(
    offer: Offer, count: int = 1, intent: str = "intent-1", job: str = "job"
) -> LaunchRequest:
    return LaunchRequest(
        token=f"uid-{intent}",
        job=job,
        intent=intent,
        offer=offer,
        count=count,
        lease_s=600,
    )


def rent(
    provider: AzureProvider, count: int = 1, intent: str = "intent-1", job: str = "job"
) -> list[Vm]:
    return list(provider.launch(wish(offer_in(provider), count, intent, job)).vms)


def alive(azure: FakeAzure) -> int:
    return sum(vm["ended_at"] is None for vm in azure.ask("bill"))


def sent(azure: FakeAzure) -> list[str]:
    return [request["operation"] for request in azure.ask("requests")]


def test_it_can_do_all_that_azure_can(azure: FakeAzure) -> None:
    provider = azure.provider()
    assert isinstance(provider, ChecksAccount)
    assert isinstance(provider, FindsOrphans)
    assert isinstance(provider, ReachedBySsh)
    assert isinstance(provider, ReleasesJob)
    assert isinstance(provider, ReportsQuota)
    assert isinstance(provider, SimulatesInterruption)


def test_importing_and_making_it_costs_no_sdk() -> None:
    code = (
        "import sys\n"
        "from spottrain.cloud.azure.provider import AzureProvider as P\n"
        "from spottrain.cloud.azure.settings import AzureSettings as S\n"
        "P(S(instance_types=()), None)\n"
        "sys.exit(any(n.partition('.')[0] in ('azure', 'msal') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"instance_types": ("Standard_X9",)}, "Standard_X9"),
        ({"image": "ubuntu"}, "publisher:offer:sku:version"),
        ({"public_addresses": False}, "azure.subnets"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_asked(
    azure: FakeAzure, settings: dict[str, object], told: str
) -> None:
    with pytest.raises(MisconfiguredError, match=told):
        azure.provider(**settings)
    assert sent(azure) == []


def test_no_vm_is_made_without_a_key(azure: FakeAzure) -> None:
    provider = azure.provider(public_key="")
    with pytest.raises(MisconfiguredError, match="public key"):
        rent(provider)


# --- the market -----------------------------------------------------------------------


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
def test_what_is_closed_to_the_account_is_not_offered(
    azure: FakeAzure, size: dict[str, object], zones: set[tuple[str, bool]]
) -> None:
    azure.offer(REGION, KIND, **size)
    found = {(offer.zone, offer.spot) for offer in azure.provider().offers()}
    assert found == zones


def test_looking_every_second_asks_for_sizes_and_prices_once(azure: FakeAzure) -> None:
    provider = azure.provider()
    first = provider.offers()
    assert [provider.offers() for _ in range(3)] == [first] * 3
    assert sent(azure) == ["LIST skus"]


def test_quotas_are_told_by_region_and_family(azure: FakeAzure) -> None:
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
    (west,) = provider.launch(wish(offer_in(provider, "westus"), intent="i-2")).vms
    listed = {vm.vm_id: vm.offer.zone for vm in provider.list_vms("job")}
    assert listed == {east.vm_id: ZONE, west.vm_id: "westus"}
    provider.terminate(listed)
    provider.release("job")
    assert azure.ask("left") == []


def test_on_demand_machines_are_no_spot_vms(azure: FakeAzure) -> None:
    provider = azure.provider()
    (vm,) = provider.launch(wish(offer_in(provider, spot=False))).vms
    assert not vm.offer.spot
    assert vm.offer.usd_per_hour == ON_DEMAND_USD
    with pytest.raises(CloudError) as told:
        provider.interrupt(vm.vm_id)
    assert type(told.value) is CloudError


# --- when things go wrong -------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a while"])
def test_a_stock_out_is_no_capacity_and_leaves_no_vm(
    azure: FakeAzure, late: bool
) -> None:
    azure.ask("moods", late=late)
    provider = azure.provider()
    asked = wish(offer_in(provider), 2)
    azure.ask("stock", zone=ZONE, instance_type=KIND, count=0)
    with pytest.raises(NoCapacityError):
        provider.launch(asked)
    assert provider.list_vms("job") == ()
    azure.ask("stock", zone=ZONE, instance_type=KIND, count=2)
    assert len(provider.launch(asked).vms) == 2


def test_machines_that_are_undecided_count_until_they_fail(azure: FakeAzure) -> None:
    azure.ask("moods", late=True)
    azure.ask("paces", create_s=30)
    provider = azure.provider(allocation_s=0.05)
    vms = rent(provider, 4)
    assert {vm.state for vm in vms} == {VmState.STARTING}
    azure.ask("pass_time", seconds=31)
    states = [vm.state for vm in provider.list_vms("job")]
    assert sorted(states) == [*[VmState.RUNNING] * 3, VmState.STOPPING]
    azure.ask("pass_time", seconds=1)
    assert len(provider.list_vms("job")) == 3  # what failed was cleared away


@pytest.mark.parametrize(
    ("setup", "settings", "kind"),
    [
        (
            lambda a: a.ask("quota", region=REGION, family="lowPriorityCores", vcpus=3),
            {},
            QuotaExceededError,
        ),
        (lambda a: a.ask("expire", expired=True), {}, AuthError),
        (lambda a: a.ask("skew", seconds=3600), {}, AuthError),
        (lambda a: a.ask("moods", denied_grants=True), {}, AuthError),
        (lambda a: None, {"max_usd_per_hour": 0.1}, PriceTooHighError),
        (lambda a: None, {"image": "no:such:image:latest"}, MisconfiguredError),
        (lambda a: None, {"resource_group": "nobodys"}, MisconfiguredError),
        (lambda a: None, {"subnets": {REGION: NO_SUBNET}}, MisconfiguredError),
    ],
    ids=["quota", "expired", "clock", "grants", "price", "image", "group", "subnet"],
)
def test_a_refusal_says_what_can_be_done_and_costs_nothing(
    azure: FakeAzure,
    setup: Callable[[FakeAzure], None],
    settings: dict[str, object],
    kind: type[CloudError],
) -> None:
    provider = azure.provider(**settings)
    asked = wish(offer_in(provider))
    setup(azure)
    with pytest.raises(kind) as refusal:
        provider.launch(asked)
    assert "\n" not in str(refusal.value)
    assert alive(azure) == 0


def test_without_credentials_it_says_what_to_do(
    azure: FakeAzure, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    provider = azure.provider(poll_s=0.03)  # clients of its own
    with pytest.raises(AuthError, match="az login"):
        provider.list_vms("job")


def test_a_missing_subscription_is_told(
    azure: FakeAzure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_SUBSCRIPTION_ID", raising=False)
    with pytest.raises(MisconfiguredError, match="AZURE_SUBSCRIPTION_ID"):
        azure.provider(subscription="").list_vms("job")


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "error", "code": "Throttled", "status": 429},
        {"kind": "error", "code": "InternalError", "status": 500},
        {"kind": "drop"},
        {"kind": "lost"},
    ],
    ids=["throttled", "5xx", "dropped", "reply lost"],
)
def test_the_sdk_tries_again_where_that_helps(
    azure: FakeAzure, fault: dict[str, object]
) -> None:
    provider = azure.provider(tries=4)
    azure.ask("fail", operation="PUT virtualMachines", **fault)
    (vm,) = rent(provider)
    for operation in ("LIST virtualMachines", "DELETE virtualMachines"):
        azure.ask("fail", operation=operation, **fault)
    assert [each.vm_id for each in provider.list_vms("job")] == [vm.vm_id]
    provider.terminate([vm.vm_id])
    assert len(azure.ask("bill")) == 1
    assert alive(azure) == 0


def test_a_throttle_that_lasts_is_handed_up(azure: FakeAzure) -> None:
    azure.ask(
        "fail",
        operation="LIST virtualMachines",
        kind="error",
        code="TooManyRequests",
        status=429,
        headers={"Retry-After": "17"},
    )
    with pytest.raises(ThrottledError) as told:
        azure.provider().list_vms("job")
    assert told.value.retry_after_s == 17


@pytest.mark.parametrize("kind", ["drop", "lost", "hang"])
def test_a_launch_without_an_answer_is_neither_repeated_nor_forgotten(
    azure: FakeAzure, kind: str
) -> None:
    provider = azure.provider(answer_s=0.5 if kind == "hang" else 20.0)
    asked = wish(offer_in(provider), 2)
    azure.ask("fail", operation="PUT virtualMachines", kind=kind, seconds=1.5)
    with pytest.raises(CloudError) as told:
        provider.launch(asked)
    assert type(told.value) is CloudError
    again = azure.provider()
    ids = {vm.vm_id for vm in again.launch(asked).vms}
    assert len(ids) == alive(azure) == len(azure.ask("bill")) == 2


def test_an_answer_that_is_lost_while_waiting_keeps_the_vm(azure: FakeAzure) -> None:
    provider = azure.provider()
    asked = wish(offer_in(provider))
    rent(provider, intent="intent-0")
    azure.ask("fail", operation="GET operations", kind="drop")
    with pytest.raises(CloudError):
        provider.launch(asked)
    assert alive(azure) == 2
    provider.launch(asked)
    assert alive(azure) == len(azure.ask("bill")) == 2


# --- lists that lag behind ------------------------------------------------------------


def test_a_vm_is_listed_though_the_cloud_does_not_list_it_yet(azure: FakeAzure) -> None:
    azure.ask("lag", hide_s=5, linger_s=60)
    provider = azure.provider()
    (vm,) = rent(provider)
    (listed,) = provider.list_vms("job")
    assert listed.vm_id == vm.vm_id
    assert azure.provider().list_vms("job") == ()
    azure.ask("pass_time", seconds=6)
    (listed,) = azure.provider().list_vms("job")
    assert listed.state is VmState.RUNNING
    assert listed.private_address.startswith("10.79.")
    provider.terminate([vm.vm_id])
    azure.ask("pass_time", seconds=59)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.STOPPING
    (misled,) = azure.provider().list_vms("job")
    assert misled.state is VmState.RUNNING
    azure.provider().terminate([misled.vm_id])  # gone long ago: no error
    azure.ask("pass_time", seconds=2)
    assert provider.list_vms("job") == ()


def test_an_eviction_before_the_first_list_is_seen(azure: FakeAzure) -> None:
    azure.ask("lag", hide_s=30, linger_s=0)
    provider = azure.provider()
    (vm,) = rent(provider)
    azure.ask("evict", name=vm.vm_id.partition(".")[0])
    assert provider.list_vms("job") == ()


def test_long_lists_are_read_page_by_page(azure: FakeAzure) -> None:
    azure.ask("moods", page=2)
    provider = azure.provider()
    ids = {vm.vm_id for vm in rent(provider, 3)}
    assert {vm.vm_id for vm in provider.list_vms("job")} == ids


def test_orphans_of_any_job_are_found_by_the_names_that_end_them(
    azure: FakeAzure,
) -> None:
    one, two = azure.provider(), azure.provider()
    ids = {vm.vm_id for vm in (*rent(one), *rent(two, intent="i-2", job="other"))}
    forgetful = azure.provider()
    assert {vm.vm_id for vm in forgetful.list_all()} == ids
    assert {vm.job for vm in forgetful.list_all()} == {"job", "other"}
    forgetful.terminate([*ids, "vm-of-nobody", "x.y", ""])
    assert alive(azure) == 0


def test_moments_are_the_clouds_own(azure: FakeAzure) -> None:
    azure.ask("skew", seconds=200)
    (vm,) = rent(azure.provider())
    (row,) = azure.ask("bill")
    assert vm.launched_at == pytest.approx(row["launched_at"], abs=0.1)
    assert vm.launched_at == pytest.approx(time.time() + 200, abs=20)


# --- what VMs share -------------------------------------------------------------------


def test_launches_at_the_same_time_share_one_network(azure: FakeAzure) -> None:
    provider = azure.provider()
    offer = offer_in(provider)
    with ThreadPoolExecutor(3) as pool:
        wishes = [wish(offer, intent=f"intent-{n}") for n in range(3)]
        results = list(pool.map(provider.launch, wishes))
    assert sum(len(result.vms) for result in results) == 3
    for made in ("resourceGroups", "virtualNetworks", "userAssignedIdentities"):
        assert sent(azure).count(f"PUT {made}") == 1


def test_what_somebody_removed_is_made_again(azure: FakeAzure) -> None:
    provider = azure.provider()
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    azure.provider().release("job")
    with pytest.raises(CloudError):
        rent(provider, intent="intent-2")
    assert rent(provider, intent="intent-2")


def test_a_group_of_that_name_that_is_somebody_elses_is_left_alone(
    azure: FakeAzure,
) -> None:
    azure.ask("users_own", group="spottrain-job", region=REGION)
    provider = azure.provider()
    with pytest.raises(MisconfiguredError, match="not job job's"):
        rent(provider)
    provider.release("job")
    assert "DELETE resourceGroups" not in sent(azure)


def test_nothing_is_released_while_vms_run(azure: FakeAzure) -> None:
    provider = azure.provider()
    (vm,) = rent(provider)
    with pytest.raises(CloudError, match=vm.vm_id):
        provider.release("job")
    assert alive(azure) == 1


def test_a_removal_that_takes_long_is_asked_about_again(azure: FakeAzure) -> None:
    azure.ask("paces", delete_s=60)
    provider = azure.provider(removal_s=0.1)
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    with pytest.raises(CloudError, match="ask again"):
        provider.release("job")
    with pytest.raises(CloudError, match="still removes"):
        rent(provider, intent="intent-2")
    azure.ask("pass_time", seconds=61)
    provider.release("job")
    assert azure.ask("left") == []


def test_an_eviction_that_leaves_card_and_disk_is_cleaned_up(azure: FakeAzure) -> None:
    azure.ask("moods", strays=True)
    provider = azure.provider()
    (vm,) = rent(provider)
    azure.ask("evict", name=vm.vm_id.partition(".")[0])
    assert any(name.startswith("disks/") for name in azure.ask("left"))
    provider.release("job")
    assert azure.ask("left") == []


@pytest.mark.parametrize("strays", [False, True])
def test_named_groups_and_subnets_are_used_and_left_alone(
    azure: FakeAzure, strays: bool
) -> None:
    azure.ask("moods", strays=strays)
    subnet = azure.ask("users_own", group="Theirs", region=REGION)
    provider = azure.provider(
        resource_group="Theirs",
        subnets={REGION: subnet},
        self_delete=False,
        public_addresses=False,
    )
    (vm, other) = rent(provider, 2)
    assert vm.vm_id.endswith(".theirs")
    assert {v.vm_id for v in provider.list_all()} == {vm.vm_id, other.vm_id}
    target = provider.ssh_target(vm.vm_id)
    assert target is not None
    assert target.host.startswith("10.79.")
    azure.ask("evict", name=vm.vm_id.partition(".")[0])
    provider.terminate([other.vm_id])
    provider.release("job")
    assert azure.ask("left") == []
    assert not {"DELETE resourceGroups", "PUT virtualNetworks"} & set(sent(azure))


def test_a_network_of_our_own_in_a_named_group_is_removed(azure: FakeAzure) -> None:
    azure.ask("users_own", group="theirs", region=REGION)
    provider = azure.provider(resource_group="theirs", self_delete=False)
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert azure.ask("left") == []


def test_in_a_shared_group_self_deletion_takes_an_identity_of_the_users(
    azure: FakeAzure,
) -> None:
    azure.ask("users_own", group="theirs", region=REGION)
    with pytest.raises(MisconfiguredError, match=r"azure\.identity"):
        rent(azure.provider(resource_group="theirs"))


# --- interruptions and SSH ------------------------------------------------------------


def test_an_interruption_can_be_asked_for_and_is_seen_as_an_end(
    azure: FakeAzure,
) -> None:
    provider = azure.provider()
    (vm,) = rent(provider)
    azure.ask("paces", evict_s=1800)
    provider.interrupt(vm.vm_id)
    assert [each.vm_id for each in provider.list_vms("job")] == [vm.vm_id]
    azure.ask("pass_time", seconds=1801)
    assert provider.list_vms("job") == ()
    for gone in (vm.vm_id, "vm-of-nobody"):
        with pytest.raises(VmNotFoundError):
            provider.interrupt(gone)


def test_a_vm_is_entered_by_the_key_that_it_was_made_with(azure: FakeAzure) -> None:
    provider = azure.provider()
    (vm,) = rent(provider)
    target = azure.provider().ssh_target(vm.vm_id)
    assert target is not None
    assert target.host.startswith("203.0.113.")
    assert (target.user, target.port) == ("spottrain", 22)
    (key,) = target.host_keys
    assert key.startswith("ssh-ed25519 ")
    asked = [
        r
        for r in azure.ask("requests")
        if r["operation"].endswith("PUT virtualMachines")
    ]
    assert asked[0]["body"]["tags"]["spottrain-host-key"] == key
    provider.terminate([vm.vm_id])
    with pytest.raises(VmNotFoundError):
        provider.ssh_target(vm.vm_id)


def test_what_a_job_needs_is_checked_without_renting(azure: FakeAzure) -> None:
    assert all(finding.ok for finding in azure.provider().check())
    azure.ask("moods", denied_grants=True)
    azure.ask("quota", region=REGION, family="lowPriorityCores", vcpus=0)
    types = (KIND, "Standard_ND96isr_H100_v5")
    provider = azure.provider(image="a:b:c:latest", instance_types=types)
    wrong = {finding.what for finding in provider.check() if not finding.ok}
    assert wrong == {
        "permissions",
        "types eastus",
        "image eastus",
        "quota eastus spot",
    }
    azure.ask("expire", expired=True)
    (only,) = provider.check()
    assert (only.what, only.ok) == ("credentials", False)
    assert not any("PUT" in operation for operation in sent(azure))
