"""Models that spend their memory differently, for tests of the memory model."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain import TrainingJob
from spottrain.optim import keep_masters

BLOCKS = 8
EXAMPLES = 4096


class Perceptron(nn.Module):
    """Few parameters, large activations: many rows go through each block."""

    ROWS, WIDTH = 2048, 64

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(self.WIDTH, 2 * self.WIDTH),
                nn.ReLU(),
                nn.Linear(2 * self.WIDTH, self.WIDTH),
                nn.Tanh(),
            )
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Rows:
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(Perceptron.ROWS, Perceptron.WIDTH, generator=generator)


def perceptron_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    out = model(batch)
    return (out - batch).square().sum(), float(out.numel())


def perceptron_job() -> TrainingJob:
    return TrainingJob(
        model=Perceptron,
        dataset=Rows(),
        heldout=None,
        loss=perceptron_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3, momentum=0.9),
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.inner(x))


class Language(nn.Module):
    """A large embedding before small blocks, a head of its own behind them."""

    VOCABULARY, WIDTH, SEQUENCE = 8192, 64, 64

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.blocks = nn.ModuleList(Residual(self.WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Tokens:
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        shape = (Language.SEQUENCE + 1,)
        return torch.randint(0, Language.VOCABULARY, shape, generator=generator)


def language_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    logits = model(batch[:, :-1])
    targets = batch[:, 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return total, float(targets.numel())


def language_job() -> TrainingJob:
    return TrainingJob(
        model=Language,
        dataset=Tokens(),
        heldout=None,
        loss=language_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )


class Wide(nn.Module):
    """Nearly all parameters are in matrices that ranks can divide; small activations."""

    ROWS, WIDTH = 8, 256

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(self.WIDTH, 4 * self.WIDTH),
                nn.GELU(),
                nn.Linear(4 * self.WIDTH, self.WIDTH),
            )
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class WideRows:
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(Wide.ROWS, Wide.WIDTH, generator=generator)


def wide_job() -> TrainingJob:
    return TrainingJob(
        model=Wide,
        dataset=WideRows(),
        heldout=None,
        loss=perceptron_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        tensor_plan={"blocks.*.0": "colwise", "blocks.*.2": "rowwise"},
    )


def frozen_job() -> TrainingJob:
    """The embedding and half of the blocks are not trained."""

    def model() -> nn.Module:
        language = Language()
        for module in (language.embedding, *language.blocks[: BLOCKS // 2]):
            module.requires_grad_(False)
        return language

    return dataclasses.replace(language_job(), model=model)


def masters_job() -> TrainingJob:
    """Parameters of bf16 with masters of fp32 in the optimizer."""
    return dataclasses.replace(
        language_job(),
        model=lambda: Language().bfloat16(),
        optimizer=lambda named: keep_masters(torch.optim.AdamW(named, lr=1e-3)),
    )
