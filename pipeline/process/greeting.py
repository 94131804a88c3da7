"""The first line that a supervisor reads, and what it checks before it forks."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from spottrain import machine
from spottrain.errors import SpottrainError
from spottrain.gpus.builds import (
    UnfitBuildError,
    build_of,
    capabilities_of,
    check_driver,
)
from spottrain.gpus.slots import CPU
from spottrain.pipeline.devices.open import STAND_IN, open_device
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import GpuFacts

_NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED: every call of the driver's before cuInit (CUDA driver API)."""
_TRIED_BYTES = 64 << 20
"""Locked above the limit, once."""
_LARGE_LIMIT_BYTES = 1 << 30
"""To lock more takes seconds."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Greeting:
    """First line of stdin, from the agent."""

    spec: JobSpec
    workdir: str
    num_slots: int
    private_address: str
    vm_id: str
    devices: tuple[str, ...] = (CPU,)
    """Of each slot: ``cpu`` or ``cuda:<UUID>``."""
    memory_shares: tuple[float, ...] = (1.0,)
    """Of each slot: its share of its GPU's memory; 1 on CPUs."""
    threads: int = 1
    """CPU threads of a worker."""
    gpus: tuple[GpuFacts, ...] = ()
    """The GPUs that slots drive."""
    activity_fd: int | None = None
    """Memory in which workers tell the agent what they do; ``None``: nobody asks."""
    warnings: tuple[str, ...] = ()
    """What people should know of this VM."""

    def device_name(self) -> str:
        """Return what the slots compute on, as in ``Profile``."""
        return machine.device(self.gpus, self.memory_shares)

    def ready(self) -> messages.SupervisorReady:
        """Return the answer: what this VM is and has."""
        return messages.SupervisorReady(
            num_slots=self.num_slots,
            torch_version=torch.__version__,
            device=self.device_name(),
            software=machine.software(),
            machine=machine.machine_id(),
            cores=machine.cores(),
            gpus=self.gpus,
            gpu_memory_bytes=self.slot_memory_bytes(),
            memory_bytes=machine.memory_bytes(),
            locked_memory_bytes=self.locked_memory_bytes(),
            warnings=self.warnings,
        )

    def locked_memory_bytes(self) -> int:
        """Return how much a worker may page-lock; 0: there is no limit, or it is not kept.

        A GPU's driver pins pages by itself and need not look at the limit of this process,
        which is 8 MB in containers. Whether it does is tried, by another process.
        """
        limit_bytes = machine.locked_memory_bytes()
        name = self.devices[0]
        if name == CPU or not 0 < limit_bytes < _LARGE_LIMIT_BYTES:
            return limit_bytes
        return 0 if _in_a_fork(partial(_locks, name, limit_bytes + _TRIED_BYTES)) else limit_bytes

    def slot_memory_bytes(self) -> int:
        """Return the least memory that a slot has on its GPU; 0: on CPUs."""
        sizes = {f"cuda:{gpu.uuid}": gpu.memory_bytes for gpu in self.gpus}
        pairs = zip(self.devices, self.memory_shares, strict=True)
        each = (int(sizes[name] * share) for name, share in pairs if name in sizes)
        return min(each, default=0)


def _locks(device_name: str, num_bytes: int) -> bool:
    """Return whether pages of so much memory can be locked for a device."""
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    try:
        open_device(device_name).lock_pages(memory)
    except (SpottrainError, RuntimeError) as error:
        sys.stderr.write(f"locked memory: {error}\n")
        return False
    return True


def first_line() -> str:
    """Read stdin up to the first newline, leaving what follows in the pipe."""
    line = bytearray()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def unfit(gpus: Sequence[GpuFacts]) -> messages.VmUnfit | None:
    """Return why this torch does not run on the GPUs, if it does not.

    torch is asked in a forked process: it counts the question as a use of CUDA
    (``THCPModule_getArchFlags``), after which it refuses CUDA to all forked processes.
    """
    if not gpus or os.environ.get(STAND_IN):
        return None
    flags = " ".join(_in_a_fork(torch.cuda.get_arch_list)) if torch.version.cuda else ""
    build = build_of(torch.version.cuda or "", capabilities_of(flags))
    try:
        check_driver(build, gpus[0].driver, (gpu.compute_capability for gpu in gpus))
    except UnfitBuildError as error:
        return messages.VmUnfit(reason=str(error))
    return None


def obstacle_to_forks() -> str:
    """Return why no worker can be forked from this process, which has loaded the user's
    job; empty if it can.

    CUDA does not work in a forked process. A second thread's locks would stay taken there;
    and torch refuses it CUDA once it was asked here for more than whether there is a GPU.
    """
    if torch.cuda.is_initialized() or _driver_is_initialised():  # type: ignore[no-untyped-call]
        return "uses CUDA"
    if len(os.listdir("/proc/self/task")) > 1:
        return "starts threads"
    return "asks torch about GPUs" if _in_a_fork(torch.cuda._is_in_bad_fork) else ""


def _driver_is_initialised() -> bool:
    """Return whether any library has initialised CUDA's driver in this process.

    Open device files do not tell: ``/dev/nvidia-uvm`` is open in a process that has asked
    no more than NVML (driver 580).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # nobody has even loaded it
    count = ctypes.c_int()
    result: int = driver.cuDeviceGetCount(ctypes.byref(count))
    return result != _NOT_INITIALISED


def _in_a_fork(function: Callable[[], T]) -> T:
    """Call a function in a forked process; return its result."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    with receiver:
        child = fork.Process(target=lambda: sender.send(function()))
        child.start()
        sender.close()
        result: T = receiver.recv()
        child.join()
    return result
