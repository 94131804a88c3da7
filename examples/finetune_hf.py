"""Fine-tunes a model of transformers; plain/finetune_hf.py is the same with Trainer."""

from __future__ import annotations

import os
from functools import partial

import torch
from byte_gpt import corpus
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from spottrain import TrainingJob, hf, optim, schedules

SEQUENCE = 64


def build() -> nn.Module:
    """Load the folder that MODEL names; without one, build a small Llama."""
    if folder := os.environ.get("MODEL"):
        return AutoModelForCausalLM.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    return AutoModelForCausalLM.from_config(config)


def windows(text: bytes) -> list[dict[str, torch.Tensor]]:
    """Return a text as examples of ``SEQUENCE`` tokens, which are its bytes."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": x, "labels": x} for x in tokens.split(SEQUENCE)[:-1]]


def training_job() -> TrainingJob:
    """Describe the job; steps, batch sizes and evaluations are in finetune_hf.yaml."""
    training_text, heldout_text = corpus()
    return TrainingJob(
        model=build,
        dataset=windows(training_text[:2_000_000]),
        heldout=windows(heldout_text),
        loss=partial(hf.causal_lm_loss, accuracy=True),
        optimizer=lambda named: torch.optim.AdamW(optim.decay_groups(named, 0.01), lr=1e-3),
        lr_schedule=schedules.cosine(warmup_steps=10),
        clip_grad_norm=1.0,
    )
