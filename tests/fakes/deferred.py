"""A stand-in for a GPU on the CPU, for tests: transfers happen as late as they may.

Its tensors are the CPU's. A transfer waits in a queue and is done in an order drawn by
chance, at the latest when somebody waits for it. Until then its target holds no numbers,
and an operation that touches it raises: so a missing ``wait`` is found on any machine. It
knows which tensors would be on a GPU, and notes where the host reads their values, each
of which would make a GPU's host wait. Its memory may be bounded. It cannot show an allocator
that reuses memory, nor kernels; how long things take is shown by ``timed``.
"""

from __future__ import annotations

import inspect
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spottrain.pipeline.base.operations import OperationMode
from spottrain.pipeline.base.tracking import tensors_in
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.devices.port import Transfer, UnusableDeviceError

_UNDEFINED = 0xFF
"""Byte that fills targets of transfers under way: nan in every type of float."""


_EAGERNESS = (0.0, 0.02, 0.3)
"""Probability that a transfer happens at any operation."""


class EarlyAccessError(AssertionError):
    """An operation touched what a transfer under way is still to bring, or reads."""


class UnlockedPagesError(AssertionError):
    """A transfer would hold the host: the pages of its host memory are not locked.

    "For transfers between device memory and pageable host memory, the function might be
    synchronous with respect to host" (CUDA runtime, API synchronization behavior).
    """


@dataclass(eq=False, slots=True)
class Copy:
    target: torch.Tensor
    source: torch.Tensor
    downward: bool
    is_new: bool
    """Whether its target is new memory, which nothing queued can use."""
    done: bool = False
    at_s: float = 0.0
    """When it ends, on a device that has a clock."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation that has run."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    changed: list[torch.Tensor]
    """Operands that it has written to."""


class _Guard(OperationMode):
    """Refuses operations on targets of transfers under way."""

    def __init__(self, device: DeferredDevice) -> None:
        super().__init__()
        self._device = device

    def operate(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation whose operands are all there."""
        changed = _written(operation, args)
        operands = tensors_in((args, kwargs))
        for operand in operands:
            is_written = any(operand is one for one in changed)
            self._device.check(operation, operand, is_written=is_written)
        result = self._device.run(operation, args, kwargs, changed)
        is_devices = self._device.hold_any(operands)
        self._device.ran(Call(operation, args, kwargs, result, changed), on_device=is_devices)
        if is_devices:
            self._device.hold(tensors_in((result, changed)))
            if operation._schema.name in _HOST_READS:
                self._device.note_read(operation._schema.name)
        return result


