"""The model of the throughput benchmark, as a user would write it for one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain import TrainingJob

BLOCKS, WIDTH, HEADS, VOCABULARY, SEQUENCE = 12, 256, 4, 256, 128
MICROBATCH, MICROBATCHES = 4, 8
CLIP = 1.0
LEARNING_RATE = 1e-3


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        each = width // self.heads
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, each)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    def __init__(self, blocks: int = BLOCKS, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQUENCE, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Tokens:
    """Examples that count upwards, from a start of their own."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return (index * 37 + torch.arange(SEQUENCE + 1)) % VOCABULARY


def token_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropy over all tokens of a batch."""
    targets = batch[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    total = token_loss(model(batch[:, :-1]), batch)
    return total, float(batch[:, 1:].numel())


def job() -> TrainingJob:
    return TrainingJob(
        model=GPT,
        dataset=Tokens(),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=LEARNING_RATE),
        clip_grad_norm=CLIP,
    )


def small_job() -> TrainingJob:
    """The same with 5 million parameters: that of the benchmark of recovery."""
    return replace(job(), model=partial(GPT, blocks=8, width=224, heads=7))
