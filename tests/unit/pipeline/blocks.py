"""A small model whose forward each test of the tracer writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spottrain.pipeline.model.job import TrainingJob

WIDTH = 4
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Blocks(nn.Module):
    """Four linear blocks between an embedding and a head; ``body`` is its forward."""

    def __init__(self, body: Forward, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.arange(float(WIDTH)))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def make_job(body: Forward, block: Callable[[], nn.Module] = linear, **changes: Any) -> TrainingJob:
    parts: dict[str, Any] = {
        "model": lambda: Blocks(body, block),
        "dataset": [torch.arange(float(WIDTH))] * 3,
        "loss": lambda model, batch: (model(batch).sum(), len(batch)),
        "optimizer": lambda named: torch.optim.SGD(p for _, p in named),
    }
    return TrainingJob(**(parts | changes))


def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = block(x)
    return self.head(x)  # type: ignore[no-any-return]
