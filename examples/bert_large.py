"""Pretrains a BERT-large: predicts masked tokens of your own text, see ``pretrain.py``."""

from __future__ import annotations

import os

import torch
from pretrain import CONTEXT, VOCABULARY, Windows
from torch import nn
from transformers import BertConfig, BertForMaskedLM

from spottrain import TrainingJob, data_path, hf, optim, schedules

LAYERS = int(os.environ.get("LAYERS", "24"))
HEADS = int(os.environ.get("HEADS", "16"))
WIDTH = int(os.environ.get("WIDTH", "1024"))
MASKED = 0.15
MASK = 4
"""Id of the token that hides others."""


class MaskedWindows(Windows):
    """Windows of tokens of which some are to be predicted; each has its own, always the same."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        drawn = torch.rand(len(tokens), generator=torch.Generator().manual_seed(index))
        is_masked = drawn < MASKED
        # Of these a tenth is another token, and a tenth stays.
        other = torch.randint(
            VOCABULARY, (len(tokens),), generator=torch.Generator().manual_seed(index + 1)
        )
        inputs = torch.where(drawn < 0.8 * MASKED, MASK, tokens)
        inputs = torch.where(is_masked & (drawn >= 0.9 * MASKED), other, inputs)
        return {"input_ids": inputs, "labels": torch.where(is_masked, tokens, hf.IGNORED)}


def build() -> nn.Module:
    """Return a BERT with fresh weights."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=CONTEXT,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
        )
    )


def training_job() -> TrainingJob:
    """Describe the job; steps, batch sizes and evaluations are in the job file."""
    return TrainingJob(
        model=build,
        dataset=MaskedWindows(data_path("tokens") / "train.bin"),
        heldout=MaskedWindows(data_path("tokens") / "val.bin"),
        loss=hf.masked_lm_loss,
        optimizer=lambda named: torch.optim.AdamW(optim.decay_groups(named, 0.01), lr=1e-4),
        lr_schedule=schedules.cosine(warmup_steps=0.01, final=0.0),
        clip_grad_norm=1.0,
    )
