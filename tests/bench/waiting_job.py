"""A job whose examples take ``BENCH_WAIT_S`` to come, as over a network.

Its model computes little and waits, as for a GPU: the bench is of what is beside it.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from spottrain import TrainingJob

COMPUTE_S = 0.12
"""Of a stage, for a micro-batch's forward."""
WIDTH, BLOCKS = 64, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "meta":
            time.sleep(COMPUTE_S)
        for block in self.blocks:
            x = block(x)
        return x


class Examples:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(float(os.environ.get("BENCH_WAIT_S", "0")))
        return torch.randn(WIDTH)


def job() -> TrainingJob:
    return TrainingJob(
        model=Model,
        dataset=Examples(),
        loss=lambda model, batch: (model(batch).square().sum(), float(len(batch))),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
    )
