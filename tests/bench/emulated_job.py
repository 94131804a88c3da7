"""A job whose sections compute nothing: each task sleeps for a given time.

All else is as in any job: parameters with gradients, activations of a stated size, an
optimizer. So many more workers than cores can run as if each had a device of its own. Ranks can
divide the matrices of ``divided``: each then sleeps for its part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from spottrain import TrainingJob

BLOCKS = int(os.environ.get("EMULATED_BLOCKS", "8"))
FORWARD_S = float(os.environ.get("EMULATED_FORWARD_S", "0.02"))
BACKWARD_S = float(os.environ.get("EMULATED_BACKWARD_S", "0.04"))
ACTIVATION_BYTES = int(os.environ.get("EMULATED_ACTIVATION_BYTES", "65536"))
PARAMETER_BYTES = int(os.environ.get("EMULATED_PARAMETER_BYTES", "131072"))
"""Of each section; so is what a mini-batch reduces."""
HIDDEN = 4
"""Outputs of the first matrix of a divided block."""
FLOAT_BYTES = 4
_SMOOTHING = 0.1


_late_s: dict[float, float] = {}
"""How late the timer has lately been, for each duration."""


def idle(duration_s: float) -> None:
    """Sleep up to a deadline, asking for as much less as the timer is late.

    A timer is late by a tenth of a millisecond, more or less with what else the machine
    does: it would otherwise be a part of every task, and another one when it is measured.
    """
    deadline = time.monotonic() + duration_s
    late_s = _late_s.setdefault(duration_s, 0.0)
    time.sleep(max(0.0, deadline - late_s - time.monotonic()))
    _late_s[duration_s] += _SMOOTHING * (time.monotonic() - deadline)


class Task(torch.autograd.Function):
    """Takes its time, or a share of it, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, share: float) -> torch.Tensor:
        idle(share * FORWARD_S)
        ctx.share = share
        ctx.save_for_backward(weight)  # else a checkpoint would find nothing to recompute
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        idle(ctx.share * BACKWARD_S)
        (gradient,), (weight,) = gradients, ctx.saved_tensors
        return gradient, torch.ones(()).expand(weight.shape), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PARAMETER_BYTES // FLOAT_BYTES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Task.apply(x, self.weight, 1.0)  # type: ignore[no-untyped-call]
        return y


class DividedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = ACTIVATION_BYTES // FLOAT_BYTES
        self.up = nn.Linear(width, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, weight = self.up(x), self.up.weight
        slept = Task.apply(part, weight, len(weight) / HIDDEN)  # type: ignore[no-untyped-call]
        y: torch.Tensor = x + self.down(slept)
        return y


class Sleeper(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.expand(-1, ACTIVATION_BYTES // FLOAT_BYTES)
        for block in self.blocks:
            x = block(x)
        return x


class Ones:
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    return model(batch).mean() * len(batch), float(len(batch))


def job() -> TrainingJob:
    return TrainingJob(
        model=Sleeper,
        dataset=Ones(),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


def divided() -> TrainingJob:
    return replace(
        job(),
        model=partial(Sleeper, DividedBlock),
        tensor_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    )
