"""The GPUs of this machine, read through NVML: no CUDA call, no context on a device.

Facts of the functions: NVIDIA's NVML API reference, by function name; what they return
here: ``nvidia-ml-py`` 13.615 (module ``pynvml``).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spottrain.errors import SpottrainError
from spottrain.gpus.health import GpuHealth, GpuUser, Xid
from spottrain.machine import OWNER_VARIABLE
from spottrain.wire.model import GpuFacts, GpuUse

_DRIVER = Path("/proc/driver/nvidia/version")
"""There while NVIDIA's kernel module is loaded."""
_PROCESSES = Path("/proc")
_HOST_PIDS = "pid:[4026531836]"
"""The first PID namespace (PROC_PID_INIT_INO of Linux): NVML's process ids are its."""


class NoNvmlError(SpottrainError):
    """NVML cannot be used: this machine has no GPU, or no driver that works."""


class GpuLostError(SpottrainError):
    """A GPU does not answer any more: it has fallen off the bus."""


class Nvml:
    """NVML, initialised.

    Args:
        library: The module ``pynvml``.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def gpus(self) -> tuple[GpuFacts, ...]:
        """Return the GPUs of this machine, as nvidia-smi counts them.

        Raises:
            GpuLostError: One of them is lost.
            NoNvmlError: The driver refuses.
        """
        with self._translated():
            count = self._library.nvmlDeviceGetCount()
        facts = []
        for index in range(count):
            with self._translated(f"GPU {index}"):
                facts.append(self._facts(index))
        return tuple(facts)

    def _facts(self, index: int) -> GpuFacts:
        nvml = self._library
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return GpuFacts(
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(handle),
            name=nvml.nvmlDeviceGetName(handle),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
            compute_capability=10 * major + minor,
            driver=nvml.nvmlSystemGetDriverVersion(),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            is_partitioned=self._is_partitioned(handle),
            uncorrected_ecc_errors=self._if_supported(
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
        )

    def _is_partitioned(self, handle: Any) -> bool:
        """Return whether MIG is on: CUDA then sees the GPU's instances, not the GPU."""
        modes = self._if_supported(self._library.nvmlDeviceGetMigMode, handle)
        return modes is not None and bool(modes[0])

    def health(self, gpu: GpuFacts) -> GpuHealth:
        """Return how a GPU is.

        Raises:
            NoNvmlError: The driver refuses.
        """
        nvml = self._library
        try:
            with self._translated():
                handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                rows = self._if_supported(nvml.nvmlDeviceGetRemappedRows, handle)
                return GpuHealth(
                    row_remap_pending=rows is not None and bool(rows[2]),
                    row_remap_failed=rows is not None and bool(rows[3]),
                    recovery_action=self._recovery_action(handle),
                    clock_event_reasons=self._clock_event_reasons(handle),
                )
        except GpuLostError:
            return GpuHealth(is_lost=True)

    def use(self, gpu: GpuFacts) -> GpuUse:
        """Return what a GPU does.

        Raises:
            GpuLostError: It is lost.
            NoNvmlError: The driver refuses.
        """
        nvml = self._library
        with self._translated():
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            rates = self._if_supported(nvml.nvmlDeviceGetUtilizationRates, handle)
            milliwatts = self._if_supported(nvml.nvmlDeviceGetPowerUsage, handle)
            return GpuUse(
                index=gpu.index,
                utilisation=None if rates is None else rates.gpu / 100,
                memory_used_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).used,
                power_w=None if milliwatts is None else milliwatts / 1000,
                temperature_c=self._temperature_c(handle),
            )

    def _temperature_c(self, handle: Any) -> float | None:
        """Return the temperature. Older drivers know an older name alone."""
        nvml = self._library
        for read in (nvml.nvmlDeviceGetTemperatureV, nvml.nvmlDeviceGetTemperature):
            if (found := self._if_supported(read, handle, nvml.NVML_TEMPERATURE_GPU)) is not None:
                return float(found)
        return None

    def _recovery_action(self, handle: Any) -> int:
        """Return what the driver asks for (``nvmlDeviceGpuRecoveryAction_t``); 0: nothing.

        A field that a driver does not know has an error of its own (``nvmlReturn``).
        """
        nvml = self._library
        fields = [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        values = self._if_supported(nvml.nvmlDeviceGetFieldValues, handle, fields)
        if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return 0
        return int(values[0].value.uiVal)

    def _clock_event_reasons(self, handle: Any) -> int:
        """Return why clocks are low (bits). Drivers before 535 know an older name."""
        nvml = self._library
        for read in (
            nvml.nvmlDeviceGetCurrentClocksEventReasons,
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons,
        ):
            reasons = self._if_supported(read, handle)
            if reasons is not None:
                return int(reasons)
        return 0

    def users(self, gpu: GpuFacts, owner: str) -> tuple[GpuUser, ...]:
        """Return the processes that compute on a GPU and are not of ``owner``.

        In a container nothing can be said: NVML's process ids are those of the host.

        Raises:
            GpuLostError: It is lost.
            NoNvmlError: The driver refuses.
        """
        nvml = self._library
        if not _sees_host_pids():
            return ()
        with self._translated():
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            read = nvml.nvmlDeviceGetComputeRunningProcesses
            found = self._if_supported(read, handle) or []
            pids = sorted({process.pid for process in found})
        own = f"{OWNER_VARIABLE}={owner}".encode()
        return tuple(
            GpuUser(pid=pid, name=_name_of(pid)) for pid in pids if own not in _environment_of(pid)
        )

    def memory_of(self, uuid: str, pid: int) -> int | None:
        """Return the bytes of a GPU that a process has taken; ``None``: that is not known.

        Raises:
            GpuLostError: It is lost.
            NoNvmlError: The driver refuses.
        """
        nvml = self._library
        if not _sees_host_pids():
            return None
        with self._translated():
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            read = nvml.nvmlDeviceGetComputeRunningProcesses
            found = self._if_supported(read, handle) or []
        return next((one.usedGpuMemory for one in found if one.pid == pid), None)

    def pci_address(self, uuid: str) -> str:
        """Return where a GPU is on the bus, as the kernel writes it; empty: it is on none.

        Raises:
            GpuLostError: It is lost.
            NoNvmlError: The driver refuses.
        """
        nvml = self._library
        with self._translated():
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            found = self._if_supported(nvml.nvmlDeviceGetPciInfo, handle)
        if found is None:
            return ""
        domain, _, rest = found.busId.lower().partition(":")
        return f"{domain[-4:]}:{rest}"

    @contextmanager
    def xids(self, gpus: Iterable[GpuFacts]) -> Iterator[Callable[[int], Xid | None] | None]:
        """Yield a function that waits for the next XID, some milliseconds at most.

        ``nvmlEventSetWait`` lets other threads run. None if no GPU has such events, as
        virtual ones may not: there would be nothing to wait for.

        Raises:
            GpuLostError: One is lost.
            NoNvmlError: The driver refuses.
        """
        nvml = self._library
        with self._translated():
            events = nvml.nvmlEventSetCreate()
        try:
            with self._translated():
                registered = [self._register(gpu, events) for gpu in gpus]
            wait = functools.partial(self._next_xid, events)
            yield wait if any(registered) else None
        finally:
            nvml.nvmlEventSetFree(events)

    def _register(self, gpu: GpuFacts, events: Any) -> bool:
        """Have XIDs of a GPU arrive in a set of events; return whether it has them."""
        nvml = self._library
        kind = nvml.nvmlEventTypeXidCriticalError
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        has = self._if_supported(nvml.nvmlDeviceGetSupportedEventTypes, handle)
        if has is None or not has & kind:
            return False
        nvml.nvmlDeviceRegisterEvents(handle, kind, events)
        return True

    def _next_xid(self, events: Any, timeout_ms: int) -> Xid | None:
        nvml = self._library
        with self._translated():
            try:
                event = nvml.nvmlEventSetWait(events, timeout_ms)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:
                    return None
                raise
            uuid = nvml.nvmlDeviceGetUUID(event.device)
        return Xid(number=int(event.eventData), uuid=uuid)

    def _if_supported(self, read: Callable[..., Any], *args: Any) -> Any:
        """Return what ``read`` returns; None if this GPU, driver or container has it not."""
        nvml = self._library
        try:
            return read(*args)
        except nvml.NVMLError as error:
            if error.value not in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_PERMISSION,
            ):
                raise
            return None

    @contextmanager
    def _translated(self, what: str = "a GPU") -> Iterator[None]:
        """Raise our errors instead of NVML's."""
        nvml = self._library
        try:
            yield
        except nvml.NVMLError as error:
            lost = (
                nvml.NVML_ERROR_GPU_IS_LOST,
                nvml.NVML_ERROR_RESET_REQUIRED,
                # GPUs are asked for by UUIDs that NVML has named itself.
                nvml.NVML_ERROR_NOT_FOUND,
            )
            if error.value in lost:
                raise GpuLostError(f"{what} does not answer: {error}") from error
            raise NoNvmlError(f"NVML: {error}") from error


