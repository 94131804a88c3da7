"""The CPU: its memory is the host's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from spottrain.pipeline.devices.port import Transfer


@dataclass(frozen=True, slots=True)
class _Done:
    target: torch.Tensor


class HostDevice:
    """The CPU as a ``Device``: a transfer to new memory is the tensor itself."""

    torch_device = torch.device("cpu")
    is_host = True
    collective_library: str | None = None
    identity = "a CPU"

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    def allocate_beside(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def unlock_pages(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def upload(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Return ``source``, or copy it."""
        return _Done(source if target is None else target.copy_(source))

    def download(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Return ``source``, or copy it."""
        return self.upload(source, target)

    def rescue(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def is_usable(self) -> bool:
        """Return true."""
        return True

    def wait(self, transfer: Transfer) -> torch.Tensor:
        """Return the target."""
        return transfer.target

    def finish(self, transfer: Transfer) -> torch.Tensor:
        """Return the target."""
        return transfer.target

    def synchronise(self) -> None:
        """Do nothing: the host computes."""

    def clock(self) -> float:
        """Return the time of this process."""
        return time.perf_counter()

    def held_s(self) -> float:
        """Return 0: nothing is waited for."""
        return 0.0

    def mark(self) -> float:
        """Return the time."""
        return time.monotonic()

    def reach(self, mark: float) -> None:
        """Do nothing: the host computes."""

    def elapsed_s(self, marks: Iterable[tuple[float, float]]) -> float:
        """Return the time between the moments of each pair, added up."""
        return sum(end - begin for begin, end in marks)

    def memory_bytes(self) -> int | None:
        """Return ``None``: it is the host's."""
        return None

    def context_bytes(self) -> int:
        """Return 0."""
        return 0

    def peak_bytes(self) -> int | None:
        """Return ``None``: ``TensorTracker`` counts."""
        return None

    def free_cached(self) -> None:
        """Do nothing: the allocator returns what is large by itself."""

    def using(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def beside(self) -> AbstractContextManager[None]:
        """Return the same: no thread waits for what another one has queued."""
        return self.using()
