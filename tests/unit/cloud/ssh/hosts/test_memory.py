"""A job's persistent record of its hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builders import a_vm, an_offer

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import VmState
from spottrain.cloud.ssh.hosts.memory import HostMemory, HostVm

OFFER = an_offer(
    cloud="ssh",
    region="ssh",
    zone="ssh",
    instance_type="host",
    usd_per_hour=0.0,
    observed_at_s=1.0,
    gpu_memory_bytes=1,
)


def rented(name: str) -> HostVm:
    vm = a_vm(name, OFFER, intent="intent-1", launched_at_s=1.0)
    return HostVm(vm, "host", 60.0)


def test_the_record_outlives_the_process(tmp_path: Path) -> None:
    with HostMemory(tmp_path / "new").edit() as record:
        record.rented["a"] = rented("a")
        record.tokens["t"] = ["a"]
    assert HostMemory(tmp_path / "new").read() == record


def test_the_owner_id_is_generated_once(tmp_path: Path) -> None:
    owner = HostMemory(tmp_path).read().owner
    assert HostMemory(tmp_path).read().owner == owner
    assert HostMemory(tmp_path / "other").read().owner != owner


def test_changes_of_another_process_are_seen(tmp_path: Path) -> None:
    ours, theirs = HostMemory(tmp_path), HostMemory(tmp_path)
    ours.read()
    with theirs.edit() as record:
        record.rented["a"] = rented("a")
    assert list(ours.read().rented) == ["a"]


def test_a_failed_change_is_not_saved(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path)
    with pytest.raises(KeyError), memory.edit() as record:
        record.tokens[record.tokens["no such token"][0]] = []
    assert memory.read().tokens == {}


def test_a_vm_ends_once(tmp_path: Path) -> None:
    with HostMemory(tmp_path).edit() as record:
        record.rented["a"] = rented("a")
        record.end("a")
        ended = record.rented["a"]
        assert ended.vm.state is VmState.TERMINATED
        record.end("a")
        record.end("unknown")
        assert record.rented == {"a": ended}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rented": {"a": {}}}'])
def test_a_damaged_file_is_reported_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "ssh.json").write_text(text)
    with pytest.raises(CloudError, match=r"ssh\.json is damaged .*remove"):
        HostMemory(tmp_path).read()
