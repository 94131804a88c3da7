"""What holds of the adapter of every cloud, against its fake."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tests.fakes import aws, azure, gcp
from tests.unit.cloud.renting import alive, launch_request, offer_in, rent, sent

from spottrain.cloud.port.errors import CloudError, ThrottledError
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
