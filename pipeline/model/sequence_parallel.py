"""Sequence parallelism: between divided matrices each rank has a part of the sequence.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4.2.2. In the blocks of a model ranks that divide matrices have, of what passes from block
to block, a part of the sequence each: norms, dropouts and sums with a block's input are computed
once, not at every rank. Where a ``colwise`` layer begins the parts are gathered, and the gradient
is summed and scattered; a ``rowwise`` layer scatters its sum, and its gradient is gathered. For the
backward a rank keeps its part of what was gathered, and gathers it again.

The first block of a list takes its part of what it is given, the last one gathers what it returns;
what comes before and after them every rank computes as one alone would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.sections import BY_HAND, ModelLayout
from spottrain.pipeline.model.tensor_ranks import Change, TensorRanks, conjugate, gathered, lowered

SEQUENCE = -2
"""The dimension that is divided: the last one is of features."""


@dataclass(frozen=True, slots=True)
class SplitBlocks:
    """The blocks in which each rank has a part of the sequence, in the order of their lists."""

    names: tuple[str, ...] = ()

    @property
    def first(self) -> frozenset[str]:
        """Those that begin a list."""
        return frozenset(self.names) - {after for _, after in self._neighbours()}

    @property
    def last(self) -> frozenset[str]:
        """Those that end one."""
        return frozenset(self.names) - {before for before, _ in self._neighbours()}

    def is_split_before(self, layout: ModelLayout, section: int) -> bool:
        """Return whether each rank has a part of the sequence where a section begins."""
        cuts = layout.cuts[max(section - 1, 0) : section]
        ends = {end.module for cut in cuts for end in cut.ends.values()}
        return bool(ends & ({*self.names} - self.last))

    def around(self, module: str) -> str | None:
        """Return the block that a module is, or is in."""
        names = accumulate(module.split("."), "{}.{}".format)
        return next((name for name in names if name in self.names), None)

    def divide(
        self,
        model: nn.Module,
        modules: Collection[str],
        ranks: TensorRanks,
        seed: Callable[[int], None],
    ) -> None:
        """Let blocks compute with parts of the sequence.

        Args:
            model: The user's.
            modules: Names of those whose parameters are there.
            ranks: Those that have the parts.
            seed: Begins other random numbers: where parts begin, each rank's own, by its index;
                behind them those of all, by ``ranks.size``.
        """

        def begin(whole: torch.Tensor) -> torch.Tensor:
            seed(ranks.index)
            return conjugate(whole, partial(part_of, ranks=ranks), partial(whole_of, ranks=ranks))

        def end(part: torch.Tensor) -> torch.Tensor:
            seed(ranks.size)
            return conjugate(part, partial(whole_of, ranks=ranks), partial(part_of, ranks=ranks))

        for name in self.names:
            if any(self.around(one) == name for one in modules):
                block = model.get_submodule(name)
                if name in self.first:
                    block.forward = entering(block.forward, begin)
                if name in self.last:
                    block.forward = _leaving(block.forward, end)

    def _neighbours(self) -> list[tuple[str, str]]:
        lists = groupby(self.names, lambda name: name.rpartition(".")[0])
        return [pair for _, own in lists for pair in pairwise(own)]


class UnevenSequenceError(UserCodeError):
    """A sequence has no even parts."""


UNSPLIT = SplitBlocks()
"""All ranks have the whole sequence everywhere."""


def split_blocks(layout: ModelLayout) -> SplitBlocks:
    """Return the blocks of a model that can divide the sequence.

    Raises:
        UserCodeError: There are none, or more than one tensor passes from one to the next.
    """
    beside = [one.name for cut in layout.cuts for one in cut.crossing[1:]]
    why = ""
    if not layout.units or layout.blocks == BY_HAND:
        why = "it has no list of blocks"
    elif layout.waves:
        why = "its loss calls it several times"
    elif beside:
        why = f"{beside[0]} passes from block to block beside the activation"
    elif running := sorted(layout.running):
        why = f"forwards change its buffer {running[0]}"
    if why:
        raise UserCodeError(f"runtime.sequence_parallel must be false for this model: {why}")
    return SplitBlocks(layout.units)


def part_of(whole: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Return this rank's part of the sequence, in memory of its own.

    Raises:
        UnevenSequenceError: It has no even parts.
    """
    length = whole.shape[SEQUENCE] if whole.dim() > 1 else 0
    if length == 0 or length % ranks.size:
        raise UnevenSequenceError(
            f"runtime.sequence_parallel must have sequences that {ranks.size} ranks can divide: got "
            f"an activation of shape {tuple(whole.shape)}; pad them to a multiple, or leave it out"
        )
    own = whole.chunk(ranks.size, SEQUENCE)[ranks.index]
    return own.clone(memory_format=torch.contiguous_format)


