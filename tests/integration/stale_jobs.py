"""Jobs whose gradients may be stale by one mini-batch: a quadratic, and a small GPT."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain import CutPoint, TrainingJob, step

CURVATURE = 0.5
VOCABULARY, WIDTH, BLOCKS, SEQUENCE = 32, 16, 3, 8


class Offsets:
    """Numbers with few bits: sums of them are exact, in any order."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([(index * 7 % 16 - 8) / 16])


class Offset(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Sum(nn.Module):
    """x + w1 + w2, each w a section's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.second = Offset(1.0), CutPoint(), Offset(-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.cut(self.first(x)))
        return y


def quadratic(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    return CURVATURE / 2 * model(batch).square().sum(), float(len(batch))


def quadratic_job() -> TrainingJob:
    return TrainingJob(
        model=Sum,
        dataset=Offsets(),
        heldout=Offsets(),
        loss=quadratic,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.25, weight_decay=0.125),
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).unsqueeze(1).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        y: torch.Tensor = x + mixed
        return y + torch.as_tensor(self.down(F.gelu(self.up(y))))


class Gpt(nn.Module):
    """Without dropout, and with an embedding of its own at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Tokens:
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator)


def next_token(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    time.sleep(float(os.environ.get("STALE_SLEEP_S", "0")))
    logits, targets = model(batch[:, :-1]), batch[:, 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return total, float(targets.numel())


class Noted(torch.autograd.Function):
    """Writes down when it is gone through, forward and backward, and for which step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        note("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        note("backward")
        return gradients[0]


def note(what: str) -> None:
    with open(os.environ.get("STALE_NOTES", os.devnull), "a") as file:
        file.write(f"{os.getpid()} {what} {step()}\n")


class NotedGpt(Gpt):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = Noted.apply(self.embedding(tokens))  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def noted_job() -> TrainingJob:
    return dataclasses.replace(gpt_job(), model=NotedGpt)


def gpt_job() -> TrainingJob:
    return TrainingJob(
        model=Gpt,
        dataset=Tokens(),
        heldout=Tokens(),
        loss=next_token,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        lr_schedule=lambda step: min(1.0, (step + 1) / 3),
        clip_grad_norm=0.5,
    )