class _Reads(TorchFunctionMode):
    """Notes reads of many values at once, which are no operations."""

    def __init__(self, device: DeferredDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch's."""
        if function in _WHOLE_READS and self._device.hold_any(tensors_in(args)):
            self._device.note_read(function.__name__)
        return function(*args, **(kwargs or {}))


def _written(operation: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the operands that an operation writes to."""
    return [
        value
        for argument, value in zip(operation._schema.arguments, args, strict=False)
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(value, torch.Tensor)
    ]


class DeferredDevice(HostDevice):
    """The stand-in.

    Args:
        seed: Of the order of transfers. With one that is divisible by three no transfer
            happens before somebody waits for it, or for a later one.
        memory_bytes: For all tensors together.
    """

    is_host = False
    collective_library = "gloo"
    """In the place of NCCL."""

    def __init__(self, seed: int = 0, memory_bytes: int | None = None) -> None:
        self._memory_bytes = memory_bytes
        self._live_bytes = self._peak_bytes = 0
        self.identity = f"deferred:{seed} of process {os.getpid()}"
        self._random = random.Random(seed)
        self._eagerness = _EAGERNESS[seed % len(_EAGERNESS)]
        self._lock = threading.RLock()
        self._queues: dict[bool, deque[Copy]] = {False: deque(), True: deque()}
        self._locked: dict[int, int] = {}
        """Addresses where locked pages begin and end."""
        self._pinned: dict[int, weakref.ref[Any]] = {}
        """Storages of ``allocate_host``."""
        self._held: dict[int, weakref.ref[Any]] = {}
        """Storages that would be in a GPU's memory."""
        self.host_reads: list[str] = []
        """Reads of values of such tensors: the operation, and the function it was in."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory."""
        memory = super().allocate(num_bytes)
        self.hold([memory])
        return memory

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory that holds no numbers."""
        memory = super().allocate_host(shape, dtype)
        self.spoil(memory)
        _remember(self._pinned, memory)
        return memory

    def allocate_beside(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory that holds no numbers."""
        memory = super().allocate_beside(shape, dtype)
        self.spoil(memory)
        self.hold([memory])
        return memory

    def lock_pages(self, memory: torch.Tensor) -> None:
        """Note the addresses; refuse those that are locked, as a driver does."""
        begin, end = _begin(memory), _end(memory)
        for other_begin, other_end in self._locked.items():
            if begin < other_end and other_begin < end:
                raise UnusableDeviceError("pages are locked already")
        if begin < end:
            self._locked[begin] = end

    def unlock_pages(self, memory: torch.Tensor) -> None:
        """Forget the addresses."""
        if memory.numel():
            self.synchronise()
            del self._locked[_begin(memory)]

    def upload(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Queue a copy."""
        return self._begin(source, target, downward=False)

    def download(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Queue a copy."""
        return self._begin(source, target, downward=True)

    def rescue(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy."""
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            target.copy_(source)

    def wait(self, transfer: Transfer) -> torch.Tensor:
        """Do the copy, and all before it in its direction."""
        return self.bring(transfer)

    def finish(self, transfer: Transfer) -> torch.Tensor:
        """Do the copy, and all before it in its direction."""
        return self.bring(transfer)

    def bring(self, transfer: Transfer) -> torch.Tensor:
        """Do the copy, and all before it in its direction."""
        assert isinstance(transfer, Copy)
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

    @contextmanager
    def using(self) -> Iterator[None]:
        """Check every operation of this thread."""
        with _Guard(self), _Reads(self):
            yield

    def check(self, operation: object, operand: torch.Tensor, *, is_written: bool) -> None:
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

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Regard tensors as the device's, and all that is computed from them."""
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_meta:
                self._take_memory(tensor.untyped_storage())
                _remember(self._held, tensor)

    def run(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: object
    ) -> Any:
        """Run an operation of this thread; return its result."""
        return operation(*args, **kwargs)

    def ran(self, call: Call, *, on_device: bool) -> None:
        """Note that an operation has run, on tensors of the device or of the host."""

    def _take_memory(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._held:
            return
        num_bytes = storage.nbytes()
        bound = self._memory_bytes
        if bound is not None and self._live_bytes + num_bytes > bound:
            free = bound - self._live_bytes
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {num_bytes} bytes. GPU 0 has a total "
                f"capacity of {bound} bytes of which {free} bytes is free."
            )
        self._live_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self._live_bytes -= num_bytes

    def memory_bytes(self) -> int | None:
        """Return the bound."""
        return self._memory_bytes

    def peak_bytes(self) -> int | None:
        """Return the maximum so far."""
        return self._peak_bytes

    def hold_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether one of the tensors is the device's."""
        return any(
            tensor.untyped_storage()._cdata in self._held
            for tensor in tensors
            if tensor.layout is torch.strided and not tensor.is_meta
        )

    def note_read(self, operation: str) -> None:
        """Note that the host reads values of the device's, for which it waits."""
        frame = inspect.currentframe()
        while frame is not None:
            name = str(frame.f_globals.get("__name__"))
            if not name.startswith(_WATCHERS):
                break
            frame = frame.f_back
        place = "" if frame is None else f"{name}:{frame.f_code.co_name}"
        self.host_reads.append(f"{operation.removeprefix('aten::')} in {place}")

    def _begin(self, source: torch.Tensor, target: torch.Tensor | None, *, downward: bool) -> Copy:
        with self._lock, torch.utils._python_dispatch._disable_current_modes():
            is_new = target is None
            if target is None and downward:
                target = self.allocate_host(source.shape, source.dtype)
            elif target is None:
                target = torch.empty_like(source)
            self._check_locked(target if downward else source)
            assert target.shape == source.shape
            assert target.dtype == source.dtype
            for queue in self._queues.values():
                for other in queue:
                    if _overlap(other.target, source) or _overlap(other.target, target):
                        raise EarlyAccessError("a transfer touches another's target")
            self.spoil(target)
            if not downward:
                self.hold([target])
            copy = Copy(target, source, downward, is_new)
            self.began(copy)
            self._queues[downward].append(copy)
            self._do_some()
        return copy

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Do a copy."""
        target.copy_(source)

    def spoil(self, memory: torch.Tensor) -> None:
        """Let memory hold no numbers."""
        if memory.numel():
            with torch.no_grad():
                memory.view(-1).view(torch.uint8).fill_(_UNDEFINED)

    def began(self, copy: Copy) -> None:
        """Note that a copy is queued."""

    def _check_locked(self, memory: torch.Tensor) -> None:
        is_locked = memory.untyped_storage()._cdata in self._pinned or any(
            begin <= _begin(memory) and _end(memory) <= end for begin, end in self._locked.items()
        )
        if memory.numel() and not is_locked:
            raise UnlockedPagesError("pages of a transfer's host memory are not locked")

    def _do_some(self) -> None:
        """Do a few of the copies, or none."""
        while self._random.random() < self._eagerness:
            self._do_next(self._random.random() < 0.5)

    def _do_next(self, downward: bool) -> None:
        queue = self._queues[downward]
        if queue:
            copy = queue.popleft()
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                self.move(copy.source, copy.target)
            copy.done = True


def open_device(seed: str, memory_share: float = 1.0) -> DeferredDevice:
    """Open the device that is named by this module, a colon and a seed."""
    return DeferredDevice(int(seed))


_WATCHERS = "tests.fakes.", "torch.", "spottrain.pipeline.base.operations"
"""Modules that are between whoever runs an operation and the stand-in."""
_HOST_READS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique2",
        "aten::equal",
        "aten::masked_select",
        "aten::nonzero",
    }
)
"""Operations whose result is, or whose output's shape depends on, values of a tensor."""
_WHOLE_READS = frozenset(
    {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}
)


def _remember(held: dict[int, weakref.ref[Any]], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage._cdata not in held:
        forget = partial(_forget, held, storage._cdata)
        held[storage._cdata] = weakref.ref(storage, forget)


def _forget(held: dict[int, weakref.ref[Any]], key: int, gone: object) -> None:
    if held.get(key) is gone:
        del held[key]


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
