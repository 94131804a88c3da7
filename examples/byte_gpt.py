"""A byte-level GPT that learns the source text of the Python standard library.

Plain PyTorch, written as for one device; spottrain cuts it into stages by itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain import TrainingJob

VOCABULARY = 256  # bytes
SEQUENCE = 64
BLOCKS = 8
WIDTH = 144
HEADS = 4
DROPOUT = 0.1
PEAK_LR = 4e-3
WARM_UP_STEPS = 30
HELDOUT_BYTES = 16 * 1024


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations (batch, sequence, width) to the same shape."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes; input and output embedding are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQUENCE, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, sequence, vocabulary) for tokens (batch, sequence)."""
        x = self.dropout(self.embedding(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Windows:
    """Non-overlapping windows of a text, each with its next bytes as targets."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // SEQUENCE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * SEQUENCE
        window = self.text[start : start + SEQUENCE + 1].long()
        return window[:-1], window[1:]


@functools.cache
def corpus() -> tuple[bytes, bytes]:
    """Return (training text, held-out text); one file in 20 is held out."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, files in os.walk(library):
        folders[:] = set(folders) - {"test", "tests", "site-packages"}
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    texts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(paths):
        name = str(path.relative_to(library))
        held_out = hashlib.sha256(name.encode()).digest()[0] % 20 == 0
        texts[held_out].append(path.read_bytes())
    return b"".join(texts[False]), b"".join(texts[True])[:HELDOUT_BYTES]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Return the sum of the cross-entropy over all bytes, in nats, and their number."""
    tokens, targets = batch
    logits = model(tokens)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, float(targets.numel())


def training_job() -> TrainingJob:
    """Describe the job; spottrain passes the number of steps in the environment."""
    steps = int(os.environ.get("SPOTTRAIN_STEPS", "500"))
    training_text, heldout_text = corpus()

    def lr_factor(step: int) -> float:
        warm_up = (step + 1) / WARM_UP_STEPS
        return min(warm_up, max(0.0, (steps - step) / max(1, steps - WARM_UP_STEPS)))

    return TrainingJob(
        model=ByteGPT,
        dataset=Windows(training_text),
        heldout=Windows(heldout_text),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(
            (parameter for _, parameter in named), lr=PEAK_LR
        ),
        lr_schedule=lr_factor,
        clip_grad_norm=1.0,
    )
