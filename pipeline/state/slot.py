"""All the memory of one slot: its sections, its undo slot, its decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spottrain import machine
from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.devices.port import Device, UnusableDeviceError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.model.optimizer import SectionOptimizer
from spottrain.pipeline.state.agreement import MinibatchDecision, SectionRecord
from spottrain.pipeline.state.arena import (
    ControlBlock,
    MemoryHolder,
    SectionArena,
    UndoSlot,
    section_name,
)
from spottrain.pipeline.state.update import Updater
from spottrain.wire.model import StateHome

COPY_ROOMS = range(2)
"""Places for copies of a section."""
_UPDATE_BOUND_S = 5.0
"""How long the update of a section may hold up the end of a process."""


class SlotMemory:
    """Memory that a worker finds when it is forked, and leaves to its successor.

    An update that a predecessor did not finish is undone first.

    Args:
        holder: Gives the memory.
        job: Builds optimizers.
        specs: The parameters of every section of the model.
        device: What the worker computes on.
        scales_loss: As for ``Updater``.
    """

    def __init__(
        self,
        holder: MemoryHolder,
        job: TrainingJob,
        specs: Sequence[tuple[ParameterSpec, ...]],
        device: Device,
        *,
        scales_loss: bool = False,
    ) -> None:
        self._holder = holder
        self._job = job
        self._specs = specs
        self._device = device
        self._scales_loss = scales_loss
        self._home: Device | None = None
        """Where sections are held; ``None``: in the holder's memory."""
        self._undo: UndoSlot | None = None
        self._locked_bytes: dict[int, int] = {}
        """Of sections whose pages are locked."""
        self.arenas: dict[int, SectionArena] = {}
        self.copies: dict[tuple[int, int], SectionArena] = {}
        """Copies of earlier states, by section and room; always in the holder's memory."""
        held = holder.names()
        self.control = ControlBlock(holder)
        self.hold(k for k in range(len(specs)) if section_name(k) in held)
        for room in COPY_ROOMS:
            held_copies = (k for k in range(len(specs)) if section_name(k, room) in held)
            for section in held_copies:
                self._hold_copy(section, room)
        self.undo_unfinished()

    @property
    def undo(self) -> UndoSlot:
        """Room for the largest section held."""
        if self._undo is None:
            self._undo = UndoSlot(self._holder, self.arenas.values(), self._home)
        return self._undo

    @property
    def num_bytes(self) -> int:
        """Bytes of all sections held, of their copies, and of the undo slot."""
        arenas = self.arenas.values()
        sizes = sum(arena.num_bytes for arena in arenas)
        undo = max((arena.undo_bytes for arena in arenas), default=0)
        kept = (span.numel() for copy in self.copies.values() for span in copy.movable)
        return sizes + undo + sum(kept)

    def hold(self, sections: Iterable[int]) -> None:
        """Make room for sections that are not held yet."""
        for section in sections:
            if section not in self.arenas:
                self.arenas[section] = self._new(section)
                self._undo = None

    def move_home(self, home: StateHome) -> None:
        """Hold all sections in the memory of the host, or of the device, from now on."""
        device = None if home == "host" or self._device.is_host else self._device
        if device is self._home:
            return
        self.undo_unfinished()
        self._home, self._undo = device, None
        for section, old in tuple(self.arenas.items()):
            new = self._new(section)
            new.copy_from(old)
            self.arenas[section] = new
            if device is not None:
                self._release(section, old)

    def borrow(self, section: int) -> SectionArena:
        """Return the numbers of a section that another rank holds.

        They end with the last reference to them, and no generation after this one finds them.
        """
        specs = tuple(spec._replace(state={}, forms={}) for spec in self._specs[section])
        assert all(spec.versions == 1 for spec in specs)
        return SectionArena(None, section, specs)

    def evacuate(self) -> None:
        """Copy sections of the device to the holder's memory, before this process ends.

        Its successor finds them there. For any thread, also while computations hang on
        the device; no word changes in the other ones any more, for good.

        Raises:
            RuntimeError: They could not be copied; this copy is lost.
        """
        if self._home is None:
            return
        if not self.control.lock.acquire(timeout=_UPDATE_BOUND_S):
            raise RuntimeError("an update hangs")
        if (unfinished := self.control.undo_section) is not None:
            self._home.synchronise()
            self.control.flip()
        self.control.undo_section = None
        for section, old in self.arenas.items():
            new = SectionArena(self._holder, section, self._specs[section])
            undo = self.undo if section == unfinished else None
            new.copy_from(old, self._home.rescue, undo)

    def _new(self, section: int) -> SectionArena:
        arena = SectionArena(self._holder, section, self._specs[section], self._home)
        if self._home is None and not self._device.is_host:
            self._lock(section, arena)
        return arena

    def _lock(self, section: int, arena: SectionArena) -> None:
        """Lock a section's pages.

        A refusal above this process's limit is borne: plans keep no more on the host, so
        that these are sections which are only measured, or which a predecessor brought
        there from the device, to which they go back.
        """
        num_bytes = arena.payload.numel()
        try:
            self._device.lock_pages(arena.payload)
        except UnusableDeviceError:
            limit_bytes = machine.locked_memory_bytes()
            locked_bytes = sum(self._locked_bytes.values()) + num_bytes
            if not 0 < limit_bytes < locked_bytes:
                raise
        else:
            self._locked_bytes[section] = num_bytes

    def _release(self, section: int, arena: SectionArena) -> None:
        """Give the holder's memory back."""
        if self._locked_bytes.pop(section, None) is not None:
            self._device.unlock_pages(arena.payload)
        self._holder.release(section_name(section))

    def keep_only(self, sections: Iterable[int]) -> None:
        """Release all other sections."""
        for section in set(self.arenas) - set(sections):
            arena = self.arenas.pop(section)
            if self._home is None:
                self._release(section, arena)

    def hold_copies(self, sections: Iterable[int]) -> None:
        """Make room for two states of each section: one that is whole, and the next."""
        for section in sections:
            for room in COPY_ROOMS:
                if (section, room) not in self.copies:
                    self._hold_copy(section, room)

    def _hold_copy(self, section: int, room: int) -> None:
        specs = self._specs[section]
        copy = SectionArena(self._holder, section, specs, room=room)
        self.copies[section, room] = copy

    def keep_copies(self, wanted: Callable[[SectionArena], bool]) -> None:
        """Release all copies but those that are ``wanted``."""
        for (section, room), copy in tuple(self.copies.items()):
            if not wanted(copy):
                del self.copies[section, room]
                self._holder.release(section_name(section, room))

    def find(self, section: int, state: tuple[int, int]) -> SectionArena | None:
        """Return the memory that holds a section in the state (version, origin)."""
        copies = (self.copies.get((section, room)) for room in COPY_ROOMS)
        for arena in (self.arenas.get(section), *copies):
            if arena is not None and arena.content == state:
                return arena
        return None

    def undo_unfinished(self) -> None:
        """Undo an update that a death or an error has interrupted."""
        if (section := self.control.undo_section) is not None:
            if section in self.arenas:
                self.undo.restore(self.arenas[section])
            self.control.undo_section = None

    def records(self) -> tuple[SectionRecord, ...]:
        """Return the records of all sections and copies held."""
        held = [self.arenas[k] for k in sorted(self.arenas)]
        held += [self.copies[key] for key in sorted(self.copies)]
        return tuple(arena.record() for arena in held)

    def apply(
        self, decision: MinibatchDecision, sections: Sequence[int], faults: FaultScript
    ) -> None:
        """Apply an adopted decision, without a model, to prepared sections."""
        if sections:
            self.updater(sections, faults).apply(decision, sections)

    def updater(self, sections: Iterable[int], faults: FaultScript) -> Updater:
        """Return the updater of these sections."""
        return Updater(
            self.control,
            self.undo,
            self.arenas,
            {k: SectionOptimizer(self._job, self.arenas[k]) for k in sections},
            self._job.clip_grad_norm,
            faults,
            scales_loss=self._scales_loss,
        )
