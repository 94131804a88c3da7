"""Counts the bytes of a stage's tensors, to check the planner's memory model.

Counted are the arenas, and every storage from when a worker makes or receives it until
nothing refers to it any more. Never resident set size, which also counts the
interpreter and the allocator's reserve. Memory other than tensors of this process's own
code, such as scratch memory of kernels and of collectives, is not seen.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_iter

from spottrain.morphing.schedules.schedule import Unit
from spottrain.pipeline.base.operations import OperationMode

T = TypeVar("T")
Output = list[torch.Tensor] | tuple[torch.Tensor, *tuple[Any, ...]]
"""Result of a forward: what passes a cut, or a loss and its weight."""

WATCHED_TASKS = 4
"""Tasks of a kind whose every operation is watched; later ones are assumed to be
equal."""


class LiveBytes(OperationMode):
    """Bytes of storages that are alive, now and at their highest.

    While it is entered, storages that operations of this thread make are counted; others
    when they are ``adopt``-ed. Each is counted until it is freed, in whatever thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._freed: deque[int] = deque()
        self._now = 0
        self._lock = threading.RLock()
        self.peak_bytes = 0
        """Since the beginning."""
        self.recent_peak_bytes = 0
        """Since ``begin``."""

    @property
    def now_bytes(self) -> int:
        """Bytes of what is alive."""
        with self._lock:
            while self._freed:
                self._now -= self._freed.popleft()
            return self._now

    def begin(self) -> int:
        """Forget the recent peak; return the bytes of what is alive."""
        self.recent_peak_bytes = self.now_bytes
        return self.recent_peak_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes of unknown origin, or subtract them."""
        with self._lock:
            self._now = self.now_bytes + num_bytes
            self.recent_peak_bytes = max(self.recent_peak_bytes, self._now)
            self.peak_bytes = max(self.peak_bytes, self._now)

    def adopt(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, if it is not yet counted, until it is freed."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._sizes or not num_bytes:
            return

        def gone(reference: weakref.ref[Any]) -> None:
            # In any thread: both calls are one step each.
            if self._sizes.get(key, (None,))[0] is reference:
                del self._sizes[key]
                self._freed.append(num_bytes)

        self._sizes[key] = weakref.ref(storage, gone), num_bytes
        self.add(num_bytes)

    def storages(self) -> dict[int, int]:
        """Return the bytes of every storage that is counted, by a name of its own."""
        # A copy is made at once; finalizers of other threads' tensors change the original.
        sizes = self._sizes.copy()
        return {key: num_bytes for key, (_, num_bytes) in sizes.items()}

    def operate(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and count the storages that it has made."""
        result = operation(*args, **kwargs)
        if made := tensors_in(result):
            given = {_name(x) for x in tensors_in((args, kwargs))}
            for tensor in made:
                if _name(tensor) not in given:
                    self.adopt(tensor)
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what torch.compile compiles be compiled as if this were not there."""
        return True


def tensors_in(values: object) -> list[torch.Tensor]:
    """Return the tensors among an operation's operands or results.

    They are in tuples, lists and dicts; ``tree_iter``, which also knows what users have
    registered, takes longer than a small operation.
    """
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def _name(tensor: torch.Tensor) -> int:
    strided = tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if strided else id(tensor)


@dataclass(frozen=True, slots=True)
class _TaskBytes:
    """Maximum bytes of the tasks of a kind."""

    spike: int
    """At the peak, beyond what was held before."""
    left: int
    """Afterwards, the output not counted."""


@dataclass(slots=True)
class KnownTasks:
    """What the tasks of a stage take, as earlier generations have shown."""

    task_bytes: dict[tuple[str, int], _TaskBytes] = field(default_factory=dict)
    largest_saved_bytes: int = 0
    """Of the largest single tensor that a forward has left; 0: no mini-batch has ended."""


class TensorTracker:
    """Bytes that a worker holds in one generation.

    Watching every operation costs time. So of each kind of task only the first few of
    the first mini-batch are watched, and none of a kind that is known already; a later
    one is assumed to need as much as the largest of those. Tensors that arrive, are sent
    or copied are always counted exactly.

    Args:
        static_bytes: What is held from beginning to end.
        known: Of the same stage; what is found is added to it.
    """

    def __init__(self, static_bytes: int, known: KnownTasks | None = None) -> None:
        self._live = LiveBytes()
        self._live.add(static_bytes)
        self._first = True
        self._known = KnownTasks() if known is None else known
        self._seen: Counter[tuple[str, int]] = Counter()
        self._task_bytes = dict(self._known.task_bytes)
        self._watched: set[Unit] = set()
        """Units whose graph's storages are counted one by one."""
        self._graphs: dict[Unit, int] = {}
        """The other units, and the assumed bytes of their graphs."""
        self.largest_saved_bytes = self._known.largest_saved_bytes
        """Of the largest single tensor that a forward has left; 0: not known yet."""

    @property
    def peak_bytes(self) -> int:
        """The highest so far."""
        return self._live.peak_bytes

    def adopt(self, tensor: torch.Tensor) -> None:
        """Count a tensor until its memory is freed."""
        self._live.adopt(tensor)

    def adopt_all(self, tensors: object) -> None:
        """Count all tensors of a micro-batch, however it is nested."""
        for tensor in _tensors(tensors):
            self._live.adopt(tensor)

    def forward(self, kind: str, unit: Unit, keep: bool, run: Callable[[], T]) -> T:
        """Count the bytes that a forward takes and leaves.

        Args:
            kind: Forwards of one kind and chunk are equal.
            unit: The unit that it computes.
            keep: Whether it leaves a graph.
            run: Computes it.
        """
        key = (kind, unit[1])
        if self._is_watched(key):
            before = self._live.storages()
            result = self._watch(key, run)
            made = {
                name: size for name, size in self._live.storages().items() if name not in before
            }
            sent = _outputs(result)
            left = sum(size for name, size in made.items() if name not in sent)
            self._note(key, left=left if keep else 0)
            if keep:
                self._watched.add(unit)
                largest = max(made.values(), default=0)
                self.largest_saved_bytes = max(self.largest_saved_bytes, largest)
        else:
            result = run()
            taken = self._spike(key)
            if keep:
                self._graphs[unit] = taken.left
                self._live.add(taken.left)
        self.adopt_all(result)
        return result

    def backward(self, unit: Unit, run: Callable[[], None]) -> None:
        """Count the bytes that a backward takes, and those that it frees."""
        key = ("backward", unit[1])
        if unit in self._watched:
            self._watched.remove(unit)
            self._watch(key, run)
            return
        self._spike(key)
        run()
        self._live.add(-self._graphs.pop(unit, 0))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count all tensors made inside, in the first mini-batch."""
        if not self._first:
            yield
            return
        with self._live:
            yield

    @property
    def is_settled(self) -> bool:
        """True once a mini-batch has shown what tasks take: no operation is watched."""
        return not self._first

    def settle(self) -> bool:
        """Stop watching: one mini-batch has shown what tasks take.

        Returns:
            Whether that was the first mini-batch.
        """
        was_first, self._first = self._first, False
        if was_first:
            self._known.task_bytes.update(self._task_bytes)
            self._known.largest_saved_bytes = self.largest_saved_bytes
        return was_first

    def _is_watched(self, key: tuple[str, int]) -> bool:
        if key in self._known.task_bytes:
            return False
        self._seen[key] += 1
        return self._first and self._seen[key] <= WATCHED_TASKS

    def _watch(self, key: tuple[str, int], run: Callable[[], T]) -> T:
        before = self._live.begin()
        with self._live:
            result = run()
        self._note(key, spike=self._live.recent_peak_bytes - before)
        return result

    def _note(self, key: tuple[str, int], *, spike: int = 0, left: int = 0) -> None:
        known = self._task_bytes.get(key, _TaskBytes(0, 0))
        spike, left = max(known.spike, spike), max(known.left, left)
        self._task_bytes[key] = _TaskBytes(spike, left)

    def _spike(self, key: tuple[str, int]) -> _TaskBytes:
        """Count the highest moment of a task that is not watched."""
        taken = self._task_bytes.get(key, _TaskBytes(0, 0))
        self._live.add(taken.spike)
        self._live.add(-taken.spike)
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionBytes:
    """Bytes of one micro-batch in one section; see ``SectionProfile``."""

    saved_bytes: int
    """With ``output_bytes`` what the section has made: not what only passes it."""
    output_bytes: int
    output_element_bytes: int
    forward_bytes: int
    recompute_bytes: int
    backward_bytes: int
    largest_saved_bytes: int
    """Of the largest single tensor that the forward has left."""


def section_bytes(
    forward: Callable[[], Output],
    keeping_nothing: Callable[[], AbstractContextManager[None]],
) -> tuple[SectionBytes, list[torch.Tensor]]:
    """Watch one micro-batch on its way through a section and back.

    Parameters must have their ``grad`` already: a mini-batch adds to it.

    Args:
        forward: Runs the section.
        keeping_nothing: Inside of it a forward leaves nothing for the backward.

    Returns:
        The bytes, and what passes the cut; empty if the section ends in a loss.
    """
    live = LiveBytes()
    with keeping_nothing(), live:
        out = forward()
    forward_bytes = live.peak_bytes
    del out
    start, before = live.begin(), live.storages()
    with live:
        out = forward()
    recompute_bytes = live.recent_peak_bytes - start
    kept, output_bytes = live.now_bytes - start, sum(_outputs(out).values())
    made = [size for name, size in live.storages().items() if name not in before]
    ends = out if isinstance(out, list) else [out[0]]
    numbers = (end for end in ends if end.is_floating_point())  # what a narrower type holds
    element_bytes = max((end.element_size() for end in numbers), default=0)
    backward_bytes = 0
    if ends := [end for end in ends if end.requires_grad]:  # else all so far is frozen
        gradients = list(map(torch.ones_like, ends))
        here = live.begin()
        with live:
            torch.autograd.backward(ends, gradients)
        backward_bytes = live.recent_peak_bytes - here
    found = SectionBytes(
        saved_bytes=max(0, kept - output_bytes),
        output_bytes=output_bytes,
        output_element_bytes=element_bytes if output_bytes else 0,
        forward_bytes=forward_bytes,
        recompute_bytes=recompute_bytes,
        backward_bytes=backward_bytes,
        largest_saved_bytes=max(made, default=0),
    )
    return found, [end.detach() for end in out] if isinstance(out, list) else []


def update_bytes(step: Callable[[], object]) -> int:
    """Return the peak bytes of an optimizer's first step."""
    live = LiveBytes()
    with live:
        step()
    return live.peak_bytes


def batch_bytes(batch: object) -> int:
    """Return the bytes of all tensors of a micro-batch, however it is nested."""
    live = LiveBytes()
    for tensor in _tensors(batch):
        live.adopt(tensor)
    return live.now_bytes


def _tensors(result: object) -> list[torch.Tensor]:
    return [x for x in tree_iter(result) if isinstance(x, torch.Tensor)]


def _outputs(result: object) -> dict[int, int]:
    """Return the bytes of all storages that pass a cut; a loss is not worth counting."""
    tensors = result if isinstance(result, list) else []
    return {_name(one): one.untyped_storage().nbytes() for one in tensors}
