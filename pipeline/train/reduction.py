"""Sums gradients over virtual nodes, replicas, and the sections that share a parameter.

``fast``: autograd adds up in place what a replica computes, an all-reduce adds up
replicas. ``exact``: each virtual node's gradient becomes integers as soon as autograd
has it, and integers are summed in any order (``base.fixed_point``); so the result has
the same bits for every P x D, and no gradient waits for another. Gradients are those of
sums of losses, fp16's loss scale taken out: nothing is averaged before the apply.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.comm.ranks import tied_ranks
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.model.job import NamedParameters
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.update import GradientFit
from spottrain.pipeline.train.working import WorkingSection
from spottrain.wire.model import Plan, Reduction, TiedParameter

Losses = Sequence[Sequence[float]]
"""``LossSums.values`` of every virtual node of a replica; empty but on the last stage."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold the same stage."""

    group: dist.ProcessGroup | None = None
    """Sums tensors of the host; ``None`` if there is one rank only."""
    device_group: dist.ProcessGroup | None = None
    """Sums tensors of the device, where there is such a group."""
    virtual_nodes: range = range(1)
    """Of this replica."""
    num_virtual_nodes: int = 1
    """Of a mini-batch."""
    has_loss: bool = True
    """True on the last stage."""
    num_metrics: int = 0
    """What the loss measures besides the loss."""

    @property
    def num_sums(self) -> int:
        """How many sums ``LossSums.values`` has."""
        return 2 + 2 * self.num_metrics

    def sum(self, tensors: Iterable[torch.Tensor], *, on_device: bool = False) -> None:
        """Sum every tensor over all ranks, in place."""
        self._reduce(tensors, dist.ReduceOp.SUM, on_device)

    def maximum(self, tensor: torch.Tensor) -> None:
        """Take the maximum over all ranks of a tensor of the host, in place."""
        self._reduce([tensor], dist.ReduceOp.MAX, on_device=False)

    def _reduce(
        self,
        tensors: Iterable[torch.Tensor],
        operation: dist.ReduceOp.RedOpType,
        on_device: bool,
    ) -> None:
        group = self.device_group if on_device else self.group
        if group is None:
            return
        works = [
            dist.all_reduce(tensor, operation, group=group, async_op=True)
            for tensor in tensors
        ]
        for work in works:
            assert work is not None
            work.wait()


class GradientReduction:
    """The gradients of one stage from the first backward to the last sum.

    Args:
        parameters: Of each section, on the device.
        sections: Where sums are kept, and where they go.
        replicas: The ranks of the stage.
        device: What the worker computes on.
        tracker: Counts memory beside the sections'.
    """

    def __init__(
        self,
        parameters: Mapping[int, NamedParameters],
        sections: Sequence[WorkingSection],
        replicas: Replicas,
        device: Device,
        tracker: TensorTracker,
    ) -> None:
        self._parameters = parameters
        self._sections = sections
        self._replicas = replicas
        self._device = device
        self._tracker = tracker
        self._set_up()

    def _set_up(self) -> None:
        """Hook into the parameters."""
        raise NotImplementedError

    def begin(self, attempt: int, scale_exponent: int) -> None:
        """Prepare for the backwards of a mini-batch.

        Args:
            attempt: From 0; another one only follows gradients out of range.
            scale_exponent: Losses of this mini-batch are multiplied by two to it.
        """
        raise NotImplementedError

    def reduce(self) -> Mapping[int, GradientFit]:
        """Sum over replicas; afterwards the arenas hold the whole mini-batch's sum."""
        raise NotImplementedError

    def total_loss(self, losses: Losses) -> list[float]:
        """Return the sums of the mini-batch; zeros but on the last stage."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the parameters."""


