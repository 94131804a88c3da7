"""A small T5, whose encoder's output passes every cut of its decoder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from spottrain import TrainingJob

if TYPE_CHECKING:
    from tests.integration import tiny_job
else:
    import tiny_job


def build() -> nn.Module:
    config = T5Config(
        num_layers=3, d_model=32, d_kv=8, d_ff=64, num_heads=4, vocab_size=32,
        decoder_start_token_id=0,
    )  # fmt: skip
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


def loss(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    time.sleep(float(Path(os.environ["PACE_FILE"]).read_text()))
    mean: Any = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:].clone()).loss
    number = float(tokens[:, 1:].numel())
    return mean * number, number


def job() -> TrainingJob:
    return TrainingJob(
        model=build,
        dataset=tiny_job.Tokens(50),
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        clip_grad_norm=0.5,
    )
