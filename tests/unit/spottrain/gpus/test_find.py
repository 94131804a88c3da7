"""What the slots of a machine drive, or why it must not train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gpus import FakeGpus
from tests.fakes.nvml import pynvml

from spottrain import machine
from spottrain.gpus import nvml
from spottrain.gpus.find import VmDevices, find_devices
from spottrain.gpus.slots import CPU
from spottrain.wire.messages import GpuSick, VmUnfit

Put = Callable[..., FakeGpus]
NO_DRIVER = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND


def find(choice: Any = "auto", slots: int = 2, **more: Any) -> Any:
    return find_devices(choice, "vm-1", slots, job="job", **more)


def test_slots_drive_gpus_where_there_are_some(machine_with: Put) -> None:
    machine_with(2)
    found = find("gpu", min_gpus=2)
    assert isinstance(found, VmDevices)
    assert found.slots.devices == ("cuda:GPU-00000000-aaaa", "cuda:GPU-00000001-aaaa")
    assert [gpu.index for gpu in found.gpus] == [0, 1]
    assert found.name == machine.device(found.gpus) == "NVIDIA A10G"
    assert find("gpu", 4).name == "NVIDIA A10G, 1/2 each"
    assert set(found.greeting()) == {"devices", "memory_shares", "threads", "gpus", "warnings"}


def test_vms_that_share_a_machine_drive_gpus_of_their_own(machine_with: Put) -> None:
    machine_with(5)
    driven = [find("gpu", 2, place=place).slots.devices for place in range(2)]
    assert len({device for devices in driven for device in devices}) == 4


def test_only_gpus_that_are_driven_are_asked_for_their_health(
    machine_with: Put,
) -> None:
    gpus = machine_with(2)
    one = find("gpu", 1)
    (used,) = one.gpus
    gpus.change(1 - used.index, recovery=1)
    assert find("gpu", 1) == one
    gpus.change(used.index, recovery=1)
    assert isinstance(find("gpu", 1), GpuSick)


def test_without_a_driver_auto_computes_on_cpus_and_gpu_does_not(
    machine_with: Put,
) -> None:
    machine_with().set(error=NO_DRIVER)
    assert find("auto").slots.devices == (CPU, CPU)
    assert find("cpu").slots.devices == (CPU, CPU)
    unfit = find("gpu")
    assert isinstance(unfit, VmUnfit)
    assert "no NVIDIA driver is installed" in unfit.reason


def test_a_driver_that_does_not_answer_is_not_taken_for_none(
    machine_with: Put, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine_with().set(error=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path)
    unfit = find("auto")
    assert isinstance(unfit, VmUnfit)
    assert "reboot the machine" in unfit.reason
    assert find("cpu").slots.devices == (CPU, CPU)


@pytest.mark.parametrize(
    ("change", "more", "kind", "why"),
    [
        ({"lost": True}, {}, GpuSick, "GPU 0 does not answer"),
        ({"mig": 1}, {}, VmUnfit, "MIG"),
        ({"capability": 75}, {"precision": "bf16"}, VmUnfit, "use fp16"),
        ({}, {"min_gpus": 2}, VmUnfit, "1 of 2 GPUs"),
    ],
)
def test_a_machine_that_cannot_do_it_says_why(
    machine_with: Put, change: Any, more: Any, kind: Any, why: str
) -> None:
    machine_with().change(0, **change)
    found = find("gpu", **more)
    assert type(found) is kind
    assert why in found.reason


def test_a_gpu_of_another_job_is_refused_and_a_hidden_one_left_alone(
    machine_with: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with(2).change(0, pids=[1])
    monkeypatch.setattr(nvml, "_sees_host_pids", lambda: True)
    unfit = find("gpu")
    assert isinstance(unfit, VmUnfit)
    assert "is in use by process 1" in unfit.reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert isinstance(find("gpu"), VmDevices)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rows": [0, 0, 1, 0]}, "waits for a reset to be replaced"),
        ({"recovery": 4}, "asks for a reset of the GPU, once nothing uses it"),
    ],
)
def test_a_gpu_that_waits_for_a_reset_is_used_on_own_machines_with_a_warning(
    machine_with: Put, change: dict[str, Any], why: str
) -> None:
    machine_with().change(**change)
    assert isinstance(find("gpu", 1), GpuSick)
    found = find("gpu", 1, is_own=True)
    assert isinstance(found, VmDevices)
    (warning,) = found.warnings
    assert why in warning
    assert found.greeting()["warnings"] == (warning,)


@pytest.mark.parametrize(
    ("gpus", "megabytes", "told"), [(2, 64, True), (2, 1000, False), (1, 0, False)]
)
def test_little_shared_memory_between_gpus_is_told(
    machine_with: Put, monkeypatch: pytest.MonkeyPatch, gpus: int, megabytes: int, told: bool
) -> None:
    machine_with(gpus)
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: megabytes * 1_000_000)
    found = find("gpu", 1)
    assert isinstance(found, VmDevices)
    expected = ["/dev/shm has 64 MB: NCCL may not start between its 2 GPUs"] if told else []
    assert [one.partition(";")[0] for one in found.warnings] == expected
