"""The sections of a stage as one rank has them: held, or copied from another one in its VM.

Where ranks share the state of their stage, each holds some of its sections and computes with
copies of the others (ZeRO-1, Rajbhandari et al. 2020, section 5.1). Gradients go to the rank
that holds a section, its next weights come from there. Copies are memory of this process, which
ends with the generation: agreement, handover and checkpoints know holders alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from spottrain.pipeline.comm.device_group import DeviceGroups
from spottrain.pipeline.comm.groups import Connections
from spottrain.pipeline.model.stage import AUTOCAST_TYPES
from spottrain.pipeline.state.agreement import MinibatchDecision
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.context import WorkerContext
from spottrain.pipeline.train.sums import Sharing, wait_for
from spottrain.pipeline.train.working import WorkingSection, lowered_types
from spottrain.wire.plan import Plan


@dataclass(frozen=True, slots=True)
class Network:
    """A rank's connections to its peers in one generation."""

    store: Store
    connections: Connections
    groups: Mapping[tuple[int, ...], dist.ProcessGroup]
    """Of the host, those that this rank is in."""
    device_groups: DeviceGroups


class StageSections:
    """The sections that a rank runs in one generation.

    Args:
        context: The worker's.
        plan: Of the generation.
        rank: Of this worker.
        network: To its peers.
    """

    def __init__(self, context: WorkerContext, plan: Plan, rank: int, network: Network) -> None:
        self._context, self._network = context, network
        self._sharers = sharers = plan.sharers_of(rank)
        running = plan.sections_of(rank % plan.pipeline_depth)
        self._places = {
            k: next(sharers.index(one) for one in plan.holders_of(k) if one in sharers)
            for k in (running if plan.shared_state else ())
        }
        """Of the rank that holds each section, among the sharers."""
        self._types = {k: self._types_of(k) for k in self._places}
        memory = context.memory
        self.held = {k: memory.arenas[k] for k in plan.held_by(rank)}
        """Those whose committed state this rank has; perhaps none."""
        self.all: Mapping[int, SectionArena] = {
            k: self.held[k] if k in self.held else memory.borrow(k, self._types[k]) for k in running
        }
        """All that it runs."""
        self.sharing: Sharing | None = None
        """How sums come to those who hold a section; ``None``: all need them."""
        if plan.shared_state:
            across = {k: self._group(plan.holders_of(k)) for k in self.held}
            self.sharing = Sharing(self._group(sharers), self._places, across)

    def _types_of(self, section: int) -> Mapping[str, torch.dtype]:
        """Return the types of copies that are not those of the parameters."""
        loaded = self._context.loaded
        if self._context.device.is_host:
            return {}
        own = {spec.name: spec.dtype for spec in loaded.specs[section]}
        return lowered_types(own, AUTOCAST_TYPES[loaded.spec.precision], loaded.layout.matrices)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        on_device = self._network.device_groups.of(ranks)
        return self._network.groups.get(ranks) if on_device is None else on_device

    @property
    def num_copied_bytes(self) -> int:
        """Bytes of the sections that it does not hold."""
        return sum(arena.num_bytes for k, arena in self.all.items() if k not in self.held)

    def begin(self, sections: Sequence[WorkingSection], step: int, origin: int) -> None:
        """Give and get all of each section that tasks need, in the agreed state."""
        if (group := self._network.groups.get(self._sharers)) is None or not self._places:
            return
        for k, arena in self.all.items():
            dist.broadcast(arena.numbers.contents, group=group, group_src=self._places[k])
            if k not in self.held:
                arena.set_version(step, origin)
        self._give(sections, {k: arena.parameters for k, arena in self.all.items()})

    def follow(self, sections: Sequence[WorkingSection], decision: MinibatchDecision) -> None:
        """Give and get the next version of each section, which all who hold one have applied.

        Raises:
            RuntimeError: A peer is gone. What this rank holds is committed.
        """
        if self._network.groups.get(self._sharers) is None or not self._places:
            return
        scaled = self._context.loaded.spec.precision == "fp16"
        for k, arena in self.all.items():
            if k not in self.held:
                arena.numbers.update(
                    overflow=decision.overflow, changes=decision.changes, scaled=scaled
                )
                arena.set_version(decision.step + 1, decision.generation)
        if decision.changes:
            self._give(sections, {k: arena.gradients for k, arena in self.all.items()})

    def _give(self, sections: Sequence[WorkingSection], names: Mapping[int, Iterable[str]]) -> None:
        groups, device = self._network.device_groups, self._context.device
        with self._context.activity.waiting(), groups.bounded():
            for section in sections:
                section.wait()
            works = [
                self._broadcast(section, name)
                for section in sections
                for name in names[section.arena.section]
            ]
            for work, arrived, target in works:
                wait_for([work])
                if arrived is not target:
                    device.wait(device.upload(arrived, target))
            device.synchronise()
            groups.check()

    def _broadcast(
        self, section: WorkingSection, name: str
    ) -> tuple[dist.Work, torch.Tensor, torch.Tensor]:
        """Begin to send or receive a parameter; return where it arrives, and where it goes."""
        device, k = self._context.device, section.arena.section
        target = section.parameters[name]
        sends, dtype = k in self.held, self._types[k].get(name, target.dtype)
        tensor = target.to(dtype) if sends else target
        on_device = self._network.device_groups.of(self._sharers)
        if on_device is None and not device.is_host:
            tensor = (
                device.finish(device.download(tensor))
                if sends
                else device.allocate_host(tensor.shape, dtype)
            )
        group = self._group(self._sharers)
        work = dist.broadcast(tensor, group=group, group_src=self._places[k], async_op=True)
        assert work is not None
        return work, tensor, tensor if sends else target
