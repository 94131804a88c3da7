"""Memory that outlives a worker: sections, their undo slot, and the decision.

Every piece is an anonymous file (``memfd``) of the VM's supervisor that a worker maps.
When the worker is killed, its successor on the same VM maps the same piece and finds
the last whole word that was written (design: section 6, Commit). Words are 8 bytes,
aligned, and written one at a time: payloads first, the word that validates them last. A
validating word holds its value plus one: new memory, which is all zeros, means "none",
also when a worker died before it wrote a first word.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.state.agreement import (
    Contribution,
    MinibatchDecision,
    SectionRecord,
)

HEADER_BYTES = 4096
ALIGNMENT_BYTES = 64
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
    """A mapped anonymous file whose first page is words."""

    def __init__(self, holder: MemoryHolder, name: str, num_bytes: int) -> None:
        fd = holder.open(name, num_bytes)
        try:
            self._map = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
        self.words = memoryview(self._map)[:HEADER_BYTES].cast("q")
        self.reals = memoryview(self._map)[:HEADER_BYTES].cast("d")

    def tensor(
        self, offset: int, shape: Iterable[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor over this memory."""
        shape = tuple(shape)
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)


class ControlBlock:
    """State of a slot beside its sections: the decision, and the undo slot in use."""

    # Places of the words.
    _UNDO, _STEP, _GENERATION, _OVERFLOW, _STOP = range(5)
    _LOSS_SUM, _WEIGHT, _SQUARE_NORM = range(16, 19)

    def __init__(self, holder: MemoryHolder) -> None:
        piece = _Piece(holder, "control", HEADER_BYTES)
        self._words, self._reals = piece.words, piece.reals

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
        self._words[self._STEP] = decision.step + 1


@dataclass(frozen=True, slots=True)
class _Layout:
    """Byte offsets of every tensor of a section, gradients of a type side by side."""

    parameters: Mapping[str, int]
    gradients: Mapping[str, int]
    state: Mapping[tuple[str, str], int]
    runs: tuple[tuple[torch.dtype, int, int], ...]
    """(type, offset, elements) of the gradients of each type, padding included."""
    gradients_start: int
    state_start: int
    end: int


def _lay_out(specs: tuple[ParameterSpec, ...]) -> _Layout:
    offset = HEADER_BYTES + ALIGNMENT_BYTES
    runs: list[tuple[torch.dtype, int, int]] = []

    def place(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        nonlocal offset
        here = offset
        size = math.prod(shape) * dtype.itemsize
        offset += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return here

    parameters = {spec.name: place(spec.shape, spec.dtype) for spec in specs}
    gradients_start = offset
    gradients: dict[str, int] = {}
    for dtype in dict.fromkeys(spec.dtype for spec in specs if spec.trainable):
        start = offset
        for spec in specs:
            if spec.trainable and spec.dtype is dtype:
                gradients[spec.name] = place(spec.shape, dtype)
        runs.append((dtype, start, (offset - start) // dtype.itemsize))
    state_start = offset
    state = {
        (spec.name, key): place(value.shape, value.dtype)
        for spec in specs
        for key, value in spec.state.items()
    }
    return _Layout(
        parameters, gradients, state, tuple(runs), gradients_start, state_start, offset
    )


class SectionArena:
    """Parameters, gradients and optimizer state of one section.

    Args:
        holder: Gives the memory, with the contents that a predecessor left.
        section: Number of the section.
        specs: Its parameters; the same list always gives the same layout.
    """

    _VERSION, _ORIGIN, _PREPARED_STEP, _PREPARED_GENERATION, _OVERFLOW = range(5)
    _LOSS_SUM, _WEIGHT, _SQUARE_NORM = range(16, 19)

    def __init__(
        self, holder: MemoryHolder, section: int, specs: tuple[ParameterSpec, ...]
    ) -> None:
        layout = _lay_out(specs)
        piece = _Piece(holder, section_name(section), layout.end)
        self.section = section
        self.specs = specs
        self._words, self._reals = piece.words, piece.reals
        self.num_bytes = layout.end
        self._map_tensors(piece, layout)

    def _map_tensors(self, piece: _Piece, layout: _Layout) -> None:
        self.parameters = {
            spec.name: piece.tensor(
                layout.parameters[spec.name], spec.shape, spec.dtype
            )
            for spec in self.specs
        }
        self.gradients = {
            spec.name: piece.tensor(layout.gradients[spec.name], spec.shape, spec.dtype)
            for spec in self.specs
            if spec.trainable
        }
        self.state = {
            spec.name: {
                key: piece.tensor(
                    layout.state[spec.name, key], value.shape, value.dtype
                )
                for key, value in spec.state.items()
            }
            for spec in self.specs
        }
        runs = layout.runs
        self.gradient_runs = [piece.tensor(at, (n,), dtype) for dtype, at, n in runs]
        """All gradients of one type as one flat tensor, a tensor per type."""

        def span(start: int, end: int) -> torch.Tensor:
            return piece.tensor(start, (end - start,), torch.uint8)

        self._has_state = piece.tensor(HEADER_BYTES, (), torch.int64)
        self.contents = span(HEADER_BYTES, layout.end)
        """Everything but the header, as bytes."""
        self._stateless = span(HEADER_BYTES, layout.state_start)
        before_gradients = span(HEADER_BYTES, layout.gradients_start)
        self.movable = before_gradients, span(layout.state_start, layout.end)
        """Bytes of this section that a replica needs: all but the gradients."""

    @property
    def version(self) -> int:
        """Mini-batches applied, or ``UNUSABLE``."""
        return self._words[self._VERSION] - 1

    @property
    def origin(self) -> int:
        """Generation whose gradients led to this version, or that restored it."""
        return self._words[self._ORIGIN]

    @property
    def has_state(self) -> bool:
        """True if the optimizer has made its state, which its first update does.

        A part of the contents, so that it moves and is undone with them.
        """
        return bool(self._has_state)

    @has_state.setter
    def has_state(self, has_state: bool) -> None:
        self._has_state.fill_(has_state)

    @property
    def undoable(self) -> torch.Tensor:
        """Bytes that an update changes; before the first one there is no state."""
        return self.contents if self.has_state else self._stateless

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
            ),
        )


def section_name(section: int) -> str:
    """Return the name under which a section's memory is held."""
    return f"section-{section}"


class UndoSlot:
    """Backup of one section during its update."""

    NAME = "undo"

    def __init__(self, holder: MemoryHolder, num_bytes: int) -> None:
        piece = _Piece(holder, self.NAME, HEADER_BYTES + num_bytes)
        self._words = piece.words
        self._room = piece.tensor(HEADER_BYTES, (num_bytes,), torch.uint8)

    def save(self, arena: SectionArena) -> None:
        """Copy the section here."""
        self._words[0], self._words[1] = arena.version, arena.origin
        self._room[: arena.undoable.numel()].copy_(arena.undoable)

    def restore(self, arena: SectionArena) -> None:
        """Copy the section back, unless its update has written the version word."""
        if arena.version == self._words[0]:
            arena.undoable.copy_(self._room[: arena.undoable.numel()])
            arena.set_version(self._words[0], self._words[1])
