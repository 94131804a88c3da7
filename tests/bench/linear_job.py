"""The model of the memory benchmark: plain layers, nearly all of its state in AdamW."""

from __future__ import annotations

import os

import torch
from torch import nn

from spottrain import TrainingJob

BLOCKS, LAYERS = 16, 4
WIDTH = int(os.environ.get("BENCH_WIDTH", "1024"))
"""1024 makes 67 million parameters: 1.07 GB with gradients and AdamW's two moments."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = torch.relu(layer(y))
        return x + 0.1 * y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Noise:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator)


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    return (model(batch) - batch).square().sum(), float(batch.numel())


def job() -> TrainingJob:
    return TrainingJob(
        model=Model,
        dataset=Noise(),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        clip_grad_norm=1.0,
    )
