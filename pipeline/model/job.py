"""The training job that the user's entrypoint returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Batch = Any
"""Result of ``collate`` for a list of examples: a pytree of tensors."""

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
    loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, torch.Tensor | float]]
    """Calls the model on a micro-batch; returns (sum of losses, sum of weights).
    The gradient of a mini-batch is that of its loss sum over its weight sum."""
    optimizer: Callable[[NamedParameters], torch.optim.Optimizer]
    """Builds an optimizer over (name, parameter) pairs of one section."""
    lr_schedule: Callable[[int], float] | None = None
    """Factor on every learning rate at a step (0 is the first); pure."""
    clip_grad_norm: float | None = None
    """Bound on the norm of the whole model's gradient."""
    heldout: ExampleDataset | None = None
    """Examples on which the loss is measured before the first and after the last step,
    in evaluation mode."""
    collate: Callable[[list[Any]], Batch] = torch.utils.data.default_collate


class CutPoint(nn.Module):
    """Marks a place where the model may be cut, in models without repeated blocks.

    ``forward`` returns its input: the one activation that crosses the cut.
    """

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Return ``activation`` unchanged."""
        return activation
