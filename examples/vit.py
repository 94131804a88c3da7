"""Trains a vision transformer on a folder of images, with one folder of them for each class.

A moving average of the weights is kept, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from spottrain import TrainingJob, data_path, optim, schedules

SIZE = int(os.environ.get("SIZE", "224"))  # pixels
PATCH = int(os.environ.get("PATCH", "16"))
LAYERS = int(os.environ.get("LAYERS", "12"))
HEADS = int(os.environ.get("HEADS", "6"))
WIDTH = int(os.environ.get("WIDTH", "384"))
FILES = (".jpg", ".jpeg", ".png", ".webp")
Example = tuple[torch.Tensor, int]
Loss = tuple[torch.Tensor, int, dict[str, tuple[torch.Tensor, int]]]


class Images:
    """Images (3, size, size) and the numbers of their classes."""

    def __init__(self, files: list[tuple[Path, int]], *, augment: bool) -> None:
        self.files, self.augment = files, augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Example:
        path, kind = self.files[index]
        with Image.open(path) as file:
            picture = file.convert("RGB")
        side = min(picture.size)
        left, top = ((length - side) // 2 for length in picture.size)
        if self.augment:  # spottrain seeds each example: the same crop on any machine
            side = int(side * (0.5 + 0.5 * torch.rand(()).item()) ** 0.5)
            left, top = (int(torch.randint(length - side + 1, ())) for length in picture.size)
        picture = picture.resize((SIZE, SIZE), box=(left, top, left + side, top + side))
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        image = pixels.view(SIZE, SIZE, 3).permute(2, 0, 1) / 127.5 - 1
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, kind


def images_by_class(folder: Path) -> list[tuple[Path, int]]:
    """Return all images of a folder, each with its class's place among the folder's folders."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [
        (file, kind)
        for kind, path in enumerate(classes)
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in FILES
    ]


def build() -> nn.Module:
    """Return a ViT with fresh weights."""
    config = ViTConfig(
        image_size=SIZE,
        patch_size=PATCH,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        num_labels=1 + max(kind for _, kind in images_by_class(data_path("images"))),
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
    """Describe the job: one image in twenty is held out."""
    files = images_by_class(data_path("images"))
    return TrainingJob(
        model=build,
        dataset=Images([x for n, x in enumerate(files) if n % 20], augment=True),
        heldout=Images(files[::20], augment=False),
        loss=loss,
        optimizer=lambda named: optim.keep_ema(
            torch.optim.AdamW(optim.decay_groups(named, 0.05), lr=1e-3), 0.98
        ),
        lr_schedule=schedules.wsd(warmup_steps=0.1, decay_steps=0.2),
        clip_grad_norm=1.0,
    )
