"""What holds of the adapter of every cloud, against its fake."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tests.fakes import aws, azure, gcp
from tests.fakes.azure_world import SUBSCRIPTION
from tests.unit.cloud.renting import alive, launch_request, offer_in, rent, sent

from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    LoginExpiredError,
    MisconfiguredError,
    NoCapacityError,
    QuotaExceededError,
    ThrottledError,
    VmNotFoundError,
)
from spottrain.cloud.port.provider import CloudProvider

Fake = aws.FakeAws | azure.FakeAzure | gcp.FakeGcp
ABILITIES: set[Any] = {
    CloudProvider.admit,
    CloudProvider.check,
    CloudProvider.list_all,
    CloudProvider.principal,
    CloudProvider.quotas,
    CloudProvider.release,
    CloudProvider.spot_pools,
    CloudProvider.ssh_target,
    CloudProvider.time_s,
}

EVERY = pytest.mark.parametrize("fake", ["aws", "azure", "gcp"], indirect=True)


@dataclass(frozen=True)
class Words:
    """What an adapter's calls are called by its cloud."""

    launch: str
    list: str
    end: str
    throttled: dict[str, Any]
    """The fault by which its cloud says that it was asked too often."""
    shared: dict[str, int]
    """How often each request is made for what the VMs of a job share."""
    patient: dict[str, Any]
    """Settings with which it tries often."""
    retries_launch: bool = True
    more: frozenset[Any] = frozenset()
    """What it can do that others cannot."""


WORDS: dict[type[Fake], Words] = {
    aws.FakeAws: Words(
        "RunInstances",
        "DescribeInstances",
        "TerminateInstances",
        {"code": "RequestLimitExceeded", "status": 503},
        {"CreateSecurityGroup": 1, "ImportKeyPair": 1},
        {"tries": 4},
        retries_launch=False,
        more=frozenset({CloudProvider.move}),
    ),
    azure.FakeAzure: Words(
        "PUT virtualMachines",
        "LIST virtualMachines",
        "DELETE virtualMachines",
        {"code": "TooManyRequests", "status": 429},
        {"PUT resourceGroups": 1, "PUT virtualNetworks": 1, "PUT userAssignedIdentities": 1},
        {"tries": 4},
    ),
    gcp.FakeGcp: Words(
        "instances.bulk_insert",
        "instances.aggregated_list",
        "instances.delete",
        {"code": "rateLimitExceeded", "status": 403},
        {"networks.insert": 1, "firewalls.insert": 2},
        {"patience_s": 20.0},
    ),
}


def test_it_can_do_all_that_its_cloud_can(fake: Fake) -> None:
    provider = fake.provider()
    asked: set[Any] = ABILITIES | {CloudProvider.move, CloudProvider.start_agent}
    can = {ability for ability in asked if provider.can(ability)}
    assert can == ABILITIES | WORDS[type(fake)].more


@EVERY
@pytest.mark.parametrize("kind", ["drop", "lost", "hang"])
def test_a_launch_without_an_answer_is_neither_repeated_nor_forgotten(
    fake: Fake, kind: str
) -> None:
    # A busy machine may not answer the calls before it within half a second either, and
    # meets the fault long after nobody waits for an answer any more.
    limit, times = ({"answer_s": 0.5}, 99) if kind == "hang" else ({}, 1)
    words = WORDS[type(fake)]
    provider = fake.provider(**(limit if words.retries_launch else words.patient | limit))
    asked = launch_request(offer_in(fake.provider()), 2)
    fake.ask("fail", operation=words.launch, kind=kind, seconds=1.5, times=times)
    with pytest.raises(CloudError) as told:
        provider.launch(asked)
    assert type(told.value) is CloudError
    fake.ask("recover")
    ids = {vm.vm_id for vm in fake.provider().launch(asked).vms}
    assert len(ids) == alive(fake) == len(fake.ask("bill")) == 2


@EVERY
@pytest.mark.parametrize("fault", ["throttled", "5xx", "drop", "lost"])
def test_the_sdk_retries_transient_errors(fake: Fake, fault: str) -> None:
    words = WORDS[type(fake)]
    errors = {"throttled": words.throttled, "5xx": {"code": "InternalError", "status": 503}}
    told = {"kind": "error", **errors[fault]} if fault in errors else {"kind": fault}
    provider = fake.provider(**words.patient)
    asked = launch_request(offer_in(provider))
    for operation in (words.launch, words.list, words.end)[not words.retries_launch :]:
        fake.ask("fail", operation=operation, **told)
    (vm,) = provider.launch(asked).vms
    assert [each.vm_id for each in provider.list_vms("job")] == [vm.vm_id]
    provider.terminate([vm.vm_id])
    assert alive(fake) == 0
    assert len(fake.ask("bill")) == 1


