"""All the memory of one slot: its sections, its undo slot, its decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.state.agreement import MinibatchDecision, SectionRecord
from spottrain.pipeline.state.arena import (
    ControlBlock,
    MemoryHolder,
    SectionArena,
    UndoSlot,
    section_name,
)
from spottrain.pipeline.state.update import SectionOptimizer, Updater


class SlotMemory:
    """Memory that a worker finds when it is forked, and leaves to its successor.

    An update that a predecessor did not finish is undone first.

    Args:
        holder: Gives the memory.
        job: Builds optimizers.
        specs: The parameters of every section of the model.
    """

    def __init__(
        self,
        holder: MemoryHolder,
        job: TrainingJob,
        specs: Sequence[tuple[ParameterSpec, ...]],
    ) -> None:
        self._holder = holder
        self._job = job
        self._specs = specs
        self._undo: UndoSlot | None = None
        self.arenas: dict[int, SectionArena] = {}
        held = holder.names()
        self.control = ControlBlock(holder)
        self.hold(k for k in range(len(specs)) if section_name(k) in held)
        self.undo_unfinished()

    @property
    def undo(self) -> UndoSlot:
        """Room for the largest section held."""
        if self._undo is None:
            largest = max(a.contents.numel() for a in self.arenas.values())
            self._undo = UndoSlot(self._holder, largest)
        return self._undo

    @property
    def num_bytes(self) -> int:
        """Bytes of all sections held, and of the undo slot."""
        sizes = [arena.num_bytes for arena in self.arenas.values()]
        return sum(sizes) + max(sizes, default=0)

    def hold(self, sections: Iterable[int]) -> None:
        """Make room for sections that are not held yet."""
        for section in sections:
            if section not in self.arenas:
                specs = self._specs[section]
                self.arenas[section] = SectionArena(self._holder, section, specs)
                self._undo = None

    def keep_only(self, sections: Iterable[int]) -> None:
        """Release all other sections."""
        for section in set(self.arenas) - set(sections):
            del self.arenas[section]
            self._holder.release(section_name(section))

    def undo_unfinished(self) -> None:
        """Undo an update that a death or an error has interrupted."""
        if (section := self.control.undo_section) is not None:
            if section in self.arenas:
                self.undo.restore(self.arenas[section])
            self.control.undo_section = None

    def records(self) -> tuple[SectionRecord, ...]:
        """Return the records of all sections held."""
        return tuple(self.arenas[k].record() for k in sorted(self.arenas))

    def apply(
        self, decision: MinibatchDecision, sections: Sequence[int], faults: FaultScript
    ) -> None:
        """Apply an adopted decision, without a model, to prepared sections."""
        if sections:
            optimizers = {
                k: SectionOptimizer(
                    self._job, self.arenas[k], _with_gradients(self.arenas[k])
                )
                for k in sections
            }
            self.updater(optimizers, faults).apply(decision, sections)

    def updater(
        self, optimizers: Mapping[int, SectionOptimizer], faults: FaultScript
    ) -> Updater:
        """Return the updater of these sections."""
        return Updater(
            self.control,
            self.undo,
            self.arenas,
            optimizers,
            self._job.clip_grad_norm,
            faults,
        )


def _with_gradients(arena: SectionArena) -> list[tuple[str, nn.Parameter]]:
    parameters = []
    for name, gradient in arena.gradients.items():
        parameter = nn.Parameter(arena.parameters[name])
        parameter.grad = gradient
        parameters.append((name, parameter))
    return parameters
