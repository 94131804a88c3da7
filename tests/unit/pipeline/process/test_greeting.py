"""What a supervisor finds out before it forks, and what finding it out must not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.builders import a_spec
from tests.fakes.gpus import facts

from spottrain import machine
from spottrain.pipeline.process.greeting import Greeting, unfit

DRIVER = "int n; int cuInit(unsigned f) { n = 1; return 0; } " + (
    "int cuDeviceGetCount(int *count) { *count = 1; return n ? 0 : 3; }"
)
"""Two of the driver's functions; any before cuInit answers CUDA_ERROR_NOT_INITIALIZED
(CUDA driver API, cuInit)."""
ASKS = """
import ctypes
from spottrain.pipeline.process.greeting import obstacle_to_forks

print(obstacle_to_forks())
driver = ctypes.CDLL("libcuda.so.1")
print(obstacle_to_forks())  # loaded is not initialised
driver.cuInit(0)
print(obstacle_to_forks())
"""


@pytest.fixture
def asked_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let torch be one for CUDA; yield the processes that ask it for its kernels."""
    reading, writing = os.pipe()
    found: list[int] = []

    def arch_list() -> list[str]:
        os.write(writing, f"{os.getpid()}\n".encode())
        return ["sm_90"]

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", arch_list)
    yield found
    os.close(writing)
    with os.fdopen(reading) as pids:
        found.extend(int(pid) for pid in pids)
    assert found
    assert os.getpid() not in found, "torch refuses CUDA to all forked from who asks"


@pytest.mark.parametrize(("capability", "fits"), [(90, True), (70, False)])
def test_torch_is_asked_for_its_kernels_in_another_process(
    asked_in: list[int], capability: int, fits: bool
) -> None:
    found = unfit([facts(capability=capability, driver="580.95.05")])

    assert (found is None) == fits


@pytest.mark.rotated
def test_the_driver_itself_says_whether_it_is_initialised(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler for a driver's stand-in")
    folder = tmp_path_factory.mktemp("driver")
    name = "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-xc", "-", f"-Wl,-soname,{name}", "-o", name],
        input=DRIVER.encode(),
        cwd=folder,
        check=True,
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", ASKS]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert run.stdout.splitlines() == ["", "", "uses CUDA"]


@pytest.mark.parametrize(
    ("device", "limit_bytes", "found_bytes"),
    [
        ("tests.fakes.deferred:1", 1 << 23, 0),  # its driver does not ask for the limit
        ("tests.fakes.deferred:1", 1 << 33, 1 << 33),
        ("cuda:GPU-that-is-not-there", 1 << 23, 1 << 23),
        ("cpu", 1 << 23, 1 << 23),
        ("cpu", 0, 0),
    ],
)
def test_whether_more_than_the_limit_can_be_locked_is_tried(
    monkeypatch: pytest.MonkeyPatch, device: str, limit_bytes: int, found_bytes: int
) -> None:
    monkeypatch.setattr(machine, "locked_memory_bytes", lambda: limit_bytes)
    spec = a_spec()
    greeting = Greeting(spec, "", 1, "127.0.0.1", "a", devices=(device,))
    assert greeting.locked_memory_bytes() == found_bytes
