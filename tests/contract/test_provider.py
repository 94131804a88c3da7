"""The contract of every provider (cloud/port/provider.py); conftest.py lists them."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
from tests.contract.account import Account
from tests.integration.ssh_hosts import unanswered

from spottrain.cloud.port.errors import CloudError, NoCapacityError, VmNotFoundError
from spottrain.cloud.port.provider import (
    CloudProvider,
    VmState,
)

BOOTSTRAP = unanswered()
GONE = (VmState.STOPPING, VmState.TERMINATED)


def test_it_is_a_provider_with_a_name(account: Account) -> None:
    provider = account.connect()
    assert isinstance(provider, CloudProvider)
    clouds = {offer.cloud for offer in provider.offers()}
    assert clouds == (account.clouds or {provider.name})


def test_offers_have_a_price_and_its_time(account: Account) -> None:
    offers = account.connect().offers()
    assert {offer.spot for offer in offers} == account.markets
    for offer in offers:
        assert offer.usd_per_hour > 0
        assert offer.gpus >= 1
        assert offer.gpu_memory_bytes > 0
        assert abs(offer.observed_at_s - time.time()) < 60


def test_a_machine_is_listed_from_launch_to_end(account: Account) -> None:
    provider = account.connect()
    launch_request = account.launch_request(provider.offers()[0])
    (vm,) = provider.launch(launch_request).vms
    assert (vm.job, vm.intent) == (account.job, launch_request.intent)
    assert vm.offer.zone == launch_request.offer.zone
    assert vm.ended_at_s is None
    assert vm.vm_id in {v.vm_id for v in account.connect().list_vms(account.job)}
    provider.terminate([vm.vm_id])
    (gone,) = account.connect().list_vms(account.job)
    assert gone.state in (VmState.STOPPING, VmState.TERMINATED)


def test_the_same_token_never_launches_twice(account: Account) -> None:
    first, second = account.connect(), account.connect()
    launch_request = account.launch_request(first.offers()[0], 2)
    ids = {vm.vm_id for vm in first.launch(launch_request).vms}
    assert {vm.vm_id for vm in second.launch(launch_request).vms} == ids
    assert {vm.vm_id for vm in first.list_vms(account.job)} == ids


def test_another_token_launches_more(account: Account) -> None:
    provider = account.connect()
    offer = provider.offers()[0]
    one = provider.launch(account.launch_request(offer)).vms
    two = provider.launch(account.launch_request(offer)).vms
    assert {vm.vm_id for vm in one}.isdisjoint(vm.vm_id for vm in two)


def test_a_launch_of_more_than_there_are_gives_what_there_is(account: Account) -> None:
    provider = account.connect()
    result = provider.launch(account.launch_request(provider.offers()[0], account.capacity + 1))
    assert len(result.vms) == account.capacity


def test_a_launch_without_machines_is_no_capacity(account: Account) -> None:
    provider = account.connect()
    offer = provider.offers()[0]
    vms = provider.launch(account.launch_request(offer, account.capacity)).vms
    launch_request = account.launch_request(offer)
    with pytest.raises(NoCapacityError):
        provider.launch(launch_request)
    provider.terminate([vms[0].vm_id])
    assert len(provider.launch(launch_request).vms) == 1


def test_terminating_ended_or_unknown_vms_is_no_error(account: Account) -> None:
    provider = account.connect()
    (vm,) = provider.launch(account.launch_request(provider.offers()[0])).vms
    for _ in range(2):
        provider.terminate([vm.vm_id, "vm-of-nobody"])
    provider.terminate([])


def test_a_job_lists_only_its_own_vms(account: Account) -> None:
    provider = account.connect()
    provider.launch(account.launch_request(provider.offers()[0]))
    assert provider.list_vms(f"not-{account.job}") == ()


def test_starting_an_agent_is_idempotent(account: Account) -> None:
    provider = account.connect()
    (vm,) = provider.launch(account.launch_request(provider.offers()[0])).vms
    for _ in range(2):
        provider.start_agent(vm.vm_id, BOOTSTRAP)
    (listed,) = provider.list_vms(account.job)
    assert listed.image in ("", vm.image), "lists may leave the image out"
    assert listed == dataclasses.replace(vm, state=VmState.RUNNING, image=listed.image)


def test_an_agent_cannot_be_started_on_an_ended_vm(account: Account) -> None:
    provider = account.connect()
    (vm,) = provider.launch(account.launch_request(provider.offers()[0])).vms
    provider.terminate([vm.vm_id])
    for vm_id in (vm.vm_id, "vm-of-nobody"):
        with pytest.raises(VmNotFoundError):
            provider.start_agent(vm_id, BOOTSTRAP)


def test_a_release_leaves_nothing_of_the_job(account: Account) -> None:
    provider = account.connect()
    assert account.left is not None
    (vm,) = provider.launch(account.launch_request(provider.offers()[0])).vms
    assert account.left()
    provider.terminate([vm.vm_id])
    for _ in range(2):
        provider.release(account.job)
    assert account.left() == []


@pytest.mark.rotated
@pytest.mark.parametrize("carried_out", [False, True], ids=["unsent", "reply lost"])
def test_a_crash_at_any_request_rents_nothing_twice(account: Account, carried_out: bool) -> None:
    """The manager dies with its line to the cloud, and another takes over."""
    wire, left = account.wire, account.left
    assert wire is not None
    assert left is not None
    offer = account.connect().offers()[0]
    for after in itertools.count():
        launch_request = account.launch_request(offer, 2)
        wire.cut(after, carried_out=carried_out)
        died = False
        try:
            account.connect().launch(launch_request)
        except CloudError:
            died = True
        wire.heal()
        provider = account.connect()
        vms = provider.launch(launch_request).vms
        ids = {vm.vm_id for vm in vms}
        listed = provider.list_vms(account.job)
        assert {vm.vm_id for vm in listed if vm.state not in GONE} == ids
        assert len(ids) == 2
        assert {vm.intent for vm in vms} == {launch_request.intent}
        provider.terminate(ids)
        provider.release(account.job)
        assert left() == []
        if not died:
            break
    assert after > 0
