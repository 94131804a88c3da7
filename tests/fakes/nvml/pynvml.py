"""NVML as nvidia-ml-py 13.615 gives it to Python, over GPUs that a file describes.

A folder with this module goes first on PYTHONPATH. ``FAKE_NVML`` names a JSON file, which
is read at every call, so that a test can change it: ``{"gpus": [...], "driver": "...",
"error": 12}``. ``error`` is what ``nvmlInit`` raises. Of a GPU: ``uuid``, ``name``,
``memory_bytes``, ``capability``, and, where it has them, ``lost``, ``rows``, ``reasons``,
``recovery``, ``ecc``, ``mig``, ``pids``, ``use`` (per cent), ``used_bytes``, ``milliwatts``, ``celsius``, ``xids`` (events so far, oldest first).

Rules, each of the library (source: its functions of the same names, and the NVML API
reference where the C library decides):

- every call before ``nvmlInit`` and after the last ``nvmlShutdown`` raises UNINITIALIZED;
- an index beyond the count is INVALID_ARGUMENT, an unknown UUID NOT_FOUND;
- a call on a GPU that fell off the bus raises GPU_IS_LOST;
- what a GPU lacks raises NOT_SUPPORTED (ECC, row remapping, MIG, clock reasons);
- errors are of the class of their code, with ``value``; ``NVMLError(code)`` makes them;
- strings are ``str``; memory has ``total``; processes have ``pid`` and ``usedGpuMemory``;
- field values come as an array with a return code of their own;
- waiting for events raises TIMEOUT if none comes, and needs GPUs registered for them;
  each set has every event of its GPUs since they were registered, whoever else has it;
- registering for events that a GPU does not have is NOT_SUPPORTED.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS = 0
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_NOT_FOUND = 6
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_TEMPERATURE_GPU = 0
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
nvmlEventTypeXidCriticalError = 0x8  # noqa: N816  the library's name

_refcount = 0


class NVMLError(Exception):
    """An error code of the library."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return f"NVML Error with code {self.value}"


@dataclass(frozen=True)
class _Handle:
    uuid: str


@dataclass(frozen=True)
class _Memory:
    total: int
    used: int = 0


@dataclass(frozen=True)
class _Process:
    pid: int
    usedGpuMemory: int | None = None  # noqa: N815  the library's name


@dataclass(frozen=True)
class _Value:
    uiVal: int  # noqa: N815  the library's name


@dataclass(frozen=True)
class _FieldValue:
    nvmlReturn: int  # noqa: N815
    value: _Value


@dataclass(frozen=True)
class _Event:
    device: _Handle
    eventType: int  # noqa: N815
    eventData: int  # noqa: N815


class _EventSet:
    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        """By UUID how many events were before it was registered or were waited for."""
        self.freed = False


def _file() -> Path:
    return Path(os.environ["FAKE_NVML"])


def _world() -> dict[str, Any]:
    if not _refcount:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    world: dict[str, Any] = json.loads(_file().read_text())
    return world


def _gpu(handle: _Handle) -> dict[str, Any]:
    gpu = next((one for one in _world()["gpus"] if one["uuid"] == handle.uuid), None)
    if gpu is None:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    if gpu.get("lost"):
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return dict(gpu)


def _of(handle: _Handle, key: str) -> Any:
    gpu = _gpu(handle)
    if key not in gpu:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return gpu[key]


def nvmlInit() -> None:  # noqa: N802
    global _refcount
    code = json.loads(_file().read_text()).get("error", 0)
    if code:
        raise NVMLError(code)
    _refcount += 1


def nvmlShutdown() -> None:  # noqa: N802
    global _refcount
    if not _refcount:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    _refcount -= 1


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return str(_world()["driver"])


def nvmlSystemGetCudaDriverVersion() -> int:  # noqa: N802
    major = int(_world()["driver"].partition(".")[0])
    return 13000 if major >= 580 else 12080


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_world()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> _Handle:  # noqa: N802
    gpus = _world()["gpus"]
    if not 0 <= index < len(gpus):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    handle = _Handle(gpus[index]["uuid"])
    _gpu(handle)
    return handle


def nvmlDeviceGetHandleByUUID(uuid: str) -> _Handle:  # noqa: N802
    if all(gpu["uuid"] != uuid for gpu in _world()["gpus"]):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    handle = _Handle(uuid)
    _gpu(handle)
    return handle


def nvmlDeviceGetPciInfo(handle: _Handle) -> SimpleNamespace:  # noqa: N802
    index = [gpu["uuid"] for gpu in _world()["gpus"]].index(handle.uuid)
    return SimpleNamespace(busId=f"00000000:{0x3B + index:02X}:00.0")


