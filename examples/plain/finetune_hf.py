"""Fine-tunes with transformers' Trainer: python plain/finetune_hf.py MODEL TEXT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

CONTEXT = 1024  # tokens of an example
MODEL, TEXT = sys.argv[1:]


def windows() -> list[dict[str, torch.Tensor]]:
    """Return the texts, one after the other, as examples of ``CONTEXT`` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokens: list[int] = []
    for file in sorted(Path(TEXT).rglob("*.txt")):
        tokens += [*tokenizer(file.read_text()).input_ids, tokenizer.eos_token_id]
    return [{"input_ids": x, "labels": x} for x in torch.tensor(tokens).split(CONTEXT)[:-1]]


def accuracy(evaluated: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Return the share of tokens predicted right."""
    predicted, labels = evaluated
    return {"accuracy": float((predicted[:, :-1] == labels[:, 1:]).mean())}


examples = windows()
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(MODEL),
    args=TrainingArguments(
        output_dir="finetuned",
        max_steps=100,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=2e-5,
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
    train_dataset=examples[len(examples) // 20 :],
    eval_dataset=examples[: len(examples) // 20],
    compute_metrics=accuracy,
    preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
)
trainer.train()
trainer.save_model("finetuned/best")
