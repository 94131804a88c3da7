from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_vm, an_offer

from spottrain.cloud.port.errors import VmNotFoundError
from spottrain.cloud.port.provider import SshTarget
from spottrain.cloud.ssh.rented.vm import RentedVm, VmAccess
from spottrain.cloud.ssh.transport.session import dial

OFFER = an_offer(
    cloud="aws",
    region="us-east-1",
    zone="us-east-1a",
    instance_type="g5.12xlarge",
    usd_per_hour=2.0,
    gpus=4,
    gpu_memory_bytes=24_000_000_000,
)
VM = a_vm("aws.i-1.us-east-1", OFFER, intent="intent-1")
ACCESS = VmAccess(key_file=Path("key"), python="python3.12")


def target(**what: Any) -> SshTarget:
    known = {"host": "192.0.2.1", "user": "ubuntu", "host_keys": ("ssh-ed25519 AAAA",)}
    return SshTarget(**{**known, **what})


def test_a_vm_is_a_host_with_the_offered_machine() -> None:
    host = ACCESS.host(VM, target(port=2222))
    assert (host.address, host.port, host.user) == ("192.0.2.1", 2222, "ubuntu")
    assert (host.slots, host.slot_memory_bytes) == (4, 24_000_000_000)
    assert host.host_keys == ("ssh-ed25519 AAAA",)
    assert (host.host_key, host.known_hosts.exists()) == (None, True)
    assert host.known_hosts.read_text() == ""
    assert (host.key_file, host.python) == (Path("key"), "python3.12")
    # Where SSH arrives is where other VMs reach it.
    assert host.private_address is None


def test_a_vm_must_have_the_gpus_that_it_was_rented_with() -> None:
    assert ACCESS.host(VM, target()).gpus == 4
    cores = replace(VM, offer=replace(OFFER, device="cpu"))
    assert (ACCESS.host(cores, target()).gpus, cores.offer.gpus) == (0, 4)


def test_the_connection_is_kept_while_the_address_is_the_same() -> None:
    rented_vm = RentedVm(VM)
    first = rented_vm.enter(ACCESS.host(VM, target()), dial)
    assert rented_vm.enter(ACCESS.host(VM, target()), dial) is first
    assert rented_vm.enter(ACCESS.host(VM, target(host="192.0.2.2")), dial) is not first


def test_a_terminated_vm_is_not_found() -> None:
    rented_vm = RentedVm(VM)
    rented_vm.check_not_terminated()
    rented_vm.mark_terminated()
    assert rented_vm.woken.is_set()
    with pytest.raises(VmNotFoundError, match="was terminated"):
        rented_vm.check_not_terminated()


def test_polls_back_off_and_pause_during_a_start() -> None:
    rented_vm = RentedVm(VM)
    assert rented_vm.poll_is_due
    rented_vm.start = Future()
    assert not rented_vm.poll_is_due
    rented_vm.start.set_result(None)
    assert rented_vm.poll_is_due
    rented_vm.note_poll(runs=False)
    assert not rented_vm.poll_is_due


def test_a_vm_whose_agent_ran_is_polled_at_once() -> None:
    rented_vm = RentedVm(VM)
    rented_vm.note_poll(runs=False)
    rented_vm.note_poll(runs=True)
    assert rented_vm.poll_is_due


def test_the_last_user_closes_the_connection() -> None:
    rented_vm = RentedVm(VM)
    line = rented_vm.enter(ACCESS.host(VM, target()), dial)
    asked: list[RentedVm] = []

    def may_hang_up(which: RentedVm) -> bool:
        asked.append(which)
        return True

    with rented_vm.in_use(may_hang_up):
        with rented_vm.in_use(may_hang_up):
            pass
        assert asked == []
    assert asked == [rented_vm]
    assert not line.connected
