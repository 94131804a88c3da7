"""Sums gradients over virtual nodes, replicas, and the sections that share a parameter.

``fast``: autograd adds up in place what a replica computes, an all-reduce adds up
replicas. ``exact``: each virtual node's gradient becomes integers as soon as autograd
has it, and integers are summed in any order (``base.fixed_point``); so the result has
the same bits for every P x D, and no gradient waits for another. Gradients are those of
sums of losses, fp16's loss scale taken out: nothing is averaged before the apply.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.comm.device_group import DeviceGroups
from spottrain.pipeline.comm.ranks import tied_ranks
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.model.job import NamedParameters
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.update import GradientFit
from spottrain.pipeline.train.sums import (
    Replicas,
    SectionIntegers,
    SectionRuns,
    SectionSums,
    Sum,
    wait_for,
)
from spottrain.pipeline.train.working import WorkingSection
from spottrain.wire.model import Reduction, TiedParameter
from spottrain.wire.plan import Plan

Losses = Sequence[Sequence[float]]
"""``LossSums.values`` of every micro-batch of a replica; empty but on the last stage."""


class GradientReduction:
    """The gradients of one stage from the first backward to the last sum.

    Args:
        kind: How the gradients of a section are added up.
        parameters: Of each section, on the device.
        sections: Where sums are kept, and where they go.
        replicas: The ranks of the stage.
        device: What the worker computes on.
        tracker: Counts memory beside the sections'.
    """

    def __init__(
        self,
        kind: Callable[..., SectionSums],
        parameters: Mapping[int, NamedParameters],
        sections: Sequence[WorkingSection],
        replicas: Replicas,
        device: Device,
        tracker: TensorTracker,
    ) -> None:
        self._replicas, self._device = replicas, device
        self._sums = [kind(parameters, section, replicas, device) for section in sections]
        # Backwards come to the last section first.
        self._turns = replicas.in_turns(self._sums[::-1])
        for one in self._sums:
            if one.total is not None:
                tracker.adopt(one.total)

    def begin(self, step: int, attempt: int, scale_exponent: int) -> None:
        """Prepare for the backwards of a mini-batch.

        Args:
            step: The mini-batch.
            attempt: From 0; another one only follows gradients out of range.
            scale_exponent: Losses of this mini-batch are multiplied by two to it.
        """
        for one in self._sums:
            one.begin(step, attempt, scale_exponent, self._replicas)

    def reduce(self) -> Mapping[int, GradientFit]:
        """Sum over replicas; afterwards the arenas of sections that this rank holds have the
        whole mini-batch's sum.

        Integers out of range are summed, too, and their sums of no use: to wait for what
        all ranks have found would cost each mini-batch more.
        """
        device = self._device
        for one in self._sums[::-1]:
            one.completion.force()
        found = [one.peaks for one in self._sums if one.peaks is not None]
        peaks = device.download(torch.cat(found)) if found else None
        first, *others = self._turns
        begun = self._begin(first)  # beside what comes next
        fits = self._settle(
            torch.zeros(0, dtype=torch.int64)
            if peaks is None
            else fixed_point.magnitudes(device.finish(peaks))
        )
        self._finish(begun)
        for turn in others:
            self._finish(self._begin(turn))
        return fits

    def _begin(self, turn: Sequence[SectionSums]) -> list[tuple[SectionSums, Sum]]:
        """Begin to sum sections over the ranks that share state, or over all."""
        replicas, device = self._replicas, self._device
        return [(one, replicas.begin_sum(one.number, one.addends(), device)) for one in turn]

    def _finish(self, begun: list[tuple[SectionSums, Sum]]) -> None:
        """Let the arenas of sections that this rank holds have the sums over all ranks."""
        replicas = self._replicas
        if replicas.sharing is not None:
            for _, under_way in begun:
                under_way.wait()
            begun = [pair for pair in begun if replicas.holds(pair[0].number)]
            for one, under_way in begun:
                under_way.works += replicas.complete_sum(one.number, under_way.rows)
        for one, under_way in begun:
            one.take_sum(under_way.wait())
        for one, _ in begun:
            one.arrive()

    def _settle(self, magnitudes: torch.Tensor) -> Mapping[int, GradientFit]:
        """Return whether gradients fit, given the magnitudes of this rank's; note which
        gradients no backward of any rank has given."""
        given = itertools.chain.from_iterable(one.given for one in self._sums)
        both = torch.cat([magnitudes, torch.tensor([*given], dtype=torch.int64)])
        wait_for(self._replicas.begin_maximum(both))
        rest = iter(both[: len(magnitudes)].tolist())
        flags = iter(both[len(magnitudes) :].tolist())
        fits, nodes = {}, self._replicas.num_virtual_nodes
        for one in self._sums:
            arena = one.section.arena
            arena.lacking = frozenset(name for name in arena.gradients if not next(flags))
            count = 0 if one.peaks is None else one.peaks.numel()
            fits[arena.section] = one.settle(list(itertools.islice(rest, count)), nodes)
        return fits

    def total_loss(self, losses: Losses) -> list[float]:
        """Return the sums of the mini-batch, added up in the order of virtual nodes, whoever
        computed them; zeros but on the last stage."""
        replicas, width = self._replicas, self._replicas.num_sums
        if not replicas.has_loss:
            return [0.0] * width
        table = torch.zeros(replicas.num_virtual_nodes, width, dtype=torch.float64)
        mine = [nodes.start for nodes in replicas.microbatches]
        if replicas.shards.is_first:
            table[mine] = torch.tensor(losses, dtype=torch.float64)
        replicas.sum([table])
        return add_up(table.tolist(), width)

    def close(self) -> None:
        """Let go of the parameters."""
        for one in self._sums:
            one.close()


REDUCTIONS: Mapping[Reduction, Callable[..., GradientReduction]] = {
    "fast": functools.partial(GradientReduction, SectionRuns),
    "exact": functools.partial(GradientReduction, SectionIntegers),
}


def add_up(rows: Iterable[Sequence[float]], width: int) -> list[float]:
    """Return the sums of ``width`` columns, one row added after the other."""
    totals = [0.0] * width
    for row in rows:
        totals = [total + one for total, one in zip(totals, row, strict=True)]
    return totals


def sum_tied(
    plan: Plan,
    pipeline: int,
    ties: Sequence[TiedParameter],
    arenas: Mapping[int, SectionArena],
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    device_groups: DeviceGroups,
) -> None:
    """Give every copy of a tied parameter the sum of all copies' gradients.

    Copies are added in the order of their sections, also when one rank has them all: that one
    adds them up where they are. Those of several ranks pass through the hosts' memory unless
    their devices have a group.
    """
    for tied in ties:
        ranks = tied_ranks(plan, tied, pipeline)
        mine = {k: arenas[k] for k in tied.sections if k in arenas}
        if not mine:
            continue
        moved, on_devices = len(ranks) > 1, device_groups.of(ranks)
        staged = moved and on_devices is None
        own = {k: arena.gradients[tied.name] for k, arena in mine.items()}
        copies = {k: _on_host(mine[k], one) for k, one in own.items()} if staged else own
        first = min(mine)
        total = _zeros_like(mine[first], own[first]) if staged else torch.zeros_like(own[first])
        for section in tied.sections:
            copy = copies[section] if section in copies else torch.empty_like(total)
            if moved:
                holder = next(rank for rank in plan.holders_of(section) if rank in ranks)
                group = groups[ranks] if on_devices is None else on_devices
                dist.broadcast(copy, group=group, group_src=ranks.index(holder))
            total.add_(copy)
        given = any(tied.name not in arena.lacking for arena in mine.values())
        if moved:
            flag = torch.tensor([given])
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=groups[ranks])
            given = bool(flag)
        for k, arena in mine.items():
            arena.lacking -= {tied.name} if given else set()
            target = own[k]
            if staged and arena.device is not None:
                arena.device.wait(arena.device.upload(total, target))
            else:
                target.copy_(total)


def _zeros_like(arena: SectionArena, gradient: torch.Tensor) -> torch.Tensor:
    """Return zeros like a gradient, in host memory from which transfers go.

    From any other memory the host would wait for the stream ("API synchronization
    behavior" of the CUDA runtime).
    """
    if arena.device is None:
        return torch.zeros_like(gradient)
    return arena.device.allocate_host(gradient.shape, gradient.dtype).zero_()


def _on_host(arena: SectionArena, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, or a copy of it in the host's memory."""
    if arena.device is None:
        return gradient
    return arena.device.finish(arena.device.download(gradient))