class FastReduction(GradientReduction):
    """Backwards add up in place; an all-reduce adds up replicas."""

    def _set_up(self) -> None:
        # Autograd adds in place to a gradient of the parameter's own type.
        self._in_place: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._hooks = []
        for section in self._sections:
            for name, parameter in self._parameters[section.arena.section]:
                if (total := section.gradients.get(name)) is None:
                    continue
                if total.dtype is parameter.dtype:
                    self._in_place.append((parameter, total))
                else:
                    hook = partial(_add_converted, total)
                    self._hooks.append(add_hook(parameter, hook))

    def begin(self, attempt: int, scale_exponent: int) -> None:
        """Clear the sums of the mini-batch before."""
        self._scale_exponent = scale_exponent
        for section in self._sections:
            for run in section.gradient_runs:
                run.zero_()
        for parameter, total in self._in_place:
            parameter.grad = total

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def reduce(self) -> Mapping[int, GradientFit]:
        """Sum over replicas by all-reduce."""
        device, replicas, sections = self._device, self._replicas, self._sections
        runs = [r for section in sections for r in section.gradient_runs]
        for run in runs if self._scale_exponent else ():
            run.mul_(2.0**-self._scale_exponent)
        replicas.sum(runs, on_device=True)
        targets = [r for section in sections for r in section.arena.gradient_runs]
        if any(section.is_copy for section in sections):
            moving = [device.download(r, t) for r, t in zip(runs, targets, strict=True)]
            for transfer in moving:
                device.finish(transfer)
        if replicas.group is not None and replicas.device_group is None:
            if self._on_host(sections):
                replicas.sum(targets)
            else:
                staged = [device.finish(device.download(run)) for run in targets]
                replicas.sum(staged)
                for source, run in zip(staged, targets, strict=True):
                    device.wait(device.upload(source, run))
        return {section.arena.section: GradientFit() for section in sections}

    def total_loss(self, losses: Losses) -> list[float]:
        """Add up in the order of virtual nodes here, then over replicas."""
        totals = torch.tensor(
            add_up(losses, self._replicas.num_sums), dtype=torch.float64
        )
        if self._replicas.has_loss:
            self._replicas.sum([totals])
        return list(totals.tolist())

    @staticmethod
    def _on_host(sections: Iterable[WorkingSection]) -> bool:
        return all(section.arena.device is None for section in sections)


class ExactReduction(GradientReduction):
    """Sums integers, which any order of additions leaves the same."""

    def _set_up(self) -> None:
        self._sums = [
            _SectionSum(self._parameters, section, self._device)
            for section in self._sections
        ]
        for one in self._sums:
            self._tracker.adopt(one.total)

    def begin(self, attempt: int, scale_exponent: int) -> None:
        """Clear the sums, and choose the exponents of this attempt."""
        nodes = self._replicas.num_virtual_nodes
        for one in self._sums:
            one.begin(attempt, scale_exponent, nodes)

    def reduce(self) -> Mapping[int, GradientFit]:
        """Sum integers over replicas, then round sums to the gradients' types."""
        device, nodes = self._device, self._replicas.num_virtual_nodes
        peaks = device.download(torch.cat([one.peaks for one in self._sums]))
        magnitudes = fixed_point.magnitudes(device.finish(peaks))
        self._replicas.maximum(magnitudes)
        rest, fits = iter(magnitudes.tolist()), {}
        for one in self._sums:
            found = list(itertools.islice(rest, one.peaks.numel()))
            fits[one.section.arena.section] = one.settle(found, nodes)
        if any(not fit.in_range for fit in fits.values()):
            return fits
        replicas = self._replicas
        totals = [one.total for one in self._sums]
        replicas.sum(totals, on_device=True)
        staged = replicas.group is not None and replicas.device_group is None
        if staged:
            moving = [device.download(total) for total in totals]
            totals = [device.finish(transfer) for transfer in moving]
            replicas.sum(totals)
        for one, total in zip(self._sums, totals, strict=True):
            one.write(total, on_host=staged or device.is_host)
        return fits

    def total_loss(self, losses: Losses) -> list[float]:
        """Add up in the order of virtual nodes, whoever computed them."""
        replicas, width = self._replicas, self._replicas.num_sums
        if not replicas.has_loss:
            return [0.0] * width
        table = torch.zeros(replicas.num_virtual_nodes, width, dtype=torch.float64)
        mine = replicas.virtual_nodes
        table[mine.start : mine.stop] = torch.tensor(losses, dtype=torch.float64)
        replicas.sum([table])
        return add_up(table.tolist(), width)

    def close(self) -> None:
        """Take the hooks away."""
        for one in self._sums:
            one.close()


def add_hook(
    parameter: nn.Parameter, take: Callable[[torch.Tensor], None]
) -> RemovableHandle:
    """Have ``take`` called whenever a backward has completed a parameter's gradient."""
    handle: RemovableHandle
    handle = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return handle


