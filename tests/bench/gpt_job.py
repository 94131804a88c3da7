"""The model of the throughput benchmark, as a user would write it for one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain import TrainingJob

BLOCKS, WIDTH, HEADS, VOCABULARY, SEQUENCE = 12, 256, 4, 256, 128
MICROBATCH, MICROBATCHES = 4, 8
CLIP = 1.0
LEARNING_RATE = 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQUENCE, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
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
