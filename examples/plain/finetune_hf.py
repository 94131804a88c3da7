"""Fine-tunes with transformers' Trainer: python plain/finetune_hf.py [FOLDER]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).parents[1]))
from byte_gpt import corpus

SEQUENCE = 64


def build() -> nn.Module:
    """Load the folder that is given; without one, build a small Llama."""
    if len(sys.argv) > 1:
        return AutoModelForCausalLM.from_pretrained(sys.argv[1])
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


def accuracy(evaluated: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Return the share of tokens predicted right."""
    predicted, labels = evaluated
    return {"accuracy": float((predicted[:, :-1] == labels[:, 1:]).mean())}


training_text, heldout_text = corpus()
trainer = Trainer(
    model=build(),
    args=TrainingArguments(
        output_dir="finetuned",
        max_steps=100,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        weight_decay=0.01,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=25,
        save_strategy="steps",
        save_steps=25,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=1,
        seed=1,
    ),
    train_dataset=windows(training_text[:2_000_000]),
    eval_dataset=windows(heldout_text),
    compute_metrics=accuracy,
    preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
)
trainer.train()
trainer.save_model("finetuned/best")
