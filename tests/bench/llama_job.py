"""A Llama from a configuration, on random tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForCausalLM

from spottrain import TrainingJob

VOCABULARY, SEQUENCE = 1024, 128


class Tokens:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator)


def model() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            intermediate_size=1408,
            use_cache=False,
        )
    )


def loss(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
    logits, targets = model(batch[:, :-1]).logits, batch[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), float(len(targets))


def job() -> TrainingJob:
    return TrainingJob(
        model=model,
        dataset=Tokens(),
        loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
    )
