"""The first line that a supervisor reads, and what it checks before it forks."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from spottrain import machine
from spottrain.errors import UserCodeError
from spottrain.gpus.builds import (
    UnfitBuildError,
    build_of,
    capabilities_of,
    check_driver,
)
from spottrain.gpus.slots import CPU
from spottrain.pipeline.devices.open import STAND_IN
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import GpuFacts

_NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED: every call of the driver's before cuInit (CUDA driver API)."""
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
            slot_memory_bytes=self.slot_memory_bytes(),
            memory_bytes=machine.memory_bytes(),
            locked_memory_bytes=machine.locked_memory_bytes(),
        )

    def slot_memory_bytes(self) -> int:
        """Return the least memory that a slot has on its GPU; 0: on CPUs."""
        sizes = {f"cuda:{gpu.uuid}": gpu.memory_bytes for gpu in self.gpus}
        pairs = zip(self.devices, self.memory_shares, strict=True)
        each = (int(sizes[name] * share) for name, share in pairs if name in sizes)
        return min(each, default=0)


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


def check_no_cuda() -> None:
    """Check that the user's code has not initialised CUDA, which no fork survives.

    Raises:
        UserCodeError: It has.
    """
    if torch.cuda.is_initialized() or _driver_is_initialised():  # type: ignore[no-untyped-call]
        raise UserCodeError(
            "the user's module or its function initialises CUDA: workers are forked from "
            "the process that loads it, and CUDA does not work in a forked process; use "
            "no GPU there (no .cuda() or .to('cuda'), no torch.cuda.synchronize()): "
            "spottrain moves the model and the batches"
        )


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


def can_fork() -> bool:
    """Return whether workers can be forked after loading the user's job.

    A second thread's locks would stay taken in them; and torch refuses them CUDA once it
    was asked here for more than whether there is a GPU.
    """
    is_single_threaded = len(os.listdir("/proc/self/task")) == 1
    return is_single_threaded and not _in_a_fork(torch.cuda._is_in_bad_fork)


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