def _add_converted(total: torch.Tensor, parameter: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    total.add_(gradient)


class _SectionSum:
    """The integers of one section: its gradients one after the other."""

    def __init__(
        self,
        parameters: Mapping[int, NamedParameters],
        section: WorkingSection,
        device: Device,
    ) -> None:
        self.section = section
        self._device = device
        gradients = section.arena.gradients
        self._targets = list(gradients.values())
        trained = dict(parameters[section.arena.section])
        sizes = [target.numel() for target in self._targets]
        where = device.torch_device
        self.total = torch.zeros(sum(sizes), dtype=torch.int64, device=where)
        self.peaks = torch.zeros(len(sizes), dtype=torch.float64, device=where)
        """Largest absolute value of every gradient, of all virtual nodes so far."""
        self._parts = torch.split(self.total, sizes)
        self._hooks = [
            add_hook(trained[name], partial(self._add, number))
            for number, name in enumerate(gradients)
        ]

    def begin(self, attempt: int, scale_exponent: int, virtual_nodes: int) -> None:
        self._scale_exponent = scale_exponent
        self._used = [
            fixed_point.exponent(committed, attempt, virtual_nodes, target.dtype)
            for committed, target in zip(
                self.section.arena.numbers.exponents, self._targets, strict=True
            )
        ]
        self.total.zero_()
        self.peaks.zero_()

    def _add(self, number: int, parameter: torch.Tensor) -> None:
        """Take a virtual node's gradient as soon as it is complete."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        here = self.peaks[number]
        torch.maximum(here, fixed_point.peak(gradient), out=here)
        used = self._used[number] - self._scale_exponent
        fixed_point.add_quantised(self._parts[number], gradient, used)

    def settle(self, magnitudes: Sequence[int], virtual_nodes: int) -> GradientFit:
        """Prepare the next exponents; return what the magnitudes say."""
        unscaled = [
            m if abs(m) == fixed_point.NOT_FINITE else m - self._scale_exponent
            for m in magnitudes
        ]
        numbers = self.section.arena.numbers
        numbers.prepare(
            [
                fixed_point.next_exponent(committed, m, virtual_nodes)
                for committed, m in zip(numbers.exponents, unscaled, strict=True)
            ]
        )
        return GradientFit(
            finite=fixed_point.NOT_FINITE not in unscaled,
            in_range=all(
                fixed_point.in_range(m, used, virtual_nodes)
                for m, used in zip(unscaled, self._used, strict=True)
            ),
        )

    def write(self, total: torch.Tensor, *, on_host: bool) -> None:
        """Round a sum into the arena's gradients.

        Args:
            total: As ``self.total``, summed over replicas.
            on_host: Whether it is in the host's memory.
        """
        device, to_host = self._device, self.section.arena.device is None
        sizes = [target.numel() for target in self._targets]
        transfers = []
        for part, used, target in zip(
            torch.split(total, sizes), self._used, self._targets, strict=True
        ):
            if on_host == to_host:
                fixed_point.dequantise(part, used, target)
            elif to_host:
                rounded = torch.empty_like(target, device=device.torch_device)
                fixed_point.dequantise(part, used, rounded)
                transfers.append(device.download(rounded, target))
            else:
                rounded = device.allocate_host(target.shape, target.dtype)
                fixed_point.dequantise(part, used, rounded)
                device.wait(device.upload(rounded, target))
        for transfer in transfers:
            device.finish(transfer)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


REDUCTIONS: Mapping[Reduction, Callable[..., GradientReduction]] = {
    "fast": FastReduction,
    "exact": ExactReduction,
}


def add_up(rows: Iterable[Sequence[float]], width: int) -> list[float]:
    """Return the sums of ``width`` columns, one row added after the other."""
    totals = [0.0] * width
    for row in rows:
        totals = [total + one for total, one in zip(totals, row, strict=True)]
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
        mine = {k: arenas[k] for k in tied.sections if k in arenas}
        if not mine:
            continue
        copies = {k: _on_host(arena, tied.name) for k, arena in mine.items()}
        total = torch.zeros_like(next(iter(copies.values())))
        for section in tied.sections:
            copy = copies[section] if section in copies else torch.empty_like(total)
            if len(ranks) > 1:
                owner = replica * plan.pipeline_depth + plan.stage_of(section)
                dist.broadcast(copy, owner, group=groups[ranks])
            total.add_(copy)
        for arena in mine.values():
            target = arena.gradients[tied.name]
            if arena.device is None:
                target.copy_(total)
            else:
                arena.device.wait(arena.device.upload(total, target))


def _on_host(arena: SectionArena, name: str) -> torch.Tensor:
    """Return a gradient, or a copy of it in the host's memory."""
    gradient = arena.gradients[name]
    if arena.device is None:
        return gradient
    return arena.device.finish(arena.device.download(gradient))
