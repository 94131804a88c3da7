"""What the agent reads of a GPU, and what it hears of one on which a kernel fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from spottrain.gpus import slots
from spottrain.gpus.find import VmDevices, find_devices
from spottrain.gpus.health import Xid, action_on, sickness
from spottrain.gpus.nvml import Nvml, open_nvml
from spottrain.gpus.watch import GpuWatch
from spottrain.machine import OWNER_VARIABLE
from spottrain.wire.messages import GpuSick, GpuThrottled

WRONG_ADDRESS = """
import sys
from tests.gpu.gpu_memory import CudaMemory
memory = CudaMemory(sys.argv[1], 2 << 20)
memory.at = 0x10
memory.count_for_ever()
memory.synchronise()
"""
"""A kernel of this program writes where no memory is."""


@pytest.fixture
def nvml(gpu: str) -> Iterator[Nvml]:
    with open_nvml() as nvml:
        yield nvml


def test_the_gpu_is_found_and_well(nvml: Nvml, gpu: str) -> None:
    facts = nvml.gpus()[0]
    health = nvml.health(facts)
    print(facts, health)  # noqa: T201

    assert slots.device_of(facts) == gpu
    assert facts.memory_bytes > 1 << 30
    assert facts.compute_capability >= 70
    assert not facts.is_partitioned
    assert sickness(facts, health) == ""
    found = find_devices(
        "gpu", "a", 1, job=os.environ[OWNER_VARIABLE], precision="bf16", min_gpus=1
    )
    assert isinstance(found, VmDevices), found
    assert found.slots.devices == (gpu,)


def test_a_watched_gpu_that_is_well_is_not_reported(nvml: Nvml, gpu: str) -> None:
    reports: list[GpuSick | GpuThrottled] = []
    notes: list[str] = []
    restarts: list[tuple[str, str]] = []
    closing = threading.Event()
    watch = GpuWatch(
        nvml,
        nvml.gpus(),
        reports.append,
        lambda uuid, why: restarts.append((uuid, why)),
        notes.append,
    )
    thread = threading.Thread(target=watch.run, args=(closing,))
    thread.start()
    try:
        assert not closing.wait(2.5)  # two looks
        assert thread.is_alive()
    finally:
        closing.set()
        thread.join()

    assert not reports
    assert not notes
    assert not restarts


def test_a_kernel_that_writes_anywhere_is_heard(nvml: Nvml, gpu: str) -> None:
    facts = nvml.gpus()[0]
    with nvml.xids([facts]) as next_xid:
        if next_xid is None:
            pytest.skip("this GPU gives no XID events")
        command = [sys.executable, "-c", WRONG_ADDRESS, gpu]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        assert run.returncode == 1, run.stderr
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in run.stderr
        end = time.monotonic() + 10
        heard: list[Xid] = []
        while time.monotonic() < end and not heard:
            if (xid := next_xid(1000)) is not None:
                heard.append(xid)
    print(heard)  # noqa: T201

    assert heard, "no XID came within 10 s"
    assert heard[0].uuid == facts.uuid
    assert action_on(heard[0].number) == "restart_worker"
    assert sickness(facts, nvml.health(facts)) == ""