def whole_of(part: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Return the whole sequence."""
    return gathered(part, ranks, SEQUENCE)


def scattered(whole: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Return this rank's part of the sequence of the sum over ranks."""
    parts = torch.unflatten(whole, SEQUENCE, (ranks.size, -1)).movedim(SEQUENCE - 1, 0).contiguous()
    return ranks.sum_parts(parts.flatten()).view(parts.shape[1:])


class _Again:
    """What was gathered, gathered again in the backward, until all matrices have had it."""

    def __init__(self, ranks: TensorRanks) -> None:
        self._ranks = ranks
        self._whole: torch.Tensor | None = None

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence."""
        if self._whole is None or self._whole.dtype is not part.dtype:
            self._whole = whole_of(part, self._ranks)
        return self._whole

    def end(self) -> None:
        """Let go of it."""
        self._whole = None


class _Linear(torch.autograd.Function):
    """A linear layer that keeps a part of its input, and gathers it again."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        part: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        again: _Again,
    ) -> torch.Tensor:
        ctx.again = again
        ctx.save_for_backward(part, weight)
        return F.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_given, _, of_weight, of_bias, _ = ctx.needs_input_grad
        part, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        whole = ctx.again.whole(part.to(gradient.dtype)) if of_weight else None
        return (
            gradient @ weight.to(gradient.dtype) if of_given else None,
            None,
            None if whole is None else flat.mT @ whole.flatten(0, -2),
            flat.sum(0) if of_bias else None,
            None,
        )


class Entry:
    """Where parts are gathered for matrices, such as those of queries, keys and values.

    Args:
        part: This rank's.
        ranks: All.
    """

    def __init__(self, part: torch.Tensor, ranks: TensorRanks) -> None:
        self.part, self._ranks = part, ranks
        self._again = _Again(ranks)
        self.whole = conjugate(part, partial(whole_of, ranks=ranks), partial(part_of, ranks=ranks))
        """For what is not divided."""
        self._given: torch.Tensor | None = None
        self._kept = part

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return what a part of a linear layer makes of the whole sequence."""
        if self._given is None:
            own, whole = lowered(self.part), lowered(self.whole.detach())
            scatter = partial(_end_scattered, self._again, self._ranks)
            self._given = conjugate(own, lambda _: whole.view_as(whole), scatter)
            self._kept = own.detach()
        made: torch.Tensor
        made = _Linear.apply(self._given, self._kept, weight, bias, self._again)  # type: ignore[no-untyped-call]
        return made


def _end_scattered(again: _Again, ranks: TensorRanks, gradient: torch.Tensor) -> torch.Tensor:
    again.end()
    return scattered(gradient, ranks)


def sum_scattered(made: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Return this rank's part of the sum of what all have made of parts of features."""
    return conjugate(made, partial(scattered, ranks=ranks), partial(whole_of, ranks=ranks))


def entering(forward: Callable[..., Any], enter: Change) -> Callable[..., Any]:
    """Return the ``forward`` of a module whose activation becomes what ``enter`` makes of it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_first((args, kwargs), enter)
        return forward(*args, **kwargs)

    return run


def _leaving(forward: Callable[..., Any], leave: Change) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return _with_first(forward(*args, **kwargs), leave)

    return run


def _with_first(tree: Any, change: Change) -> Any:
    """Return a tree whose activation, its first tensor of numbers, is another one."""
    leaves, structure = tree_flatten(tree)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[number] = change(leaf)
            break
    return tree_unflatten(leaves, structure)
