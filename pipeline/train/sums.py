"""The sums of one section's gradients, from backwards to the arena.

A section moves by itself. What a GPU has to bring to the host's memory leaves as soon as
the last backward has been through the section, beside the backward through the sections
before it; its sum over replicas runs beside the transfers of others.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from spottrain.errors import UserCodeError
from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.pipeline.model.job import NamedParameters
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.pipeline.state.update import GradientFit
from spottrain.pipeline.train.working import Run, WorkingSection, lay_out


class Addend(NamedTuple):
    """What a rank adds to a sum over ranks."""

    tensor: torch.Tensor
    """Flat; the sum may be made in it."""
    divided: bool
    """Whether it is of this rank's parts: sums are those of the same parts."""


@dataclass(slots=True)
class Sum:
    """A sum over ranks, under way."""

    works: list[dist.Work] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)
    """Of each addend, where the sum will be: a row for each part; of what is not divided, one."""
    size: int = 1
    """Parts of what is divided."""

    def wait(self) -> Sequence[torch.Tensor]:
        """Wait for the sum: the host, or what is computed on the device from now on."""
        wait_for(self.works)
        self.works.clear()
        for number, rows in enumerate(self.rows):
            first, *others = torch.split(rows, self.size)  # a group after the other
            for one in others:
                first.add_(one)
            self.rows[number] = first
        return self.rows


