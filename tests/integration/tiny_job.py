"""A tiny GPT with everything that makes exactness hard: ties, dropout, clipping."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain import TrainingJob, data_path

WIDTH, BLOCKS, SEQUENCE = 16, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        hidden = F.gelu(self.up(self.norm(mixed)))
        return x + torch.as_tensor(self.dropout(self.down(hidden)))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = F.linear(self.norm(x), self.embedding.weight)
        return logits


class Tokens:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 32, (SEQUENCE + 1,), generator=generator)


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    time.sleep(float(os.environ.get("TINY_SLEEP_S", "0")))
    logits = model(batch[:, :-1])
    targets = batch[:, 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return total, float(targets.numel())


def job() -> TrainingJob:
    return TrainingJob(
        model=Tiny,
        dataset=Tokens(50),
        heldout=Tokens(7),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        lr_schedule=lambda step: min(1.0, (step + 1) / 3),
        clip_grad_norm=0.5,
    )


def frozen_job() -> TrainingJob:
    """Frozen: the embedding, which is tied, and all of the second block."""

    def model() -> nn.Module:
        tiny = Tiny()
        for module in (tiny.embedding, tiny.blocks[1]):
            module.requires_grad_(False)
        return tiny

    return dataclasses.replace(job(), model=model)


class Jumping(Tokens):
    """Examples of which one in nine weighs a billion times as much as the others."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([super().__getitem__(index), torch.tensor([index % 9])])


def jumping_job() -> TrainingJob:
    def jumping(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        tokens = batch[:, :-1]
        logits = model(tokens[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").sum(1)
        factors = torch.where(batch[:, -1] == 4, 1e9, 1.0)
        return (losses * factors).sum(), float(tokens[:, 1:].numel())

    return dataclasses.replace(job(), dataset=Jumping(50), heldout=Jumping(7), loss=jumping)


def paced_job() -> TrainingJob:
    """The last stage waits as many seconds as the file ``PACE_FILE`` says; with ``nan`` there
    the loss is that."""

    def paced(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        total, weight = loss(model, batch)
        pace = Path(os.environ["PACE_FILE"])
        text = pace.read_text()
        pace.with_suffix(".now").write_text(text)
        if math.isnan(pace_s := float(text)):
            return total * pace_s, weight
        time.sleep(pace_s)
        return total, weight

    return dataclasses.replace(job(), loss=paced)


def divided_job() -> TrainingJob:
    """As ``paced_job``, with matrices that ranks can divide."""
    plan: dict[str, Any] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    return dataclasses.replace(paced_job(), tensor_plan=plan)


def sleeping_job() -> TrainingJob:
    """As ``paced_job``; the one worker that finds a file ``.sleep`` sleeps for ever."""
    paced = paced_job()

    def sleeping(model: nn.Module, batch: torch.Tensor) -> Any:
        result = paced.loss(model, batch)
        with contextlib.suppress(FileNotFoundError):
            Path(os.environ["PACE_FILE"]).with_suffix(".sleep").unlink()
            threading.Event().wait()
        return result

    return dataclasses.replace(paced, loss=sleeping)


def reading_job() -> TrainingJob:
    """Raises unless the job's data is on the machine, and it runs in its work folder."""
    Path("tiny_job.py").read_text()
    if (words := data_path("words").read_text()) != "hello":
        raise ValueError(f"the data says {words}")
    return paced_job()


def raising_job() -> TrainingJob:
    """Raises in mini-batch 7, counted from 1, in the loss of a worker."""
    trained = 0

    def lr_schedule(step: int) -> float:
        nonlocal trained
        trained = step + 1
        return 1.0

    def raising(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        if trained == 6:
            raise RuntimeError("no loss in mini-batch 7")
        return loss(model, batch)

    return dataclasses.replace(job(), loss=raising, lr_schedule=lr_schedule)
