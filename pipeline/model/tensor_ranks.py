"""The ranks that divide the matrices of a stage replica, and what autograd makes of their
collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


class TensorRanks(Protocol):
    """Those that divide matrices."""

    @property
    def size(self) -> int:
        """How many."""

    @property
    def index(self) -> int:
        """Of this one."""

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor over the ranks, in place, to the same bits at all of them."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks one after the other, flat; each is contiguous."""

    def sum_parts(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum over ranks of a contiguous tensor, flat."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands for ranks whose computations are not looked at."""

    size: int = 1
    index: int = 0

    def sum(self, tensor: torch.Tensor) -> None:
        """See ``TensorRanks``."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See ``TensorRanks``."""
        return part.repeat(self.size)

    def sum_parts(self, whole: torch.Tensor) -> torch.Tensor:
        """See ``TensorRanks``."""
        return whole.chunk(self.size)[self.index]


NOBODY = Absent()
"""The ranks beside one that computes alone."""


def gathered(part: torch.Tensor, ranks: TensorRanks, dimension: int) -> torch.Tensor:
    """Return the parts of all ranks one after the other in a dimension, counted from the end."""
    parts = ranks.gather(part.contiguous().flatten()).view(ranks.size, *part.shape)
    return parts.movedim(0, dimension - 1).flatten(dimension - 1, dimension)


def lowered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type in which matrices take it: autocast's, where it is on.

    Layers of one input have it converted once. Ranks sum its gradients in that type, as
    Megatron-LM does, half the bytes of float32; one conversion for each layer would widen them.
    """
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def conjugate(tensor: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
    """Return what ``forward`` makes of a tensor, whose gradient is what ``backward`` makes of that
    of the result: f and g of Shoeybi et al. (2019), section 3."""
    made: torch.Tensor = _Conjugate.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return made


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
        ctx.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.of_gradient(gradient), None, None