def nvmlDeviceGetUUID(handle: _Handle) -> str:  # noqa: N802
    return handle.uuid


def nvmlDeviceGetName(handle: _Handle) -> str:  # noqa: N802
    return str(_gpu(handle)["name"])


def nvmlDeviceGetMemoryInfo(handle: _Handle) -> _Memory:  # noqa: N802
    gpu = _gpu(handle)
    return _Memory(total=gpu["memory_bytes"], used=gpu.get("used_bytes", 0))


def nvmlDeviceGetUtilizationRates(handle: _Handle) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(gpu=_of(handle, "use"))


def nvmlDeviceGetPowerUsage(handle: _Handle) -> int:  # noqa: N802
    return int(_of(handle, "milliwatts"))


def nvmlDeviceGetTemperatureV(handle: _Handle, sensor: int) -> int:  # noqa: N802
    if int(_world()["driver"].partition(".")[0]) < 570:
        raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND)
    return nvmlDeviceGetTemperature(handle, sensor)


def nvmlDeviceGetTemperature(handle: _Handle, sensor: int) -> int:  # noqa: N802
    assert sensor == NVML_TEMPERATURE_GPU
    return int(_of(handle, "celsius"))


def nvmlDeviceGetCudaComputeCapability(handle: _Handle) -> tuple[int, int]:  # noqa: N802
    major, minor = divmod(_gpu(handle)["capability"], 10)
    return major, minor


def nvmlDeviceGetMigMode(handle: _Handle) -> list[int]:  # noqa: N802
    mode = int(_of(handle, "mig"))
    return [mode, mode]


def nvmlDeviceGetTotalEccErrors(handle: _Handle, kind: int, counter: int) -> int:  # noqa: N802
    if (kind, counter) != (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return int(_of(handle, "ecc"))


def nvmlDeviceGetRemappedRows(handle: _Handle) -> tuple[int, int, int, int]:  # noqa: N802
    corrected, uncorrected, pending, failed = _of(handle, "rows")
    return corrected, uncorrected, pending, failed


def nvmlDeviceGetFieldValues(handle: _Handle, fields: list[int]) -> list[_FieldValue]:  # noqa: N802
    gpu = _gpu(handle)
    known = "recovery" in gpu
    code = NVML_SUCCESS if known else NVML_ERROR_NOT_SUPPORTED
    return [_FieldValue(code, _Value(gpu.get("recovery", 0))) for _ in fields]


def nvmlDeviceGetCurrentClocksEventReasons(handle: _Handle) -> int:  # noqa: N802
    if int(_world()["driver"].partition(".")[0]) < 535:
        raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND)
    return int(_of(handle, "reasons"))


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: _Handle) -> int:  # noqa: N802
    return int(_of(handle, "reasons"))


def nvmlDeviceGetComputeRunningProcesses(handle: _Handle) -> list[_Process]:  # noqa: N802
    used = _gpu(handle).get("pid_bytes", {})
    return [_Process(pid, used.get(str(pid))) for pid in _gpu(handle).get("pids", [])]


def nvmlDeviceGetSupportedEventTypes(handle: _Handle) -> int:  # noqa: N802
    return nvmlEventTypeXidCriticalError if "xids" in _gpu(handle) else 0


def nvmlEventSetCreate() -> _EventSet:  # noqa: N802
    _world()
    return _EventSet()


def nvmlDeviceRegisterEvents(handle: _Handle, kinds: int, events: _EventSet) -> None:  # noqa: N802
    assert not events.freed
    if kinds & ~nvmlDeviceGetSupportedEventTypes(handle):
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    events.taken[handle.uuid] = len(_gpu(handle)["xids"])


def nvmlEventSetWait(events: _EventSet, timeout_ms: int) -> _Event:  # noqa: N802
    assert events.taken, "waiting for nothing"
    assert not events.freed
    end_s = time.monotonic() + timeout_ms / 1000
    while True:
        for gpu in _world()["gpus"]:
            uuid = gpu["uuid"]
            if len(gpu.get("xids", ())) > events.taken.get(uuid, math.inf):
                number = gpu["xids"][events.taken[uuid]]
                events.taken[uuid] += 1
                return _Event(_Handle(uuid), nvmlEventTypeXidCriticalError, number)
        if time.monotonic() >= end_s:
            raise NVMLError(NVML_ERROR_TIMEOUT)
        time.sleep(0.01)


def nvmlEventSetFree(events: _EventSet) -> None:  # noqa: N802
    assert not events.freed
    events.freed = True
