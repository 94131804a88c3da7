"""Models whose matrices several ranks can divide: by hand, and one of transformers."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from tests.integration.tiny_job import Tokens, loss
from torch import nn

from spottrain import TrainingJob
from spottrain.pipeline.model.job import TensorStyle

WIDTH, HEADS, BLOCKS = 16, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No softmax depends on a bias of keys: its gradient would be round-off alone.
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(float(os.environ.get("TENSOR_SLEEP_S", "0")))
        x = x + self.attention(self.norm(x))
        made: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return made


class Gpt(nn.Module):
    """Its embedding is tied to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


PLAN: dict[str, TensorStyle] = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


def gpt() -> TrainingJob:
    return TrainingJob(
        model=Gpt,
        dataset=Tokens(50),
        heldout=Tokens(7),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        clip_grad_norm=0.5,
        tensor_plan=PLAN,
    )


class DroppedGpt(Gpt):
    """It drops out before its blocks, between their matrices, among them and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        for block in self.blocks:
            for name in ("norm", "up", "down"):
                setattr(block, name, nn.Sequential(getattr(block, name), nn.Dropout(0.1)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.dropout(self.norm(x)), self.embedding.weight)


def dropped() -> TrainingJob:
    plan = {f"{name}.0" if "attention" not in name else name: style for name, style in PLAN.items()}
    return replace(gpt(), model=DroppedGpt, tensor_plan=plan)


def uneven() -> TrainingJob:
    """Some micro-batches are of 7 tokens."""

    def cropped(examples: list[torch.Tensor]) -> torch.Tensor:
        batch = torch.stack(examples)
        return batch[:, :-1] if batch[0, 0] % 4 == 0 else batch

    return replace(gpt(), collate=cropped)


def qwen3_model() -> Any:
    """Its queries and keys go through norms, whose weights all heads share."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            intermediate_size=32,
            tie_word_embeddings=False,
        )
    )


def qwen3() -> TrainingJob:
    def logits_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        return loss(lambda tokens: model(tokens, use_cache=False).logits, batch)  # type: ignore[arg-type]

    return TrainingJob(
        model=qwen3_model,
        dataset=Tokens(50),
        heldout=Tokens(7),
        loss=logits_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        clip_grad_norm=0.5,
    )


def without_norms() -> TrainingJob:
    """A plan that says nothing of the norms that get parts."""
    plan = {n: style for n, style in qwen3_model()._tp_plan.items() if "norm" not in n}
    return replace(qwen3(), tensor_plan={n: s for n, s in plan.items() if "embed" not in n})
