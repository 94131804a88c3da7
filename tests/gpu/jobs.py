"""Models that the tests train, as a user would write them for one GPU."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain import TrainingJob
from spottrain.pipeline.model.job import TensorStyle


@dataclass(frozen=True)
class Size:
    """Of a GPT."""

    blocks: int
    width: int
    heads: int
    vocabulary: int = 50304
    """GPT-2's 50257, padded to a multiple of 128."""
    sequence: int = 1024
    dropout: float = 0.0


_WRONG = 20
"""Index of an example, in a job with a wrong one."""
TINY = Size(4, 32, 2, vocabulary=64, sequence=16, dropout=0.1)
SMALL = Size(4, 64, 2, vocabulary=128, sequence=32)
DEEP = Size(8, 64, 2, vocabulary=64, sequence=8)
"""Most of whose memory is that of parameters."""
GPT2_124M = Size(12, 768, 12)
GPT2_1558M = Size(48, 1600, 25)
TENSOR_PLAN: dict[str, TensorStyle] = {
    "blocks.*.attention.qkv": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.feed_forward.up": "colwise",
    "blocks.*.feed_forward.down": "rowwise",
}
"""How ranks divide the matrices of a block."""


class Attention(nn.Module):
    """Causal, of several heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.chance = size.heads, size.dropout
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        # Head after head, so that ranks may divide them.
        qkv = self.qkv(x).view(batch, length, -1, 3, width // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        chance = self.chance if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
        mixed: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """Of each position alone."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return made


class Block(nn.Module):
    """Attention and feed-forward, normalised before (GPT-2)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.chance = size.dropout
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        made = self.feed_forward(self.norm2(x))
        return x + F.dropout(made, self.chance, self.training)


class Gpt(nn.Module):
    """GPT-2, its output tied to its embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                scale = 0.02 / math.sqrt(2 * size.blocks) if deep else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class Tokens:
    """Random tokens of a small part of the vocabulary, the same for each index."""

    def __init__(self, length: int, size: Size) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        shape = (self.size.sequence + 1,)
        return torch.randint(0, self.size.vocabulary // 8, shape, generator=generator)


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return sum and number of the losses of all tokens."""
    logits = model(batch[:, :-1])
    targets = batch[:, 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return total, float(targets.numel())


def make(
    size: Size, *, rate: float = 6e-4, fused: bool = True, compiled: bool = False
) -> TrainingJob:
    """Return the job of a GPT of this size."""

    def model() -> nn.Module:
        made = Gpt(size)
        for block in made.blocks if compiled else ():
            block.compile()
        return made

    return TrainingJob(
        model=model,
        dataset=Tokens(100_000, size),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=rate, fused=fused),
        clip_grad_norm=1.0,
        tensor_plan=TENSOR_PLAN,
    )


def tiny() -> TrainingJob:
    """Return a job with all that makes exactness hard: ties, dropout, clipping."""
    return dataclasses.replace(
        make(TINY, rate=1e-2, fused=False),
        dataset=Tokens(50, TINY),
        lr_schedule=lambda step: min(1.0, (step + 1) / 3),
        clip_grad_norm=0.5,
    )


def tiny_fused() -> TrainingJob:
    """Return the same with a fused optimizer."""
    return dataclasses.replace(tiny(), optimizer=make(TINY, rate=1e-2).optimizer)


def exploding() -> TrainingJob:
    """Return a job whose losses are not finite until their scale has come down."""

    def scaled(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        total, weight = loss(model, batch)
        return total * 64, weight * 64

    return dataclasses.replace(tiny(), loss=scaled)


def endless() -> TrainingJob:
    """Return a job whose loss is never a number."""

    def broken(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        total, weight = loss(model, batch)
        return total * math.nan, weight

    return dataclasses.replace(tiny(), loss=broken)


def greedy() -> TrainingJob:
    """Return a job that asks for more memory than any GPU has."""

    def much(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        if not batch.is_meta and batch.is_cuda:
            torch.empty(1 << 42, dtype=torch.uint8, device=batch.device)
        return loss(model, batch)

    return dataclasses.replace(tiny(), loss=much)


def out_of_range() -> TrainingJob:
    """Return a job whose third mini-batch has a token that the vocabulary lacks."""

    class Wrong(Tokens):
        def __getitem__(self, index: int) -> torch.Tensor:
            tokens = super().__getitem__(index)
            return tokens + self.size.vocabulary if index == _WRONG else tokens

    return dataclasses.replace(tiny(), dataset=Wrong(50, TINY))


def calling_cuda() -> TrainingJob:
    """Return a job whose model moves itself to a GPU."""
    return dataclasses.replace(tiny(), model=lambda: Gpt(TINY).cuda())


def small() -> TrainingJob:
    """Return a job like the large ones, for machines without a GPU."""
    return make(SMALL)


def deep() -> TrainingJob:
    """Return a job whose activations are small beside its parameters."""
    return make(DEEP)


def gpt2_124m() -> TrainingJob:
    """Return GPT-2 with 124 million parameters."""
    return make(GPT2_124M)


def small_compiled() -> TrainingJob:
    """Return the small job, its blocks compiled."""
    return make(SMALL, compiled=True)


def gpt2_124m_compiled() -> TrainingJob:
    """Return GPT-2 with 124 million parameters, its blocks compiled."""
    return make(GPT2_124M, compiled=True)


def gpt2_1558m() -> TrainingJob:
    """Return GPT-2 with 1558 million parameters."""
    return make(GPT2_1558M, rate=2e-4)


SIZES = {
    "small": SMALL,
    "small_compiled": SMALL,
    "gpt2_124m": GPT2_124M,
    "gpt2_124m_compiled": GPT2_124M,
    "gpt2_1558m": GPT2_1558M,
}
"""Of jobs whose speed is measured, by entrypoint."""
