"""A tiny GPT whose loss waits as if an accelerator computed it.

The machine's cores are then not what limits the jobs: four simulated VMs train nearly four
times as fast as one, on two cores as well.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain import TrainingJob

WIDTH, BLOCKS, SEQUENCE, WAIT_S = 16, 4, 8, 0.02


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it."""
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.norm(mixed)))))


class Gpt(nn.Module):
    """Embedding, blocks, and the embedding again as the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


class Tokens:
    """Random texts, each of which its number determines."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 32, (SEQUENCE + 1,), generator=generator)


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the summed loss of a micro-batch, and its number of tokens."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:].flatten()
    time.sleep(WAIT_S)
    total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return total, float(targets.numel())


def training_job() -> TrainingJob:
    """Return the job that spottrain trains."""
    return TrainingJob(
        model=Gpt,
        dataset=Tokens(),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )
