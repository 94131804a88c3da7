"""The training job that the user's entrypoint returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast

import torch
from torch import nn

Batch = Any
"""Result of ``collate`` for a list of examples: a pytree of tensors."""

Real = torch.Tensor | float
"""A scalar tensor or a number."""
LossResult = tuple[torch.Tensor, Real] | tuple[torch.Tensor, Real, Mapping[str, tuple[Real, Real]]]

NamedParameters = Sequence[tuple[str, nn.Parameter]]

TensorStyle = Literal[
    "colwise", "colwise_gather_output", "rowwise", "replicated_with_grad_allreduce"
]
"""How ranks divide a module, in the words of transformers: each computes a part of its outputs
(and with ``gather_output`` gets the others' part), or what a part of its inputs contributes. The
last one is of modules that stay whole, but get a part as their input, such as the norm of a query."""
DIVIDING: tuple[TensorStyle, ...] = ("colwise", "colwise_gather_output", "rowwise")
"""Those that divide a matrix."""
SUMMING: tuple[TensorStyle, ...] = ("colwise_gather_output", "rowwise")
"""Those that make something whole of parts."""


class ExampleDataset(Sized, Protocol):
    """A map-style dataset: a length, and an example for every index below it."""

    def __getitem__(self, index: int, /) -> Any:
        """Return example ``index``; the same one every time."""


@dataclass(frozen=True, kw_only=True)
class CallbackInfo:
    """What a callback is told."""

    job: str
    """Name of the job."""
    step: int
    """Mini-batches that are trained."""
    metrics: Mapping[str, float]
    """Of the evaluation at this step, each as ``set/metric``; empty: there was none."""
    folder: Path | None = None
    """Where ``model.safetensors`` has the weights of this step, as ``spottrain export``
    writes them; goes away after the call. ``None`` in ``on_evaluate``, and in ``on_end``
    of a job without a checkpoint."""
    outcome: str = ""
    """How the job ended, in ``on_end``, such as ``succeeded``."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Functions that are called while training goes on, and cannot stop or slow it.

    Each call is a process of its own on the manager's machine, at least once for each step
    that it is for; while one runs, all but the newest of what comes are left out.
    """

    on_evaluate: Callable[[CallbackInfo], object] | None = None
    """After held-out sets were evaluated."""
    on_checkpoint: Callable[[CallbackInfo], object] | None = None
    """After a checkpoint was completed."""
    on_best: Callable[[CallbackInfo], object] | None = None
    """After the checkpoint was completed that is the best one by evaluation so far."""
    on_end: Callable[[CallbackInfo], object] | None = None
    """After the job has ended, unless it was only stopped."""
    limit_s: float = 600.0
    """A call that takes longer is ended."""

    @property
    def asked(self) -> dict[str, Callable[[CallbackInfo], object]]:
        """Those that are given, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: one for name, one in named if name != "limit_s" and one is not None}


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
    tensor_plan: Mapping[str, TensorStyle] | None = None
    """Which ``torch.nn.Linear`` modules ``runtime.tensor_parallel`` divides, and how; ``*`` in a
    name stands for one part of it, such as a block's number. ``None``: the plan of a transformers
    model."""
    callbacks: Callbacks = Callbacks()
    """What is called when held-out sets were evaluated, weights saved, the job ended."""

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


class Helper(nn.Module):
    """A frozen model beside the one that is trained, such as a reference or a teacher.

    It is part of what ``TrainingJob.model`` builds: as an attribute of the trained model, or
    beside it in a module of yours. Its parameters are not trained, it stays in evaluation
    mode, and exports leave it out. Where its blocks can be cut, each section of the trained
    model has a share of them; else its last section has all.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.requires_grad_(False).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model makes of these arguments."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)


class CutPoint(nn.Module):
    """Marks a place where the model may be cut, in models without repeated blocks.

    ``forward`` returns its input: a tensor, or tuples, lists, dictionaries of them.
    """

    def forward(self, activation: Any) -> Any:
        """Return ``activation`` unchanged."""
        return activation