@contextmanager
def open_nvml() -> Iterator[Nvml]:
    """Yield NVML, initialised.

    Raises:
        NoNvmlError: There is no driver, none that works, or no ``nvidia-ml-py``.
    """
    try:
        library = importlib.import_module("pynvml")
    except ImportError as error:
        raise NoNvmlError("nvidia-ml-py is not installed: 'pip install nvidia-ml-py'") from error
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NoNvmlError(_why_not(library, error)) from error
    try:
        yield Nvml(library)
    finally:
        library.nvmlShutdown()


def _why_not(library: Any, error: Any) -> str:
    """Return why NVML could not be initialised, and what to do."""
    if error.value == library.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver is installed (libnvidia-ml.so.1 is missing)"
    if error.value == library.NVML_ERROR_DRIVER_NOT_LOADED:
        return "the NVIDIA driver is installed but not loaded; see dmesg"
    if error.value == library.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated while it ran; reboot the machine"
    return f"NVML cannot be initialised: {error}"


def driver_is_loaded() -> bool:
    """Return whether NVIDIA's kernel module is loaded: there are GPUs, usable or not."""
    return _DRIVER.exists()


def _sees_host_pids() -> bool:
    try:
        return os.readlink(_PROCESSES / "self/ns/pid") == _HOST_PIDS
    except OSError:
        return False


def _name_of(pid: int) -> str:
    try:
        name = (_PROCESSES / str(pid) / "comm").read_text(errors="replace")
        return name.strip()
    except OSError:
        return "ended"


def _environment_of(pid: int) -> list[bytes]:
    """Return a process's environment as it was started with; empty if it is not ours."""
    try:
        return (_PROCESSES / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
