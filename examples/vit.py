"""A vision transformer that tells squares, discs and crosses in noise from each other.

Images are drawn from their index, and augmented at random: spottrain seeds each example.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from spottrain import TrainingJob, optim, schedules

SIZE = 32  # pixels
CLASSES = 3
Example = tuple[torch.Tensor, int]
Loss = tuple[torch.Tensor, int, dict[str, tuple[torch.Tensor, int]]]


class Shapes:
    """Images (1, size, size) and their classes."""

    def __init__(self, indices: range, *, augment: bool) -> None:
        self.indices, self.augment = indices, augment

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        dice = torch.Generator().manual_seed(self.indices[index])
        kind = self.indices[index] % CLASSES
        x0, y0 = (12 + 8 * torch.rand(2, generator=dice)).tolist()
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        dx, dy = (x - x0).abs(), (y - y0).abs()
        near, far = torch.minimum(dx, dy), torch.maximum(dx, dy)
        drawn = (far < 8, dx**2 + dy**2 < 81, (near < 3) & (far < 10))[kind]
        image = drawn + 0.3 * torch.randn(SIZE, SIZE, generator=dice)
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image[None], kind


def build() -> nn.Module:
    """Return a small ViT."""
    config = ViTConfig(
        image_size=SIZE,
        patch_size=8,
        num_channels=1,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=192,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    """Return the cross-entropy, and how many images were told right."""
    images, kinds = batch
    logits = model(images).logits
    right = (logits.argmax(-1) == kinds).sum()
    total = F.cross_entropy(logits, kinds, reduction="sum")
    return total, len(kinds), {"accuracy": (right, len(kinds))}


def training_job() -> TrainingJob:
    """Describe the job; the moving average of its weights is kept, too."""
    return TrainingJob(
        model=build,
        dataset=Shapes(range(20_000), augment=True),
        heldout=Shapes(range(20_000, 20_600), augment=False),
        loss=loss,
        optimizer=lambda named: optim.keep_ema(
            torch.optim.AdamW(optim.decay_groups(named, 0.05), lr=1e-3), 0.98
        ),
        lr_schedule=schedules.wsd(warmup_steps=20, decay_steps=0.2),
        clip_grad_norm=1.0,
    )
