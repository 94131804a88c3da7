"""A stand-in for a GPU that takes its time: the host runs ahead of it, and waits for it.

It computes on the CPU, at once; a task of the executor then keeps it busy for a while more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.devices.port import Transfer


@dataclass(frozen=True, slots=True)
class _Due:
    target: torch.Tensor
    at_s: float


class AsynchronousDevice(HostDevice):
    """The stand-in.

    Args:
        task_s: Of each task: from the first of two marks to the second.
    """

    is_host = False

    def __init__(self, task_s: float) -> None:
        self._task_s = task_s
        self._free_s = 0.0
        """When all that is queued will be done."""
        self._marks = 0

    def mark(self) -> float:
        """Queue a task before every other mark; return when it will be done."""
        self._marks += 1
        ends = self._marks % 2 == 0
        self._free_s = max(time.monotonic(), self._free_s) + (self._task_s if ends else 0.0)
        return self._free_s

    def reach(self, mark: float) -> None:
        """Hold the host."""
        time.sleep(max(0.0, mark - time.monotonic()))

    def elapsed_s(self, marks: Iterable[tuple[float, float]]) -> float:
        """Return the time between the moments of each pair, once they have come."""
        pairs: Sequence[tuple[float, float]] = list(marks)
        for _, end in pairs:
            self.reach(end)
        return super().elapsed_s(pairs)

    def upload(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Copy at once."""
        return _Due(_copied(source, target), 0.0)

    def download(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Copy what all that is queued will have made, with the task that is being queued."""
        task_s = self._task_s if self._marks % 2 else 0.0
        at_s = max(time.monotonic(), self._free_s) + task_s
        return _Due(_copied(source, target), at_s)

    def finish(self, transfer: Transfer) -> torch.Tensor:
        """Hold the host."""
        assert isinstance(transfer, _Due)
        self.reach(transfer.at_s)
        return transfer.target


def _copied(source: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    return source.clone() if target is None else target.copy_(source)
