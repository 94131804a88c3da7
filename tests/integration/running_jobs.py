"""Models whose forward changes buffers: BatchNorm, spectral norm, averages and counters."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations

from spottrain import TrainingJob

CLASSES, WIDTH, BLOCKS, HELDOUT = 4, 8, 4, 6
Example = tuple[torch.Tensor, int]


class Residual(nn.Module):
    """A block of a residual network, as He et al. (2015) have it, but smooth: the gradient of a
    ReLU jumps where another rounding takes its input to the other side of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm_one = nn.BatchNorm2d(WIDTH)
        self.two = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm_two = nn.BatchNorm2d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.silu(self.norm_one(self.one(x)))
        return F.silu(x + self.norm_two(self.two(inner)))


class ResNet(nn.Module):
    """A small one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.stem(pictures)))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


class Averaging(nn.Module):
    """Subtracts an average of what it has seen, and counts; its average is replaced."""

    average: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average = 0.5 * self.average + 0.5 * x.detach().mean((0, 2, 3))
            self.calls += 1
        inner = x.movedim(1, 3) - self.average
        return x + torch.tanh(self.linear(inner)).movedim(3, 1)


class Odd(ResNet):
    """With what changes other buffers than BatchNorm's, on which results depend."""

    def __init__(self) -> None:
        super().__init__()
        for k in (1, 2):
            self.blocks[k] = Averaging()


class Pictures:
    """Noise with a bright spot, by class."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Example:
        label = index % CLASSES
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        noise[:, :, 2 * label : 2 * label + 2] += 2.0
        return noise, label


def collate(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    pictures, labels = zip(*examples, strict=True)
    return torch.stack(pictures), torch.tensor(labels)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels, reduction="sum"), float(len(labels))


def _job(model: type[nn.Module]) -> TrainingJob:
    return TrainingJob(
        model=model,
        dataset=Pictures(1000),
        collate=collate,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        heldout=Pictures(HELDOUT),
    )


def resnet() -> TrainingJob:
    return _job(ResNet)


def odd() -> TrainingJob:
    return _job(Odd)
