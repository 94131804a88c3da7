from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from spottrain.cloud.notices import hear
from spottrain.cloud.notices.source import VmOutlook
from spottrain.cloud.port.errors import CloudError

if TYPE_CHECKING:
    from tests.unit.cloud.conftest import Cloud

    from spottrain.cloud.port.provider import Vm

TIMEOUT_S = 600.0


@contextmanager
def watching(cloud: Cloud, vm: Vm) -> Iterator[queue.Queue[hear.NoticeChange]]:
    """Listens for the VM's notices in a thread, as an agent does."""
    heard: queue.Queue[hear.NoticeChange] = queue.Queue()
    stop = threading.Event()
    source = {
        "kind": "local",
        "socket": str(cloud.folder / "cloud.sock"),
        "vm_id": vm.vm_id,
    }
    ears = hear.open_source(source)
    thread = threading.Thread(target=hear.listen, args=(ears, heard.put, stop))
    thread.start()
    try:
        yield heard
    finally:
        stop.set()
        cloud.client().shut_down()  # ends the long poll
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def lead_s(heard: queue.Queue[hear.NoticeChange]) -> float:
    said = heard.get(timeout=TIMEOUT_S)
    assert isinstance(said, hear.PreemptionAnnounced)
    return said.lead_s


def test_a_notice_is_reported_once_with_the_seconds_left(cloud: Cloud) -> None:
    vm, other = cloud.launch(2)
    with watching(cloud, vm) as heard, watching(cloud, other) as others:
        victims = cloud.hit("notice", count=2, lead_s=60)
        assert sorted(victims) == sorted([vm.vm_id, other.vm_id])
        for ears in (heard, others):
            assert 50 < lead_s(ears) <= 60
    assert heard.empty()
    assert others.empty()


def test_other_vms_get_no_notice(cloud: Cloud) -> None:
    vm, other = cloud.launch(2)
    with watching(cloud, vm) as heard, watching(cloud, other) as others:
        ears = {vm.vm_id: heard, other.vm_id: others}
        (victim,) = cloud.hit("notice", lead_s=60)
        ears.pop(victim).get(timeout=TIMEOUT_S)
    assert all(ear.empty() for ear in ears.values())


def test_a_notice_before_listening_began_is_reported(cloud: Cloud) -> None:
    (vm,) = cloud.launch()
    cloud.hit("notice", lead_s=60)
    with watching(cloud, vm) as heard:
        assert 50 < lead_s(heard) <= 60


def test_listening_survives_an_unavailable_service(cloud: Cloud) -> None:
    heard: list[hear.NoticeChange] = []
    stop = threading.Event()
    source = {"kind": "local", "socket": str(cloud.folder / "none"), "vm_id": "vm"}
    ears = hear.open_source(source)
    thread = threading.Thread(target=hear.listen, args=(ears, heard.append, stop))
    thread.start()
    stop.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert heard == []


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(CloudError, match="got 'moon'"):
        hear.open_source({"kind": "moon"})


def test_machines_without_a_cloud_get_no_notices() -> None:
    source = hear.open_source({"kind": "none"})
    assert source.ask() == VmOutlook()
    hear.acknowledge(source)
