"""Sums gradients over virtual nodes, replicas, and the sections that share a parameter.

``fast``: every replica adds up what it computes, a ring all-reduce adds up replicas.
``exact``: the sum over virtual nodes in their order, 0 + g0 + g1 + …, regardless of the
replica that computed them; so the result has the same bits for every P x D. The running
sum travels from replica to replica; all but the first keep the gradients of each
virtual node until it comes. Gradients are those of sums of losses: nothing is averaged
before the apply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.comm.ranks import tied_ranks
from spottrain.pipeline.model.job import NamedParameters
from spottrain.pipeline.state.arena import SectionArena
from spottrain.wire.model import Plan, Reduction, TiedParameter


class GradientReduction:
    """The gradients of one stage from the first backward to the last sum.

    Args:
        parameters: Of each section; their ``grad`` is read and set.
        arenas: Memory of the sums.
        replicas: Ranks that hold the same stage, in the order of replicas.
        group: The group of ``replicas``; ``None`` if there is one only.
        replica: Index of this replica.
        tracker: Counts the gradients that are kept apart.
    """

    def __init__(
        self,
        parameters: Mapping[int, NamedParameters],
        arenas: Sequence[SectionArena],
        replicas: tuple[int, ...],
        group: dist.ProcessGroup | None,
        replica: int,
        tracker: TensorTracker,
    ) -> None:
        self._tracker = tracker
        self._replicas = replicas
        self._group = group
        self._replica = replica
        self._sums = [run for arena in arenas for run in arena.gradient_runs]
        self._pairs = [
            (parameter, arena.gradients[name])
            for arena in arenas
            for name, parameter in parameters[arena.section]
            if name in arena.gradients
        ]

    def begin(self) -> None:
        """Clear the gradients of the mini-batch before."""
        for total in self._sums:
            total.zero_()

    def add(self, virtual_node: int) -> None:
        """Take the gradients that the backward of ``virtual_node`` has left."""
        raise NotImplementedError

    def reduce(self, losses: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Sum over replicas; afterwards the arenas hold the whole mini-batch's sum.

        Args:
            losses: Loss sum and weight of every virtual node computed here.

        Returns:
            Loss sum and weight of the whole mini-batch (zeros but on the last stage).
        """
        raise NotImplementedError

    def attach(self) -> None:
        """Let every parameter's ``grad`` be the arena's sum, as the optimizer wants."""
        for parameter, total in self._pairs:
            parameter.grad = total


class FastReduction(GradientReduction):
    """Backwards add into the arenas; a ring all-reduce adds up replicas."""

    def begin(self) -> None:
        """Clear the gradients of the mini-batch before."""
        super().begin()
        self.attach()

    def add(self, virtual_node: int) -> None:
        """Do nothing: autograd has added in place."""

    def reduce(self, losses: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Sum over replicas by all-reduce."""
        totals = _fold(torch.zeros(2, dtype=torch.float64), losses)
        if self._group is not None:
            works = [
                dist.all_reduce(total, group=self._group, async_op=True)
                for total in (*self._sums, totals)
            ]
            for work in works:
                assert work is not None
                work.wait()
        return float(totals[0]), float(totals[1])


class ExactReduction(GradientReduction):
    """Adds gradients in the order of virtual nodes, regardless of the replica."""

    def begin(self) -> None:
        """Clear the gradients of the mini-batch before."""
        super().begin()
        self._waiting: list[list[torch.Tensor | None]] = []
        for parameter, _ in self._pairs:
            parameter.grad = None

    def add(self, virtual_node: int) -> None:
        """Add to the sum in the first replica; elsewhere keep until the sum comes."""
        gradients = [parameter.grad for parameter, _ in self._pairs]
        for parameter, _ in self._pairs:
            parameter.grad = None
        for gradient in gradients:
            if gradient is not None:
                self._tracker.adopt(gradient)
        if self._replica == 0:
            self._add(gradients)
        else:
            self._waiting.append(gradients)

    def reduce(self, losses: Sequence[tuple[float, float]]) -> tuple[float, float]:
        """Pass the running sum through the replicas, and back to all of them."""
        totals = torch.zeros(2, dtype=torch.float64)
        if self._replica > 0:
            for total in (*self._sums, totals):
                dist.recv(total, self._replicas[self._replica - 1], group=self._group)
        for gradients in self._waiting:
            self._add(gradients)
        self._waiting.clear()
        _fold(totals, losses)
        if self._group is not None:
            if self._replica + 1 < len(self._replicas):
                following = self._replicas[self._replica + 1]
                for total in (*self._sums, totals):
                    dist.send(total, following, group=self._group)
            for total in (*self._sums, totals):
                dist.broadcast(total, self._replicas[-1], group=self._group)
        return float(totals[0]), float(totals[1])

    def _add(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for (_, total), gradient in zip(self._pairs, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient)


REDUCTIONS: Mapping[Reduction, type[GradientReduction]] = {
    "fast": FastReduction,
    "exact": ExactReduction,
}


def _fold(totals: torch.Tensor, losses: Sequence[tuple[float, float]]) -> torch.Tensor:
    """Add losses and weights to ``totals``, one virtual node after the other."""
    for loss_sum, weight in losses:
        totals[0] += loss_sum
        totals[1] += weight
    return totals


def sum_tied(
    plan: Plan,
    replica: int,
    ties: Sequence[TiedParameter],
    arenas: Mapping[int, SectionArena],
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
) -> None:
    """Give every copy of a tied parameter the sum of all copies' gradients.

    Copies are added in the order of their sections, also when one rank has them all.
    """
    for tied in ties:
        ranks = tied_ranks(plan, tied, replica)
        mine = {k: arenas[k].gradients[tied.name] for k in tied.sections if k in arenas}
        if not mine:
            continue
        like = next(iter(mine.values()))
        total = torch.zeros_like(like)
        for section in tied.sections:
            copy = mine[section] if section in mine else torch.empty_like(like)
            if len(ranks) > 1:
                owner = replica * plan.pipeline_depth + plan.stage_of(section)
                dist.broadcast(copy, owner, group=groups[ranks])
            total.add_(copy)
        for copy in mine.values():
            copy.copy_(total)
