from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import pytest
from tests.unit.cloud.ssh.rented.test_vm import VM

from spottrain.cloud.ssh.rented.relays import OUTAGE_S, Region, Relays, is_direct
from spottrain.cloud.ssh.rented.vm import RentedVm


def test_a_lost_relay_explains_silence_for_a_limited_time() -> None:
    region = Region()
    assert region.may_cause_silence(100.0)
    assert region.may_cause_silence(100.0 + OUTAGE_S - 1)
    assert not region.may_cause_silence(100.0 + OUTAGE_S)
    assert not region.may_cause_silence(100.0 + 10 * OUTAGE_S)


@pytest.mark.parametrize(
    ("address", "direct"),
    [("127.0.0.1", False), ("localhost", False), ("10.0.0.7", True)],
)
def test_only_a_manager_on_loopback_needs_relays(address: str, direct: bool) -> None:
    assert is_direct((address, 443)) == direct


def test_a_vm_is_left_once_nothing_is_asked_of_it_any_more() -> None:
    rented_vm = RentedVm(VM)
    is_polled, may_end = threading.Event(), threading.Event()

    def enter(_: RentedVm) -> None:
        is_polled.set()
        assert may_end.wait(600)

    with ThreadPoolExecutor(2) as threads:
        relays = Relays(
            lambda: [] if rented_vm.is_reserved else [rented_vm],
            lambda vms, do: [threads.submit(do, each) for each in vms],
            enter,
        )
        relays.serve(("127.0.0.1", 1))
        assert is_polled.wait(600)
        rented_vm.is_reserved = True
        leaving = threads.submit(relays.leave, rented_vm)
        assert not wait_for([leaving], 0.2).done
        may_end.set()
        leaving.result(60)
        relays.close()
