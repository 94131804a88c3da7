"""Fine-tunes a model of transformers on text; plain/finetune_hf.py is the same with Trainer.

The folders of the model and of the text, .txt files, are named in the job file.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from spottrain import TrainingJob, data_path, hf, optim, schedules

CONTEXT = int(os.environ.get("CONTEXT", "1024"))  # tokens of an example


def build() -> nn.Module:
    """Load the model that was downloaded, or written by save_pretrained."""
    return AutoModelForCausalLM.from_pretrained(data_path("model"))


def windows() -> list[dict[str, torch.Tensor]]:
    """Return the texts, one after the other, as examples of ``CONTEXT`` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(data_path("model"))
    tokens: list[int] = []
    for file in sorted(data_path("text").rglob("*.txt")):
        tokens += [*tokenizer(file.read_text()).input_ids, tokenizer.eos_token_id]
    return [{"input_ids": x, "labels": x} for x in torch.tensor(tokens).split(CONTEXT)[:-1]]


def training_job() -> TrainingJob:
    """Describe the job; steps, batch sizes and evaluations are in the job file."""
    examples = windows()
    return TrainingJob(
        model=build,
        dataset=examples[len(examples) // 20 :],
        heldout=examples[: len(examples) // 20],
        loss=partial(hf.causal_lm_loss, accuracy=True),
        optimizer=lambda named: torch.optim.AdamW(optim.decay_groups(named, 0.01), lr=2e-5),
        lr_schedule=schedules.cosine(warmup_steps=10),
        clip_grad_norm=1.0,
    )
