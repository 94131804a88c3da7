"""The training job that the user's entrypoint returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

Batch = Any
"""Result of ``collate`` for a list of examples: a pytree of tensors."""

Real = torch.Tensor | float
"""A scalar tensor or a number."""
LossResult = tuple[torch.Tensor, Real] | tuple[torch.Tensor, Real, Mapping[str, tuple[Real, Real]]]

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class ExampleDataset(Sized, Protocol):
    """A map-style dataset: a length, and an example for every index below it."""

    def __getitem__(self, index: int, /) -> Any:
        """Return example ``index``; the same one every time."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A model and everything needed to train it, written as for one GPU."""

    model: Callable[[], nn.Module]
    """Builds the model with its initial weights; random numbers are seeded before."""
    dataset: ExampleDataset
    loss: Callable[[nn.Module, Batch], LossResult]
    """Calls the model on a micro-batch; returns (sum of losses, sum of weights).
    The gradient of a mini-batch is that of its loss sum over its weight sum. A third
    value is of metrics, {name: (sum, sum of weights)}; each is reported as its mean over
    the mini-batch or the held-out set."""
    optimizer: Callable[[NamedParameters], torch.optim.Optimizer]
    """Builds an optimizer over (name, parameter) pairs of one section."""
    lr_schedule: Callable[[int], float] | None = None
    """Factor on every learning rate at a step (0 is the first); pure."""
    clip_grad_norm: float | None = None
    """Bound on the norm of the whole model's gradient."""
    heldout: ExampleDataset | Mapping[str, ExampleDataset] | None = None
    """Examples on which loss and metrics are measured in evaluation mode: before the
    first step, after the last one, and as often between as the job file says
    (``evaluation``). Several sets go by their names."""
    collate: Callable[[list[Any]], Batch] = torch.utils.data.default_collate

    @property
    def heldout_sets(self) -> dict[str, ExampleDataset]:
        """The held-out sets by name; one without a name is ``heldout``."""
        match self.heldout:
            case None:
                return {}
            case Mapping() if all(isinstance(name, str) for name in self.heldout):
                return dict(self.heldout)
            case _:
                return {"heldout": cast(ExampleDataset, self.heldout)}


class CutPoint(nn.Module):
    """Marks a place where the model may be cut, in models without repeated blocks.

    ``forward`` returns its input: a tensor, or tuples, lists, dictionaries of them.
    """

    def forward(self, activation: Any) -> Any:
        """Return ``activation`` unchanged."""
        return activation
