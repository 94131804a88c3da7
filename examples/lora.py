"""LoRA adapters, by peft, on the model of finetune_hf.py; the base stays as it is."""

from __future__ import annotations

import dataclasses

import finetune_hf
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from spottrain import TrainingJob


def build() -> nn.Module:
    """Return the model with adapters on its attention; only these are trained."""
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    return get_peft_model(finetune_hf.build(), config)


def training_job() -> TrainingJob:
    """Describe the job: the fine-tune's, but for model and optimizer."""
    return dataclasses.replace(
        finetune_hf.training_job(),
        model=build,
        optimizer=lambda named: torch.optim.AdamW((p for _, p in named), lr=3e-3),
    )
