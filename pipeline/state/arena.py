"""Memory that outlives a worker: sections, their undo slot, and the decision.

Every piece is an anonymous file (``memfd``) of the VM's supervisor that a worker maps.
When the worker is killed, its successor on the same VM maps the same piece and finds
the last whole word that was written (design: section 6, Commit). Words are 8 bytes,
aligned, and written one at a time: payloads first, the word that validates them last. A
validating word holds its value plus one: new memory, which is all zeros, means "none",
also when a worker died before it wrote a first word.

The payload of a section, its tensors, may lie on the worker's device instead. Then the
section ends with its worker, words included, and a word is written only after the
device is done.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.model.sections import Attached
from spottrain.pipeline.model.state import Forms, StateSpec
from spottrain.pipeline.state.agreement import (
    Contribution,
    MinibatchDecision,
    SectionRecord,
)
from spottrain.pipeline.state.numbers import SectionNumbers

HEADER_BYTES = 4096
ALIGNMENT_BYTES = 512
"""As torch's allocator aligns on GPUs: kernels may choose their way by it."""
_HUGE_PAGE_BYTES = 2 << 20
"""Of a huge page, which takes a processor fewer entries of its page table. Kernels give them
to anonymous files where ``transparent_hugepage/shmem_enabled`` allows it."""
_METRICS = 32
"""First word of a page's sums of metrics, which go up to its end."""
UNUSABLE = -1
"""Version of a section that is not whole."""


class MemoryHolder(Protocol):
    """The supervisor, as a worker sees it."""

    def open(self, name: str, num_bytes: int) -> int:
        """Return a file descriptor of the piece ``name``, made of zeros if new."""

    def names(self) -> frozenset[str]:
        """Return the pieces that exist."""

    def release(self, name: str) -> None:
        """Release a piece; its memory is freed when it is mapped no more."""