@EVERY
def test_persistent_throttling_is_reported(fake: Fake) -> None:
    words = WORDS[type(fake)]
    later = {"headers": {"Retry-After": "17"}}
    fake.ask("fail", operation=words.list, kind="error", times=9, **words.throttled, **later)
    with pytest.raises(ThrottledError) as told:
        fake.provider().list_vms("job")
    assert told.value.retry_after_s == 17


@EVERY
def test_launches_at_the_same_time_share_what_vms_of_a_job_share(fake: Fake) -> None:
    provider = fake.provider()
    offer = offer_in(provider)
    with ThreadPoolExecutor(3) as pool:
        launch_requests = [launch_request(offer, intent=f"intent-{n}") for n in range(3)]
        results = list(pool.map(provider.launch, launch_requests))
    assert sum(len(result.vms) for result in results) == 3
    shared = WORDS[type(fake)].shared
    assert {request: sent(fake).count(request) for request in shared} == shared


@EVERY
def test_what_vms_share_is_removed_after_the_last_and_made_again(fake: Fake) -> None:
    provider = fake.provider()
    (vm,) = rent(provider)
    with pytest.raises(CloudError, match=vm.vm_id):
        provider.release("job")
    assert alive(fake) == 1
    provider.terminate([vm.vm_id])
    fake.provider().release("job")
    with pytest.raises(CloudError):
        rent(provider, intent="intent-2")
    assert rent(provider, intent="intent-2")


NO_SUBNET = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/nobodys/providers/"
    "Microsoft.Network/virtualNetworks/none/subnets/none"
)
GCP_QUOTA = {"metric": "PREEMPTIBLE_NVIDIA_A100_GPUS", "limit": 0}
AZURE_QUOTA = {"region": azure.REGION, "family": "lowPriorityCores", "vcpus": 3}
FAULTS: dict[str, list[tuple[str, dict[str, Any], type[CloudError]]]] = {
    "aws": [
        ("stock", {"zone": aws.ZONE, "instance_type": aws.KIND, "count": 0}, NoCapacityError),
        ("withdraw", {"zone": aws.ZONE, "instance_type": aws.KIND}, NoCapacityError),
        ("quota", {"code": "L-3819A6DF", "vcpus": 3}, QuotaExceededError),
        ("expire", {"expired": True}, LoginExpiredError),
    ],
    "azure": [
        ("quota", AZURE_QUOTA, QuotaExceededError),
        ("expire", {"expired": True}, LoginExpiredError),
        ("skew", {"seconds": 3600}, LoginExpiredError),
        ("moods", {"denied_grants": True}, AuthError),
    ],
    "gcp": [
        ("stock", {"zone": gcp.ZONE, "kind": gcp.KIND, "count": 0}, NoCapacityError),
        ("withdraw", {"zone": gcp.ZONE, "kind": gcp.KIND}, NoCapacityError),
        ("quota", GCP_QUOTA, QuotaExceededError),
        ("expire", {"expired": True}, LoginExpiredError),
        ("skew", {"seconds": 7200}, LoginExpiredError),
    ],
}
"""What happens between the list of offers and the launch: the fake's method, its arguments."""
MISSING: dict[str, list[dict[str, Any]]] = {
    "aws": [
        {"image": "ami-00000000000000000"},
        {"image": "No Such Image *"},
        {"security_groups": ("sg-00000000000000000",)},
        {"subnets": {aws.ZONE: "subnet-00000000000000000"}},
    ],
    "azure": [
        {"image": "no:such:image:latest"},
        {"resource_group": "nobodys"},
        {"subnets": {azure.REGION: NO_SUBNET}},
    ],
    "gcp": [
        {"image": "projects/nobody/global/images/family/none"},
        {"image": "projects/nobody/global/images/none"},
        {"image": "whatever"},
        {"disk_gib": 10},
        {"network": "nowhere"},
        {"network": "theirs", "subnetworks": {gcp.REGION: "nowhere"}},
    ],
}
"""Settings that name what is not there."""


def check_refusal(fake: Fake, provider: CloudProvider, asked: Any, kind: type[CloudError]) -> None:
    with pytest.raises(kind) as refusal:
        provider.launch(asked)
    assert type(refusal.value) is kind
    assert "\n" not in str(refusal.value)
    assert alive(fake) == 0


@pytest.mark.parametrize(
    ("fake", "fault", "fields", "kind"),
    [(cloud, *fault) for cloud, faults in FAULTS.items() for fault in faults],
    indirect=["fake"],
)
def test_an_error_says_what_to_do_and_leaves_no_vm(
    fake: Fake, fault: str, fields: dict[str, Any], kind: type[CloudError]
) -> None:
    provider = fake.provider()
    asked = launch_request(offer_in(provider))
    fake.ask(fault, **fields)
    check_refusal(fake, provider, asked, kind)


