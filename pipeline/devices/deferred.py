"""A stand-in for a GPU on the CPU, for tests: transfers happen as late as they may.

Its tensors are the CPU's. A transfer waits in a queue and is done in an order drawn by
chance, at the latest when somebody waits for it. Until then its target holds no numbers,
and an operation that touches it raises: so a missing ``wait`` is found on any machine. It
cannot show an allocator that reuses memory, nor kernels.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from spottrain.pipeline.devices.port import Transfer

_UNDEFINED = 0xFF
"""Byte that fills targets of transfers under way: nan in every type of float."""


_EAGERNESS = (0.0, 0.02, 0.3)
"""Probability that a transfer happens at any operation."""


class EarlyAccessError(AssertionError):
    """An operation touched what a transfer under way is still to bring, or reads."""


@dataclass(eq=False, slots=True)
class _Copy:
    target: torch.Tensor
    source: torch.Tensor
    downward: bool
    done: bool = False


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations on targets of transfers under way."""

    def __init__(self, device: DeferredDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation whose operands are all there."""
        changed = _written(operation, args)
        for operand in tree_iter((args, kwargs)):
            if isinstance(operand, torch.Tensor):
                is_written = any(operand is one for one in changed)
                self._device.check(operation, operand, is_written=is_written)
        self._device.count(operation)
        return operation(*args, **(kwargs or {}))


def _written(operation: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the operands that an operation writes to."""
    return [
        value
        for argument, value in zip(operation._schema.arguments, args, strict=False)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(value, torch.Tensor)
    ]


class DeferredDevice:
    """The stand-in.

    Args:
        seed: Of the order of transfers. With one that is divisible by three no transfer
            happens before somebody waits for it, or for a later one.
    """

    torch_device = torch.device("cpu")
    is_host = False
    collective_library = "gloo"
    """In the place of NCCL."""

    def __init__(self, seed: int = 0) -> None:
        self.identity = f"deferred:{seed} of process {os.getpid()}"
        self._random = random.Random(seed)
        self._eagerness = _EAGERNESS[seed % len(_EAGERNESS)]
        self._lock = threading.RLock()
        self._queues: dict[bool, deque[_Copy]] = {False: deque(), True: deque()}
        self.host_reads = 0
        """Values of tensors that the host has read, each of which would make a GPU's
        host wait."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory that holds no numbers."""
        memory = torch.empty(tuple(shape), dtype=dtype)
        _spoil(memory)
        return memory

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def upload(
        self, source: torch.Tensor, target: torch.Tensor | None = None
    ) -> Transfer:
        """Queue a copy."""
        return self._begin(source, target, downward=False)

    def download(
        self, source: torch.Tensor, target: torch.Tensor | None = None
    ) -> Transfer:
        """Queue a copy."""
        return self._begin(source, target, downward=True)

    def rescue(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy."""
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            target.copy_(source)

    def is_usable(self) -> bool:
        """Return true."""
        return True

    def wait(self, transfer: Transfer) -> torch.Tensor:
        """Do the copy, and all before it in its direction."""
        return self.finish(transfer)

    def finish(self, transfer: Transfer) -> torch.Tensor:
        """Do the copy, and all before it in its direction."""
        assert isinstance(transfer, _Copy)
        with self._lock:
            while not transfer.done:
                self._do_next(transfer.downward)
        return transfer.target

    def synchronise(self) -> None:
        """Do all copies."""
        with self._lock:
            for downward, queue in self._queues.items():
                while queue:
                    self._do_next(downward)

    def mark(self) -> float:
        """Return the time."""
        return time.monotonic()

    def reach(self, mark: float) -> None:
        """Do nothing: the host computes."""

    def elapsed_s(self, marks: Iterable[tuple[float, float]]) -> float:
        """Return the time between the moments of each pair, added up."""
        return sum(end - begin for begin, end in marks)

    def seed(self, seed: int) -> None:
        """Do nothing: the CPU's random numbers are seeded with the host's."""

    def memory_bytes(self) -> int | None:
        """Return ``None``: it is the host's."""
        return None

    def context_bytes(self) -> int:
        """Return 0."""
        return 0

    def peak_bytes(self) -> int | None:
        """Return ``None``: ``TensorTracker`` counts."""
        return None

    @contextmanager
    def using(self) -> Iterator[None]:
        """Check every operation of this thread."""
        with _Guard(self):
            yield

    def check(
        self, operation: object, operand: torch.Tensor, *, is_written: bool
    ) -> None:
        """Refuse an operand that a transfer under way brings, or whose source changes.

        Raises:
            EarlyAccessError: It is one.
        """
        with self._lock:
            self._do_some()
            for transfer in (*self._queues[False], *self._queues[True]):
                if _overlap(operand, transfer.target):
                    raise EarlyAccessError(f"{operation} touches a transfer's target")
                if is_written and _overlap(operand, transfer.source):
                    raise EarlyAccessError(f"{operation} changes a transfer's source")

    def count(self, operation: Any) -> None:
        """Count an operation that hands a value to the host."""
        name = operation._schema.name
        self.host_reads += name in _HOST_READS

    def _begin(
        self, source: torch.Tensor, target: torch.Tensor | None, *, downward: bool
    ) -> _Copy:
        if target is None:
            target = torch.empty_like(source)
        assert target.shape == source.shape
        assert target.dtype == source.dtype
        with self._lock, torch.utils._python_dispatch._disable_current_modes():
            for queue in self._queues.values():
                for other in queue:
                    if _overlap(other.target, source) or _overlap(other.target, target):
                        raise EarlyAccessError("a transfer touches another's target")
            _spoil(target)
            copy = _Copy(target, source, downward)
            self._queues[downward].append(copy)
            self._do_some()
        return copy

    def _do_some(self) -> None:
        """Do a few of the copies, or none."""
        while self._random.random() < self._eagerness:
            self._do_next(self._random.random() < 0.5)

    def _do_next(self, downward: bool) -> None:
        queue = self._queues[downward]
        if queue:
            copy = queue.popleft()
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                copy.target.copy_(copy.source)
            copy.done = True


_HOST_READS = frozenset(
    {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}
)
"""Operations whose result is, or whose output's shape depends on, values of a tensor."""


def _spoil(memory: torch.Tensor) -> None:
    if memory.numel():
        with torch.no_grad():
            memory.view(-1).view(torch.uint8).fill_(_UNDEFINED)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous or expanded tensors share memory."""
    if one.layout is not torch.strided or one.is_meta or not one.numel():
        return False
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and _begin(one) < _end(other)
        and _begin(other) < _end(one)
    )


def _begin(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _end(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