class _Piece:
    """Host memory whose first page is words: an anonymous file, or this process's own."""

    def __init__(self, holder: MemoryHolder | None, name: str, num_bytes: int) -> None:
        fd = -1 if holder is None else holder.open(name, num_bytes)
        try:
            self._map = mmap.mmap(fd, num_bytes)
            if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # of kernels without them
                    self._map.madvise(mmap.MADV_HUGEPAGE)
        finally:
            if holder is not None:
                os.close(fd)
        self.words = memoryview(self._map)[:HEADER_BYTES].cast("q")
        self.reals = memoryview(self._map)[:HEADER_BYTES].cast("d")

    def after_header(self) -> torch.Tensor:
        """Return all bytes but the header."""
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _part(
    memory: torch.Tensor, offset: int, shape: Iterable[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor over bytes of ``memory`` from ``offset`` on.

    It counts its own changes (``data``): autograd must not take a change of a gradient
    for one of a parameter beside it.
    """
    shape = tuple(shape)
    if not (num_bytes := math.prod(shape) * dtype.itemsize):
        return torch.empty(shape, dtype=dtype, device=memory.device)
    return memory[offset : offset + num_bytes].view(dtype).view(shape).data


class ControlBlock:
    """State of a slot beside its sections: the decision, and the undo slot in use."""

    # Places of the words.
    _UNDO, _STEP, _GENERATION, _OVERFLOW, _STOP, _NUM_METRICS = range(6)
    _LOSS_SUM, _WEIGHT, _SQUARE_NORM = range(16, 19)

    def __init__(self, holder: MemoryHolder) -> None:
        piece = _Piece(holder, "control", HEADER_BYTES)
        self._words, self._reals = piece.words, piece.reals
        self.lock = threading.RLock()
        """Held while words or contents of sections change once training runs: whoever
        saves them from another thread (``SlotMemory.evacuate``) waits for it."""
        self._queued: list[tuple[SectionArena, int, int]] = []
        """Updates that a device is still to do: section, next version, its origin."""

    def updated(self, arena: SectionArena, version: int, origin: int) -> None:
        """Note that all of a section's update is done, or queued on its device."""
        self._queued.append((arena, version, origin))

    def flip(self) -> list[SectionArena]:
        """Wait once for all updates that were noted; let their sections have the next version.

        Returns:
            These sections.
        """
        queued, self._queued = self._queued, []
        if queued:
            queued[-1][0].synchronise()
        for arena, version, origin in queued:
            arena.set_version(version, origin)
        return [arena for arena, _, _ in queued]

    @property
    def undo_section(self) -> int | None:
        """Section whose contents the undo slot holds, if it holds any."""
        section = self._words[self._UNDO] - 1
        return None if section < 0 else section

    @undo_section.setter
    def undo_section(self, section: int | None) -> None:
        self._words[self._UNDO] = 0 if section is None else section + 1

    @property
    def decision(self) -> MinibatchDecision | None:
        """The last decision written."""
        if (step := self._words[self._STEP] - 1) < 0:
            return None
        return MinibatchDecision(
            generation=self._words[self._GENERATION],
            step=step,
            loss_sum=self._reals[self._LOSS_SUM],
            weight=self._reals[self._WEIGHT],
            square_norm=self._reals[self._SQUARE_NORM],
            overflow=bool(self._words[self._OVERFLOW]),
            stop=bool(self._words[self._STOP]),
            metrics=_read_metrics(self._reals, self._words[self._NUM_METRICS]),
        )

    @decision.setter
    def decision(self, decision: MinibatchDecision | None) -> None:
        self._words[self._STEP] = 0
        if decision is None:
            return
        self._words[self._GENERATION] = decision.generation
        self._words[self._OVERFLOW] = decision.overflow
        self._words[self._STOP] = decision.stop
        self._reals[self._LOSS_SUM] = decision.loss_sum
        self._reals[self._WEIGHT] = decision.weight
        self._reals[self._SQUARE_NORM] = decision.square_norm
        self._words[self._NUM_METRICS] = _write_metrics(self._reals, decision.metrics)
        self._words[self._STEP] = decision.step + 1


def _read_metrics(reals: memoryview[float], count: int) -> tuple[float, ...]:
    return tuple(reals[_METRICS : _METRICS + count])


def _write_metrics(reals: memoryview[float], metrics: Sequence[float]) -> int:
    """Write sums and weights of metrics; return how many they are."""
    for place, value in enumerate(metrics, _METRICS):
        reals[place] = value
    return len(metrics)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Byte offsets of every tensor of a section, gradients of a type side by side.

    Numbers come first, from the end of the header; then the payload, whose offsets
    count from its own beginning.
    """

    payload: int
    """Where it begins, after the header."""
    parameters: tuple[Mapping[str, int], ...]
    """Of each version; what is not trained is in one place in all of them."""
    versions: tuple[tuple[int, int], ...]
    """Where the trained parameters of each begin and end."""
    gradients: Mapping[str, int]
    """Of the first sum."""
    state: Mapping[tuple[str, str], int]
    runs: tuple[tuple[torch.dtype, int, int], ...]
    """(type, offset, elements) of the gradients of each type, padding included."""
    gradients_start: int
    gradients_bytes: int
    """Of one sum; there are as many, one after the other, as versions."""
    state_start: int
    end: int

    @property
    def largest_version(self) -> int:
        """Bytes of its trained parameters."""
        return max(end - start for start, end in self.versions)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _lay_out(specs: tuple[ParameterSpec, ...]) -> _Layout:
    offset = 0
    runs: list[tuple[torch.dtype, int, int]] = []

    def place(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        nonlocal offset
        here = offset
        offset += _aligned(math.prod(shape) * dtype.itemsize)
        return here

    def place_all(*, trainable: bool) -> dict[str, int]:
        return {
            spec.name: place(spec.shape, spec.dtype)
            for spec in specs
            if spec.trainable == trainable
        }

    parameters = [place_all(trainable=False)]
    starts = [offset]
    parameters[0] |= place_all(trainable=True)
    versions = max((spec.versions for spec in specs), default=1)
    for version in range(1, versions):
        starts.append(offset)
        parameters.append(
            {
                spec.name: place(spec.shape, spec.dtype)
                if version < spec.versions
                else parameters[0][spec.name]
                for spec in specs
            }
        )
    gradients_start = offset
    gradients: dict[str, int] = {}
    for dtype in dict.fromkeys(spec.dtype for spec in specs if spec.trainable):
        start = offset
        for spec in specs:
            if spec.trainable and spec.dtype is dtype:
                gradients[spec.name] = place(spec.shape, dtype)
        runs.append((dtype, start, (offset - start) // dtype.itemsize))
    gradients_bytes = offset - gradients_start
    state_start = offset = gradients_start + versions * gradients_bytes
    state = {
        (spec.name, key): place(value.shape, value.dtype)
        for spec in specs
        for key, value in spec.state.items()
    }
    return _Layout(
        payload=_aligned(SectionNumbers.size(len(gradients), group_bytes(specs), versions)),
        parameters=tuple(parameters),
        versions=tuple(itertools.pairwise([*starts, gradients_start])),
        gradients=gradients,
        state=state,
        runs=tuple(runs),
        gradients_start=gradients_start,
        gradients_bytes=gradients_bytes,
        state_start=state_start,
        end=offset,
    )


def payload_bytes(specs: tuple[ParameterSpec, ...]) -> int:
    """Return the bytes of a section's tensors: parameters, gradients, optimizer state."""
    return _lay_out(specs).end


def group_bytes(specs: Iterable[ParameterSpec]) -> int:
    """Return the bytes of the tensors in the optimizer's parameter groups."""
    return sum(spec.group_bytes for spec in specs)


class SectionArena:
    """The committed memory of one section.

    Where gradients are stale by one mini-batch, it holds parameters of two versions, the
    present one and the one before, and gradients of two mini-batches. Each has its place
    by whether its number is even: an update writes the next version over the one before
    the present, and no mini-batch's gradients touch those of the one before it.

    Args:
        holder: Gives the memory, with the contents that a predecessor left; ``None``: another
            rank holds the section. Here are its numbers alone, in memory of this process, and
            tensors that have none (the meta device).
        section: Number of the section.
        specs: Its parameters; the same list always gives the same layout.
        device: Where the tensors are; ``None``: in the holder's memory. On a device a
            section begins and ends with this process.
        room: Of a copy that is kept beside what is trained. Its gradients are never
            written, so they take no memory.
    """

    _VERSION, _ORIGIN, _PREPARED_STEP, _PREPARED_GENERATION = range(4)
    _OVERFLOW, _NUM_METRICS = range(4, 6)
    _LOSS_SUM, _WEIGHT, _SQUARE_NORM = range(16, 19)

    def __init__(
        self,
        holder: MemoryHolder | None,
        section: int,
        specs: tuple[ParameterSpec, ...],
        device: Device | None = None,
        room: int | None = None,
    ) -> None:
        layout = _lay_out(specs)
        self.is_held = holder is not None
        size = layout.end if self.is_held else 0
        on_host = HEADER_BYTES + layout.payload + (0 if device else size)
        name = section_name(section, room)
        piece = _Piece(None if device else holder, name, on_host)
        memory = piece.after_header()
        if not self.is_held:
            payload = torch.empty(layout.end, dtype=torch.uint8, device="meta")
        else:
            payload = memory[layout.payload :] if device is None else device.allocate(size)
        self.payload = payload
        """All tensors as bytes."""
        self.section = section
        self.is_copy = room is not None
        self.specs = specs
        self.running = frozenset(spec.name for spec in specs if spec.running)
        """Buffers that forwards change; their gradients are the changes of a mini-batch."""
        self.device = device
        self.num_bytes = HEADER_BYTES + layout.payload + size
        self.versions = len(layout.parameters)
        """Of the parameters that it holds."""
        self.numbers = SectionNumbers(
            memory, len(layout.gradients), group_bytes(specs), self.versions
        )
        self._layout = layout
        self._words, self._reals = piece.words, piece.reals

        self._parameters = self._map_parameters(payload)
        self._gradients = [
            self._map_gradients(payload, -number * layout.gradients_bytes)
            for number in range(self.versions)
        ]
        self.state = {
            spec.name: {
                key: _part(payload, layout.state[spec.name, key], value.shape, value.dtype)
                for key, value in spec.state.items()
            }
            for spec in specs
        }

    @property
    def state_spec(self) -> StateSpec:
        """Of ``state``."""
        return {spec.name: spec.state for spec in self.specs}

    @property
    def forms(self) -> Mapping[str, Forms]:
        """How ``state`` is nested, by parameter."""
        return {spec.name: spec.forms for spec in self.specs}

    @property
    def with_state(self) -> frozenset[str]:
        """Parameters for which the optimizer has made its state."""
        return self._flagged(self.numbers.with_state)

    @with_state.setter
    def with_state(self, names: frozenset[str]) -> None:
        self.numbers.with_state = [name in names for name in self.gradients]

    @property
    def lacking(self) -> frozenset[str]:
        """Parameters that no backward of the prepared mini-batch gave a gradient."""
        return self._flagged(self.numbers.lacking)

    @lacking.setter
    def lacking(self, names: frozenset[str]) -> None:
        self.numbers.lacking = [name in names for name in self.gradients]

    def _flagged(self, flags: Sequence[bool]) -> frozenset[str]:
        pairs = zip(self.gradients, flags, strict=True)
        return frozenset(name for name, flag in pairs if flag)

    @property
    def attached(self) -> Mapping[str, Attached]:
        """What the user's code has attached to each parameter, buffers left out."""
        return {spec.name: spec.attached for spec in self.specs if not spec.running}

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Those of the present version, by name."""
        return self.parameters_at(self.version)

    def parameters_at(self, version: int) -> Mapping[str, torch.Tensor]:
        """Return the parameters of a version; where it keeps one only, of that."""
        return self._parameters[version % self.versions]

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """By name, those of the mini-batch that leads from the present version on."""
        return self.gradients_of(self.version)

    @property
    def gradient_runs(self) -> Sequence[torch.Tensor]:
        """The same, all of one type as one flat tensor."""
        return self.gradient_runs_of(self.version)

    def gradients_of(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return the gradients of mini-batch ``step`` by name."""
        return self._gradients[step % self.versions][0]

    def gradient_runs_of(self, step: int) -> Sequence[torch.Tensor]:
        """Return the same, all of one type as one flat tensor."""
        return self._gradients[step % self.versions][1]

    def exponents_of(self, step: int) -> list[int | None]:
        """Return the exponents on which those of mini-batch ``step`` are based.

        Where two versions are kept they are those committed with the weights that it
        computes with, whether or not the mini-batch before it is committed yet.
        """
        delayed = self.versions > 1 and self.version == step
        return self.numbers.delayed_exponents if delayed else self.numbers.exponents

    def advance(self) -> Mapping[str, torch.Tensor]:
        """Return where the next version's parameters go, made equal to the present ones.

        Where two versions are kept this overwrites the one before the present.
        """
        following = self.parameters_at(self.version + 1)
        for name, parameter in self.parameters.items():
            if parameter is not following[name]:
                following[name].copy_(parameter)
        return following

    def _map_parameters(self, payload: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        versions: list[dict[str, torch.Tensor]] = []
        for places in self._layout.parameters:
            versions.append(
                {
                    spec.name: versions[0][spec.name]
                    if versions and spec.versions == 1
                    else _part(payload, places[spec.name], spec.shape, spec.dtype)
                    for spec in self.specs
                }
            )
        return versions

    def _map_gradients(
        self, payload: torch.Tensor, start: int = 0
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Return gradients, and runs of them, over a payload from ``start`` on."""
        layout = self._layout
        gradients = {
            spec.name: _part(payload, layout.gradients[spec.name] - start, spec.shape, spec.dtype)
            for spec in self.specs
            if spec.trainable
        }
        runs = [_part(payload, at - start, (count,), dtype) for dtype, at, count in layout.runs]
        return gradients, runs

    def gradients_in(
        self, memory: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Return gradients, and runs of them, laid out alike in ``gradients_bytes`` elsewhere."""
        return self._map_gradients(memory, self._layout.gradients_start)

    @property
    def gradients_bytes(self) -> int:
        """Of one mini-batch's."""
        return self._layout.gradients_bytes

    @property
    def undo_bytes(self) -> int:
        """Of one mini-batch's gradients and of what its update changes, without numbers."""
        layout = self._layout
        return self.gradients_bytes + layout.largest_version + layout.end - layout.state_start

    def copy_from(
        self,
        other: SectionArena,
        copy: Callable[[torch.Tensor, torch.Tensor], object] = _copy,
        undo: UndoSlot | None = None,
    ) -> None:
        """Take over contents, marks and version of the same section elsewhere.

        Args:
            other: The section.
            copy: Copies its first argument to its second.
            undo: Holds what an unfinished update of ``other`` has changed.
        """
        self.invalidate()
        record = other.record()
        if record.contribution is None:  # then its gradients are of no use
            for theirs, ours in zip(other.movable[1:], self.movable[1:], strict=True):
                copy(theirs, ours)
        else:
            copy(other.payload, self.payload)
        self.numbers.copy_from(other.numbers)
        origin = record.origin
        if undo is not None and undo.version == record.version:
            undo.copy_to(self, copy)
            origin = undo.origin
        self.synchronise()
        if record.contribution is not None:
            assert record.prepared_generation is not None
            assert record.prepared_step is not None
            self.prepare(record.prepared_generation, record.prepared_step, record.contribution)
        self.set_version(record.version, origin)

    @property
    def movable(self) -> tuple[torch.Tensor, ...]:
        """Bytes of this section that a replica needs: all but the gradients."""
        gradients = slice(self._layout.gradients_start, self._layout.state_start)
        before, after = self.payload[: gradients.start], self.payload[gradients.stop :]
        return self.numbers.contents, before, after

    def undoable(self, version: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the bytes that the update of a version changes.

        Trained parameters where the next version goes, and optimizer state; before the
        first update there is none. Gradients are not changed.
        """
        start, end = self._layout.versions[(version + 1) % self.versions]
        state = self.payload[self._layout.state_start :]
        return (
            self.numbers.contents,
            self.payload[start:end],
            state if self.with_state else state[:0],
        )

    @property
    def version(self) -> int:
        """Mini-batches applied, or ``UNUSABLE``."""
        return self._words[self._VERSION] - 1

    @property
    def origin(self) -> int:
        """Generation whose gradients led to this version, or that restored it."""
        return self._words[self._ORIGIN]

    @property
    def content(self) -> tuple[int, int]:
        """The name of the contents: version and origin."""
        return self.version, self.origin

    def synchronise(self) -> None:
        """Wait until the device has done what is queued, before a word says so."""
        if self.device is not None:
            self.device.synchronise()

    def invalidate(self) -> None:
        """Mark the contents as unusable before they are overwritten."""
        self.unprepare()
        self._words[self._VERSION] = UNUSABLE + 1

    def set_version(self, version: int, origin: int) -> None:
        """Set origin and version; the version word, written last, validates both."""
        self._words[self._ORIGIN] = origin
        self._words[self._VERSION] = version + 1

    def prepare(self, generation: int, step: int, mine: Contribution) -> None:
        """Mark the gradients as those of mini-batch ``step``, reduced and whole."""
        self.unprepare()
        self._words[self._PREPARED_GENERATION] = generation
        self._words[self._OVERFLOW] = mine.overflow
        self._reals[self._LOSS_SUM] = mine.loss_sum
        self._reals[self._WEIGHT] = mine.weight
        self._reals[self._SQUARE_NORM] = mine.square_norm
        self._words[self._NUM_METRICS] = _write_metrics(self._reals, mine.metrics)
        self._words[self._PREPARED_STEP] = step + 1

    def unprepare(self) -> None:
        """Clear the mark before the gradients change."""
        self._words[self._PREPARED_STEP] = 0

    def record(self) -> SectionRecord:
        """Return the record of this copy of the section."""
        step = self._words[self._PREPARED_STEP] - 1
        if step < 0:
            return SectionRecord(
                section=self.section,
                version=self.version,
                origin=self.origin,
                prepared_generation=None,
                prepared_step=None,
                contribution=None,
                is_copy=self.is_copy,
            )
        return SectionRecord(
            section=self.section,
            version=self.version,
            origin=self.origin,
            prepared_generation=self._words[self._PREPARED_GENERATION],
            prepared_step=step,
            contribution=Contribution(
                section=self.section,
                loss_sum=self._reals[self._LOSS_SUM],
                weight=self._reals[self._WEIGHT],
                square_norm=self._reals[self._SQUARE_NORM],
                overflow=bool(self._words[self._OVERFLOW]),
                metrics=_read_metrics(self._reals, self._words[self._NUM_METRICS]),
            ),
        )


def section_name(section: int, room: int | None = None) -> str:
    """Return the name under which a section's memory is held, or a copy's of it."""
    return f"section-{section}" if room is None else f"copy-{room}-{section}"


class UndoSlot:
    """Room for the update of one section: a backup of what it changes, and the mean gradients
    that it is made with, so that those which are prepared stay as they are.

    Args:
        holder: Gives the memory.
        arenas: Sections, one of which has its update at a time.
        device: Where the payloads are, as for ``SectionArena``.
    """

    NAME = "undo"

    def __init__(
        self,
        holder: MemoryHolder,
        arenas: Iterable[SectionArena],
        device: Device | None = None,
    ) -> None:
        sizes = [(_aligned(one.numbers.contents.numel()), one.undo_bytes) for one in arenas]
        on_host = max(
            (numbers + (0 if device else payload) for numbers, payload in sizes), default=0
        )
        piece = _Piece(None if device else holder, self.NAME, HEADER_BYTES + max(on_host, 1))
        self._words = piece.words
        self._on_host = piece.after_header()
        self._on_device: torch.Tensor | None = None
        if device is not None:
            self._on_device = device.allocate(max((payload for _, payload in sizes), default=0))

    def save(self, arena: SectionArena) -> None:
        """Copy the section here."""
        self._words[0], self._words[1] = arena.version, arena.origin
        for room, contents in self._pairs(arena, arena.version):
            room.copy_(contents)

    def gradients(self, arena: SectionArena) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Return room for the section's mean gradients by name, and as runs."""
        return arena.gradients_in(self._room(arena))

    def _room(self, arena: SectionArena) -> torch.Tensor:
        """Return where the gradients of a section, parameters and state have their places,
        which depend on this section alone: a successor may hold fewer."""
        if self._on_device is not None:
            return self._on_device
        return self._on_host[_aligned(arena.numbers.contents.numel()) :]

    def _pairs(
        self, arena: SectionArena, version: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what the update of a version changes, each after its place here."""
        numbers, *payload = arena.undoable(version)
        yield self._on_host[: numbers.numel()], numbers
        room, start = self._room(arena), arena.gradients_bytes
        for contents in payload:
            yield room[start : start + contents.numel()], contents
            start += contents.numel()

    @property
    def version(self) -> int:
        """Of the contents."""
        return self._words[0]

    @property
    def origin(self) -> int:
        """Of the contents."""
        return self._words[1]

    def copy_to(
        self,
        arena: SectionArena,
        copy: Callable[[torch.Tensor, torch.Tensor], object] = _copy,
    ) -> None:
        """Copy the contents to the section, as ``SectionArena.copy_from`` does."""
        for room, contents in self._pairs(arena, self.version):
            copy(room, contents)

    def restore(self, arena: SectionArena) -> None:
        """Copy the section back, unless its update has written the version word."""
        if arena.version == self.version:
            self.copy_to(arena)
            arena.set_version(self.version, self.origin)