@pytest.mark.parametrize(
    ("fake", "settings"),
    [(cloud, settings) for cloud, missing in MISSING.items() for settings in missing],
    indirect=["fake"],
)
def test_missing_resources_are_reported_before_a_launch(
    fake: Fake, settings: dict[str, Any]
) -> None:
    if isinstance(fake, gcp.FakeGcp):
        fake.ask("users_own_network", region=gcp.REGION)
    provider = fake.provider(**settings)
    check_refusal(fake, provider, launch_request(offer_in(provider)), MisconfiguredError)
    assert "instances.bulk_insert" not in sent(fake)  # others say it of the VM itself


@pytest.mark.parametrize(
    ("fake", "name"), [("aws", "x9.huge"), ("gcp", "x9-huge")], indirect=["fake"]
)
def test_a_type_without_facts_is_refused_before_anything_is_asked(fake: Fake, name: str) -> None:
    with pytest.raises(MisconfiguredError, match=name):
        fake.provider(instance_types=(name,))


@EVERY
def test_unknown_and_ended_vms_do_not_keep_the_others_alive(fake: Fake) -> None:
    provider = fake.provider()
    vm_ids = [vm.vm_id for vm in rent(provider, 2)]
    others = ("aws.x.us-east-1", "aws.i-1.mars", "gcp.i-1.mars", f"gcp.nobody.{gcp.ZONE}")
    provider.terminate([*others, "azure.x.y", "vm-of-nobody", "", *vm_ids])
    assert alive(fake) == 0
    provider.terminate(vm_ids)


REGIONS = {"aws": (aws.REGION, "us-west-2"), "gcp": (gcp.REGION, "us-west1")}
WEST: dict[str, tuple[str, dict[str, Any]]] = {
    "aws": ("us-west-2a", {"instance_type": aws.KIND}),
    "gcp": ("us-west1-a", {"kind": gcp.KIND}),
}
"""A zone of a second region, and how the fake names the type that it has one of."""


@pytest.mark.parametrize("fake", WEST, indirect=True)
def test_vms_of_all_regions_are_found(fake: Any) -> None:
    home, cloud = (aws.ZONE, "aws") if isinstance(fake, aws.FakeAws) else (gcp.ZONE, "gcp")
    west, kind = WEST[cloud]
    fake.ask("stock", zone=west, count=1, **kind)
    if cloud == "aws":
        fake.ask("price", zone=west, usd=0.2, at_s=time.time() - 60, **kind)
    provider = fake.provider(regions=REGIONS[cloud])
    offers = {offer.zone: offer for offer in provider.offers() if offer.spot}
    east = provider.launch(launch_request(offers[home], 2)).vms
    there = provider.launch(launch_request(offers[west], intent="intent-2")).vms
    listed = {vm.vm_id: vm.offer.zone for vm in provider.list_vms("job")}
    assert listed == {vm.vm_id: vm.offer.zone for vm in (*east, *there)}
    forgetful = fake.provider()  # of the second region
    assert {vm.vm_id for vm in forgetful.list_all()} == listed.keys()
    forgetful.terminate(listed)
    provider.release("job")
    assert fake.ask("left") == []


@pytest.mark.parametrize("fake", ["aws", "gcp"], indirect=True)
def test_ssh_accepts_the_host_keys_that_the_cloud_reports(fake: Any) -> None:
    provider = fake.provider()
    (vm,) = rent(provider)
    assert provider.ssh_target(vm.vm_id) is None
    name = vm.vm_id.split(".")[1]
    if isinstance(fake, aws.FakeAws):
        fake.ask("console", instance_id=name, keys="ssh-ed25519 AAAA root@host")
        user, nobody = "ubuntu", "aws.i-00000000000000000.us-east-1"
    else:
        fake.ask("tell_host_key", name=name, key="ssh-ed25519 AAAA")
        user, nobody = "spottrain", f"gcp.nobody.{gcp.ZONE}"
    target = provider.ssh_target(vm.vm_id)
    assert target is not None
    assert target.host_keys == ("ssh-ed25519 AAAA",)
    assert (target.user, target.port) == (user, 22)
    assert target.host not in ("", vm.private_address)
    for from_there in ({"public_addresses": False}, {"inside": True}):
        inside = fake.provider(**from_there).ssh_target(vm.vm_id)
        assert inside is not None
        assert inside.host == vm.private_address
    with pytest.raises(VmNotFoundError):
        provider.ssh_target(nobody)
