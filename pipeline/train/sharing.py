"""The sections of a stage as one rank has them: held, or copied from another one in its VM.

Where ranks share the state of their stage, each holds some of its sections and computes with
copies of the others (ZeRO-1, Rajbhandari et al. 2020, section 5.1), or of its parts of all of
them. Gradients go to the rank that holds a section, its next weights come from there. Copies are
memory of this process, which ends with the generation: agreement, handover and checkpoints know
holders alone, and whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from spottrain.pipeline.comm.device_group import DeviceGroups
from spottrain.pipeline.comm.groups import Connections
from spottrain.pipeline.state.agreement import MinibatchDecision
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.context import WorkerContext
from spottrain.pipeline.train.sums import Sharing, wait_for
from spottrain.pipeline.train.working import Run, WorkingSection
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
        self._parts = [plan.tensor_ranks(one).index(one) for one in sharers]
        """Of the matrices, that of each sharer."""
        memory = context.memory
        self.held = {k: memory.arenas[k] for k in plan.held_by(rank)}
        """Those whose committed state this rank has; perhaps none."""
        self.all: Mapping[int, SectionArena] = {
            k: self.held[k] if k in self.held else memory.borrow(k) for k in running
        }
        """All that it runs."""
        self.sharing: Sharing | None = None
        """How sums come to those who hold a section; ``None``: all need them."""
        if plan.shared_state:
            across = {k: self._group(plan.holders_of(k)) for k in self.held}
            self.sharing = Sharing(self._group(sharers), self._places, across)

    @property
    def _sums_on_host(self) -> bool:
        """Whether its ranks have no group on their devices."""
        return self._network.device_groups.of(self._sharers) is None

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        on_device = self._network.device_groups.of(ranks)
        return self._network.groups.get(ranks) if on_device is None else on_device

    def begin(self, sections: Sequence[WorkingSection], step: int, origin: int) -> None:
        """Give and get all of each section that tasks need, in the agreed state."""
        if (group := self._network.groups.get(self._sharers)) is None or not self._places:
            return
        for k, arena in self.all.items():
            dist.broadcast(arena.numbers.contents, group=group, group_src=self._places[k])
            if k not in self.held:
                arena.set_version(step, origin)
        self._give(sections, frozen=True)

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
            self._give(sections, frozen=False)

    def _give(self, sections: Sequence[WorkingSection], *, frozen: bool) -> None:
        """Give and get parameters, one section after the other, so that no more than one is there
        as it travels.

        Args:
            sections: All that this rank runs.
            frozen: Whether to give those that no update changes, too.
        """
        groups, device = self._network.device_groups, self._context.device
        with self._context.activity.waiting(), groups.bounded():
            for section in sections:
                section.wait()
                runs = [one for one in section.parameter_runs if one.trained or frozen]
                for work, arriving, target in [self._share(section, run) for run in runs]:
                    wait_for([work])
                    if target is None or arriving is target:
                        continue
                    if self._sums_on_host:
                        device.wait(device.upload(arriving, target))
                    else:
                        target.copy_(arriving)
            device.synchronise()
            groups.check()

    def _share(
        self, section: WorkingSection, run: Run
    ) -> tuple[dist.Work, torch.Tensor, torch.Tensor | None]:
        """Begin to send or receive a run of parameters; return where it arrives, and where it
        goes."""
        device, on_host = self._context.device, self._sums_on_host
        group, place = self._group(self._sharers), self._places[section.arena.section]
        rows = section.outgoing(run, on_host=on_host) if section.arena.is_held else None
        target = arriving = section.received(run)
        if rows is not None and not run.divided:
            arriving = rows[0]
        elif arriving is None or (on_host and not device.is_host):
            arriving = device.allocate_host((run.size,), run.dtype)
        # Bytes: gloo does not know all types.
        if run.divided:
            parts = None if rows is None else [rows[i].view(torch.uint8) for i in self._parts]
            work = dist.scatter(
                arriving.view(torch.uint8), parts, group=group, group_src=place, async_op=True
            )
        else:
            work = dist.broadcast(
                arriving.view(torch.uint8), group=group, group_src=place, async_op=True
            )
        assert work is not None
        return work, arriving, target
