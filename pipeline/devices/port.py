"""The port to a worker's device: all that executor, update, links and reduction use.

Computations on a device are queued, in order; the host runs ahead of them. A transfer
runs beside them. It begins after all computations queued before it, and two transfers
in one direction keep their order. Nothing else is ordered: whoever computes with what
an upload brings ``wait``s for it first, whoever reads what a download brings
``finish``es it, and the source of a transfer must not change before its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from spottrain.errors import SpottrainError


class UnusableDeviceError(SpottrainError):
    """A worker cannot compute on the device of its slot."""


class Transfer(Protocol):
    """A copy between host and device, under way or done."""

    @property
    def target(self) -> torch.Tensor:
        """Where it goes; of use after ``Device.wait`` or ``Device.finish`` only."""


class Device(Protocol):
    """A GPU, or the CPU."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of computations are."""

    @property
    def is_host(self) -> bool:
        """True if its memory is the host's: nothing is transferred, ever."""

    @property
    def collective_library(self) -> str | None:
        """torch's name of what can sum this device's tensors over ranks, if any can."""

    @property
    def identity(self) -> str:
        """Name that only workers which share this device have, too."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory of the device, as bytes."""

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory from and to which transfers run beside
        computations."""

    def allocate_beside(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory of the device in a thread ``beside``, to be computed
        with by the one that is ``using`` once that thread has synchronised."""

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Let transfers run beside computations from and to ``memory``.

        Args:
            memory: Of the host; ``unlock_pages`` comes before it is unmapped.

        Raises:
            UnusableDeviceError: The system refuses to lock so much.
        """

    def unlock_pages(self, memory: torch.Tensor) -> None:
        """Undo ``lock_pages`` once the transfers under way have ended."""

    def upload(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Copy from the host to ``target``, by default to new memory."""

    def download(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Copy to ``target`` in the host's memory, by default to new memory."""

    def rescue(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy to the host's memory beside all that is queued, even if it hangs.

        Needs no page-locked memory, and little of its own. May be called in any thread. What is queued must not change ``source``.

        Raises:
            RuntimeError: The device is not usable any more.
        """

    def is_usable(self) -> bool:
        """Return whether the device still works in this process, after an error."""

    def wait(self, transfer: Transfer) -> torch.Tensor:
        """Order what is computed from now on after ``transfer``; return its target."""

    def finish(self, transfer: Transfer) -> torch.Tensor:
        """Hold the host until ``transfer`` has ended; return its target.

        May be called in any thread.
        """

    def synchronise(self) -> None:
        """Hold the host until all computations and transfers have ended."""

    def mark(self) -> Any:
        """Return a moment in the device's queue of computations."""

    def reach(self, mark: Any) -> None:
        """Hold the host until the device's computations have come to ``mark``."""

    def clock(self) -> float:
        """Return the host's time, in seconds, from which what takes it is told."""

    def held_s(self) -> float:
        """Return for how long ``reach`` and ``finish`` have held this thread so far."""

    def elapsed_s(self, marks: Iterable[tuple[Any, Any]]) -> float:
        """Return the time between the moments of each pair, added up.

        Holds the host until the device has come to the last one.
        """

    def memory_bytes(self) -> int | None:
        """Return the memory that this worker may use; ``None``: it is the host's."""

    def context_bytes(self) -> int:
        """Return the device's memory that is taken by what is no tensor."""

    def peak_bytes(self) -> int | None:
        """Return the maximum of allocated memory; ``None``: it is not counted."""

    def free_cached(self) -> None:
        """Return memory that no tensor uses to the device, where others may need it."""

    def using(self) -> AbstractContextManager[None]:
        """Return the context in which a thread computes on the device."""

    def beside(self) -> AbstractContextManager[None]:
        """Return the context in which a thread computes beside the one that is ``using``.

        What it computes, transfers and waits for, ``synchronise`` too, is ordered with what
        it has queued itself, no more: both threads must not touch the same memory.
        """
