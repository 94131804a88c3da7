"""Tiny jobs with metrics, several held-out sets, and losses that are not finite."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import spottrain
from spottrain import TrainingJob

if TYPE_CHECKING:
    from tests.integration import tiny_job as tiny
else:
    tiny = importlib.import_module("tiny_job")

Metrics = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]


def measuring(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float, Metrics]:
    """The tiny loss, and how often the most likely token was right."""
    logits = model(batch[:, :-1])
    targets = batch[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    right = (logits.argmax(-1) == targets).sum()
    metrics: dict[str, tuple[torch.Tensor | float, torch.Tensor | float]] = {
        "accuracy": (right, targets.numel())
    }
    even = targets % 2 == 0
    metrics["even/accuracy"] = ((logits.argmax(-1) == targets)[even].sum(), even.sum())
    if not model.training:
        metrics["perplexity"] = ((total / targets.numel()).exp(), 1.0)
    return total, float(targets.numel()), metrics


def job() -> TrainingJob:
    return dataclasses.replace(
        tiny.job(),
        loss=measuring,
        heldout={"near": tiny.Tokens(21), "far": tiny.Tokens(9)},
    )


def stuck_job() -> TrainingJob:
    """Weights that stay as they are from the third mini-batch on."""
    return dataclasses.replace(job(), lr_schedule=lambda step: float(step < 2))


def late_nan_job() -> TrainingJob:
    """Losses that are nan from a mini-batch on."""

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        total, weight = tiny.loss(model, batch)
        is_bad = (spottrain.step() or 0) >= int(os.environ.get("TINY_NAN_FROM", "999"))
        return total * (torch.nan if is_bad else 1.0), weight

    return dataclasses.replace(tiny.job(), loss=loss)


def exploding_job() -> TrainingJob:
    """Losses that are nan for the examples that the environment names."""

    class Numbered(tiny.Tokens):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.cat([super().__getitem__(index), torch.tensor([index])])

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        total, weight = tiny.loss(model, batch[:, :-1])
        poisoned = [int(word) for word in os.environ.get("TINY_POISONED", "").split()]
        is_bad = torch.isin(batch[:, -1], torch.tensor(poisoned)).any()
        return total * torch.where(is_bad, torch.nan, 1.0), weight

    return dataclasses.replace(tiny.job(), dataset=Numbered(50), heldout=Numbered(7), loss=loss)
