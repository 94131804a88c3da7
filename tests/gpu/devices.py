"""The device that tests of this folder run on.

A GPU where there is one. With ``SPOTTRAIN_TEST_DEVICE=deferred:7`` or ``cpu`` everything
runs on the CPU instead, over the stand-in for a GPU or without one, so that on a GPU
only the numbers are new.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

VARIABLE = "SPOTTRAIN_TEST_DEVICE"


class NoGpuError(Exception):
    """There is no GPU here; says why."""


def device_name() -> str:
    """Return the device's name as an agent gives it: ``cuda:`` and a UUID.

    Asks NVML, which makes no CUDA context.

    Raises:
        NoGpuError: There is none.
    """
    if chosen := os.environ.get(VARIABLE):
        return f"tests.fakes.{chosen}" if chosen.startswith("deferred:") else chosen
    try:
        import pynvml
    except ModuleNotFoundError:
        raise NoGpuError("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = f"cuda:{pynvml.nvmlDeviceGetUUID(handle)}"
        pynvml.nvmlShutdown()  # closes the device's files
    except pynvml.NVMLError as error:
        raise NoGpuError(f"no GPU: {error}") from None
    return name


def is_gpu(name: str) -> bool:
    """Return whether a device is a real GPU."""
    return name.startswith("cuda:")


def names(count: int) -> list[str]:
    """Return names for as many workers: they share a GPU, or have a stand-in each."""
    name = device_name()
    kind, _, seed = name.partition(":")
    if kind == "tests.fakes.deferred":
        return [f"{kind}:{int(seed) + number}" for number in range(count)]
    return [name] * count


def memory_in_use(name: str) -> float:
    """Return MiB of the GPU's memory in use by all, asked by a process of its own.

    NVML keeps the device files open, which this process must not always do. It is 0 on
    a stand-in.
    """
    if not is_gpu(name):
        return 0.0
    uuid = name.partition(":")[2]
    text = (
        "import pynvml as n; n.nvmlInit(); "
        f"h = n.nvmlDeviceGetHandleByUUID({uuid!r}); "
        "print(n.nvmlDeviceGetMemoryInfo(h).used / 2**20)"
    )
    command = [sys.executable, "-c", text]
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def print_result(result: Mapping[str, Any]) -> None:
    """Print what a measurement found as the last line, for ``bench_gpu``."""
    print(json.dumps(result), flush=True)  # noqa: T201