@dataclass(frozen=True, slots=True)
class Sharing:
    """The way of sums to the ranks that hold a section: one in each VM of the stage."""

    within: dist.ProcessGroup | None
    """The ranks of the stage in this VM; ``None`` if there is one only."""
    places: Mapping[int, int]
    """That of the holder of each section in it."""
    across: Mapping[int, dist.ProcessGroup | None]
    """Of each section that this rank holds, all that hold it; ``None`` if it is alone."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that run the same stage."""

    group: dist.ProcessGroup | None = None
    """Sums tensors of the host; ``None`` if there is one rank only."""
    device_group: dist.ProcessGroup | None = None
    """Sums tensors of the device, where there is such a group."""
    microbatches: tuple[range, ...] = (range(1),)
    """Virtual nodes of each micro-batch of this replica."""
    num_virtual_nodes: int = 1
    """Of a mini-batch."""
    has_loss: bool = True
    """True on the last stage."""
    num_metrics: int = 0
    """What the loss measures besides the loss."""
    shards: Shards = ALONE
    """What this rank has of the stage's matrices. The others that divide them are among the
    ranks, each with the gradient of its part."""
    sharing: Sharing | None = None
    """Where the ranks of a VM share the stage's state."""

    @property
    def num_sums(self) -> int:
        """How many sums ``LossSums.values`` has."""
        return 2 + 2 * self.num_metrics

    @property
    def sum_on_host(self) -> bool:
        """True if gradients are summed in the host's memory."""
        return self.group is not None and self.device_group is None

    def sum(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sum every tensor of the host over all ranks, in place."""
        wait_for(_begin_sums(self.group, tensors))

    def holds(self, section: int) -> bool:
        """Return whether this rank has the section's committed state."""
        return self.sharing is None or section in self.sharing.across

    def begin_sum(self, section: int, addends: Sequence[Addend], device: Device) -> Sum:
        """Begin to sum gradients of a section, where ``sum_on_host`` says.

        Over all ranks; where state is shared, over those of this VM, at the one that holds the
        section. Ranks must sum in the same order. Parts come to it as they are, each rank's by
        itself: that is one part of the bytes of a sum of whole tensors.
        """
        rows = [one.tensor.view(1, -1) for one in addends]
        if self.sharing is None:
            group = self.group if self.sum_on_host else self.device_group
            return Sum(_begin_sums(group, rows), rows)
        if (within := self.sharing.within) is None:
            return Sum([], rows)
        place, begun = self.sharing.places[section], Sum(size=self.shards.size)
        for one, row in zip(addends, rows, strict=True):
            if one.divided:
                work, row = self._gather(within, place, one.tensor, device)
            else:
                work = dist.reduce(row, group=within, group_dst=place, async_op=True)
            assert work is not None
            begun.works.append(work)
            begun.rows.append(row)
        return begun

    def complete_sum(self, section: int, rows: Iterable[torch.Tensor]) -> list[dist.Work]:
        """Begin to add the sums of other VMs to that of this one, which is there; of a section
        that this rank holds, where state is shared."""
        assert self.sharing is not None
        return _begin_sums(self.sharing.across[section], rows)

    def in_turns(self, sections: Sequence[SectionSums]) -> list[list[SectionSums]]:
        """Return which sections are summed at once, in this order.

        Parts take memory where they are put together: of one section at each rank at a time.
        """
        if self.sharing is None or self.shards.size == 1:
            return [[*sections]]
        by_place: dict[int, list[SectionSums]] = {}
        for one in sections:
            by_place.setdefault(self.sharing.places[one.number], []).append(one)
        return [
            [one for one in turn if one is not None]
            for turn in itertools.zip_longest(*by_place.values())
        ]

    def _gather(
        self, group: dist.ProcessGroup, place: int, part: torch.Tensor, device: Device
    ) -> tuple[dist.Work | None, torch.Tensor]:
        """Begin to put all ranks' parts together at one of them; return a row for each."""
        own = part.view(torch.uint8)  # gloo does not know all types
        if group.rank() != place:
            work = dist.gather(own, group=group, group_dst=place, async_op=True)
            return work, part.view(1, -1)
        shape = group.size(), part.numel()
        on_host = self.sum_on_host
        rows = device.allocate_host(shape, part.dtype) if on_host else part.new_empty(shape)
        parts = list(rows.view(torch.uint8))
        work = dist.gather(own, parts, group=group, group_dst=place, async_op=True)
        return work, rows

    def begin_maximum(self, tensor: torch.Tensor) -> list[dist.Work]:
        """Begin to take the maximum over all ranks of a tensor of the host, in place."""
        return _begin_sums(self.group, [tensor], dist.ReduceOp.MAX)


def _begin_sums(
    group: dist.ProcessGroup | None,
    tensors: Iterable[torch.Tensor],
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[dist.Work]:
    if group is None:
        return []
    works = []
    for tensor in tensors:
        work = dist.all_reduce(tensor, operation, group=group, async_op=True)
        assert work is not None
        works.append(work)
    return works


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait for sums: the host, or what is computed on the device from now on."""
    for work in works:
        work.wait()


def add_hook(parameter: nn.Parameter, take: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Have ``take`` called whenever a backward has completed a parameter's gradient."""
    handle: RemovableHandle
    handle = parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return handle


class _Completion:
    """Notices that all backwards of a mini-batch have been through a section.

    Args:
        names: Of the section's gradients.
        act: What is to be done then.
    """

    def __init__(self, names: Iterable[str], act: Callable[[], None]) -> None:
        self._names = tuple(names)
        self._act = act

    def begin(self, backwards: int) -> None:
        """Prepare for the backwards of a mini-batch."""
        self._left = [backwards] * len(self._names)
        self._incomplete = len(self._names)
        self._acted = False

    def count(self, number: int) -> None:
        """Note that a backward has given one of the gradients.

        Raises:
            UserCodeError: It has given it before.
        """
        self._left[number] -= 1
        if self._left[number] < 0:
            raise UserCodeError(
                f"a backward must give the gradient of {self._names[number]} once: it "
                "came several times; call activation checkpointing with "
                "use_reentrant=False"
            )
        if not self._left[number]:
            self._incomplete -= 1
            if not self._incomplete:
                self.force()

    def force(self) -> None:
        """Act now, if that has not been done: no backward is left."""
        if not self._acted:
            self._acted = True
            self._act()


class _SameGradient:
    """Checks that ranks which divide matrices have the same gradient of what they do not.

    In the first backward alone; before anything else is done with the gradient.
    """

    def __init__(self, name: str, parameter: nn.Parameter, shards: Shards) -> None:
        self._name, self._shards = name, shards
        self._handle = add_hook(parameter, self._check)

    def _check(self, parameter: torch.Tensor) -> None:
        self._handle.remove()
        assert parameter.grad is not None
        own = parameter.grad.double().norm()
        total = own.clone()
        self._shards.sum(total)
        if not torch.isclose(own * self._shards.size, total, rtol=0.1, atol=1e-5, equal_nan=True):
            raise UserCodeError(
                f"tensor_plan must name {self._name.rpartition('.')[0] or self._name}: the ranks have "
                "other gradients of it, since it gets a part as its input; give it as "
                "replicated_with_grad_allreduce"
            )


class SectionSums(abc.ABC):
    """The gradients of one section, added up: over virtual nodes, then over replicas."""

    total: torch.Tensor | None = None
    """Memory of its own for sums, on the device."""
    peaks: torch.Tensor | None = None
    """Largest absolute value of every gradient, of all virtual nodes so far, if that is
    looked at."""

    def __init__(
        self,
        parameters: Mapping[int, NamedParameters],
        section: WorkingSection,
        replicas: Replicas,
        device: Device,
    ) -> None:
        self.section = section
        self.number = section.arena.section
        self._trained = dict(parameters[self.number])
        shards = replicas.shards
        for name in section.target_gradients:
            if shards.size > 1 and shards.is_repeated(name):
                _SameGradient(name, self._trained[name], shards)
        self.completion = _Completion(section.target_gradients, self._complete)
        self.given: list[bool] = []
        """Which gradients backwards of the mini-batch have given so far."""
        self._device = device
        self._sums_on_host = replicas.sum_on_host and not device.is_host
        self._transfers: list[Transfer] = []
        """On their way to where sums are made, or to the arena."""
        self._arriving: list[tuple[Transfer, torch.Tensor]] = []
        """Parts of sums that come into the arena's memory, and where they go then."""
        self._target_parts = {
            name: section.shards.parts_of(name, target)
            for name, target in section.target_gradients.items()
        }
        self._hooks: list[RemovableHandle] = []

    def begin(self, step: int, attempt: int, scale_exponent: int, replicas: Replicas) -> None:
        """Prepare for an attempt at mini-batch ``step``."""
        self._scale_exponent = scale_exponent
        self._transfers.clear()
        self.given = [False] * len(self.section.target_gradients)
        self.completion.begin(len(replicas.microbatches))

    @abc.abstractmethod
    def _complete(self) -> None:
        """All backwards have been through the section: begin to move what can leave."""

    @abc.abstractmethod
    def addends(self) -> Sequence[Addend]:
        """Return what is to be summed over replicas, once it is there."""

    @abc.abstractmethod
    def take_sum(self, rows: Sequence[torch.Tensor]) -> None:
        """Take over the sum over replicas, see ``Sum.rows``."""

    def arrive(self) -> None:
        """Wait until the arena has the gradients."""
        to_host = self.section.arena.device is None
        await_one = self._device.finish if to_host else self._device.wait
        for transfer in self._transfers:
            await_one(transfer)
        for transfer, target in self._arriving:
            target.copy_(await_one(transfer))
        self._arriving.clear()

    def _pieces(
        self, runs: Sequence[Run], sums: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each gradient, or each of its parts: its name, the sum, where it goes in the
        arena."""
        for run, rows in zip(runs, sums, strict=True):
            for index, row in enumerate(rows):
                for name, piece in run.tensors_in(row).items():
                    yield name, piece, self._target_parts[name][index]

    def _bring(self, piece: torch.Tensor, target: torch.Tensor, *, from_host: bool) -> None:
        """Begin to copy a sum to the arena."""
        device, to_host = self._device, self.section.arena.device is None
        if from_host == to_host:
            target.copy_(piece)
            return
        move = device.download if to_host else device.upload
        if target.is_contiguous():
            self._transfers.append(move(piece, target))
        else:
            self._arriving.append((move(piece), target))

    def settle(self, magnitudes: Sequence[int], virtual_nodes: int) -> GradientFit:
        """Return what the magnitudes of the gradients, over all replicas, say of them."""
        return GradientFit()

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()


class SectionRuns(SectionSums):
    """Autograd adds gradients up in place; an all-reduce adds up replicas."""

    def __init__(
        self,
        parameters: Mapping[int, NamedParameters],
        section: WorkingSection,
        replicas: Replicas,
        device: Device,
    ) -> None:
        super().__init__(parameters, section, replicas, device)
        self._runs = section.gradient_runs
        self._targets = section.target_runs
        self._sums_on_device = replicas.device_group is not None
        self._goes_down = section.is_copy and section.follows
        # Autograd adds in place to a gradient of the parameter's own type.
        self._in_place: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._repeated: list[torch.Tensor] = []
        """Of which another rank has the same gradient."""
        self._leaves_early = section.is_copy or self._sums_on_host
        trained = self._trained
        for number, (name, total) in enumerate(section.gradients.items()):
            if not replicas.shards.is_counted(name):
                self._repeated.append(total)
            if total.dtype is trained[name].dtype:
                self._in_place.append((trained[name], total))
            else:
                hook = partial(_add_converted, total)
                self._hooks.append(add_hook(trained[name], hook))
            note = partial(self._note, number)
            self._hooks.append(add_hook(trained[name], note))

    def begin(self, step: int, attempt: int, scale_exponent: int, replicas: Replicas) -> None:
        """Clear the sums of the mini-batch before."""
        super().begin(step, attempt, scale_exponent, replicas)
        for run in self._runs:
            run.zero_()
        for parameter, total in self._in_place:
            parameter.grad = total

    def _note(self, number: int, parameter: torch.Tensor) -> None:
        self.given[number] = True
        if self._leaves_early:
            self.completion.count(number)

    def _complete(self) -> None:
        """Take the loss scale out; what no other rank adds to on the device goes down."""
        for total in self._repeated:
            total.zero_()
        for run in self._runs if self._scale_exponent else ():
            run.mul_(2.0**-self._scale_exponent)
        if self._sums_on_device:
            return
        if self._goes_down:
            self._go_down()
        elif self._sums_on_host:
            self._transfers = [self._device.download(run) for run in self._runs]

    def _go_down(self) -> None:
        pairs = zip(self._runs, self._targets, strict=True)
        self._transfers = [self._device.download(run, target) for run, target in pairs]

    def addends(self) -> Sequence[Addend]:
        """See ``SectionSums``."""
        own = self._runs
        if self._sums_on_host:
            own = [self._device.finish(transfer) for transfer in self._transfers]
        layout = self.section.gradient_layout
        return [Addend(one, run.divided) for one, run in zip(own, layout, strict=True)]

    def take_sum(self, rows: Sequence[torch.Tensor]) -> None:
        """See ``SectionSums``."""
        if self._goes_down:
            if self._sums_on_device:
                self._go_down()
            return
        self._transfers.clear()
        if self.section.shards.size > 1:
            from_host = self._sums_on_host or self._device.is_host
            for _, piece, target in self._pieces(self.section.gradient_layout, rows):
                self._bring(piece, target, from_host=from_host)
        elif self._sums_on_host:
            for row, run in zip(rows, self._runs, strict=True):
                self._bring(row.view(-1), run, from_host=True)


def _add_converted(total: torch.Tensor, parameter: torch.Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    total.add_(gradient)


class SectionIntegers(SectionSums):
    """Gradients become integers, one after the other, whose sum no order changes."""

    total: torch.Tensor
    peaks: torch.Tensor

    def __init__(
        self,
        parameters: Mapping[int, NamedParameters],
        section: WorkingSection,
        replicas: Replicas,
        device: Device,
    ) -> None:
        super().__init__(parameters, section, replicas, device)
        gradients = section.target_gradients
        self._shards, self._names = replicas.shards, list(gradients)
        types = dict.fromkeys(gradients, torch.int64)
        self._layout = lay_out(gradients, section.shards, types, alignment_bytes=1)
        self._sizes = [run.size for run in self._layout]
        where = device.torch_device
        self.total = torch.zeros(sum(self._sizes), dtype=torch.int64, device=where)
        self.peaks = torch.zeros(len(gradients), dtype=torch.float64, device=where)
        self._own: dict[str, torch.Tensor] = {}
        """The integers by name."""
        for run, memory in zip(self._layout, torch.split(self.total, self._sizes), strict=True):
            self._own |= run.tensors_in(memory)
        self._is_alone = replicas.group is None
        self._leaves_early = self._sums_on_host or (self._is_alone and section.is_copy)
        self._staged: Transfer | None = None
        """The integers, on their way to where they are summed."""
        self._hooks = [
            add_hook(self._trained[name], partial(self._add, number))
            for number, name in enumerate(gradients)
        ]

    def begin(self, step: int, attempt: int, scale_exponent: int, replicas: Replicas) -> None:
        """Clear the sums, and choose the exponents of this attempt."""
        super().begin(step, attempt, scale_exponent, replicas)
        nodes = replicas.num_virtual_nodes
        targets, committed = self.section.target_gradients, self.section.arena.exponents_of(step)
        self._used = {
            name: fixed_point.exponent(one, attempt, nodes, target.dtype)
            for (name, target), one in zip(targets.items(), committed, strict=True)
        }
        self.total.zero_()
        self.peaks.zero_()

    def _add(self, number: int, parameter: torch.Tensor) -> None:
        """Take a virtual node's gradient as soon as it is complete."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.given[number] = True
        name = self._names[number]
        own = self._own[name]
        if self._shards.is_counted(name):
            used = self._used[name] - self._scale_exponent
            add = fixed_point.adder(gradient.device, gradient.dtype)
            add(own.view(-1), gradient, used, self.peaks[number])
        if self._leaves_early:
            self.completion.count(number)

    def _complete(self) -> None:
        """Go to where the sum over replicas is made; round what is the sum already."""
        if self._sums_on_host:
            self._staged = self._device.download(self.total)
        elif self._is_alone:
            self._round(self._rows(self.total), from_host=self._device.is_host)

    def _rows(self, total: torch.Tensor) -> list[torch.Tensor]:
        return [row.view(1, -1) for row in torch.split(total, self._sizes)]

    def addends(self) -> Sequence[Addend]:
        """See ``SectionSums``."""
        total = self.total if self._staged is None else self._device.finish(self._staged)
        rows = torch.split(total, self._sizes)
        return [Addend(row, run.divided) for row, run in zip(rows, self._layout, strict=True)]

    def settle(self, magnitudes: Sequence[int], virtual_nodes: int) -> GradientFit:
        """Prepare the next exponents; return what the magnitudes say."""
        unscaled = [
            m if abs(m) == fixed_point.NOT_FINITE else m - self._scale_exponent for m in magnitudes
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
                for m, used in zip(unscaled, self._used.values(), strict=True)
            ),
        )

    def take_sum(self, rows: Sequence[torch.Tensor]) -> None:
        """See ``SectionSums``."""
        if not self._is_alone:
            self._round(rows, from_host=self._staged is not None or self._device.is_host)
        self._staged = None

    def _round(self, rows: Sequence[torch.Tensor], *, from_host: bool) -> None:
        """Round a sum to the types of the arena's gradients, on its way there."""
        to_host = self.section.arena.device is None
        for name, piece, target in self._pieces(self._layout, rows):
            part, used = piece.view(-1), self._used[name]
            if from_host == to_host and target.is_contiguous():
                fixed_point.dequantise(part, used, target)
                continue
            # In the memory of the integers, which are not needed any more.
            room = part.view(torch.uint8)[: target.numel() * target.itemsize]
            rounded = room.view(target.dtype).view(target.shape)
            fixed_point.dequantise(part, used, rounded)
            self._bring(rounded, target, from_host=from_host)
