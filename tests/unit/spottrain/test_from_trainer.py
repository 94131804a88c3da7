"""A job made of what a Trainer is given trains as that Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import first_always
from torch import nn

from spottrain import hf
from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.tracer import trace
from spottrain.schedules import STEPS_VARIABLE

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, MINIBATCH = 6, 4
SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEPS_VARIABLE, str(STEPS))


def build() -> nn.Module:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**SMALL)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def examples() -> list[dict[str, Any]]:
    """Return examples with labels, and a column that the model does not take."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (STEPS * MINIBATCH, 12), generator=drawn)
    labels = tokens.clone()
    labels[::3, :7] = hf.IGNORED
    return [
        {"input_ids": a, "labels": b, "attention_mask": torch.ones_like(a), "source": "book"}
        for a, b in zip(tokens, labels, strict=True)
    ]


def arguments(folder: Path, **more: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MINIBATCH // 2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )


class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
    """Takes examples as they come."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trained(job: TrainingJob) -> nn.Module:
    """Train a job as its fields say."""
    model = job.model()
    model.train()
    optimizer = job.optimizer(list(model.named_parameters()))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert job.lr_schedule is not None
    for step in range(STEPS):
        chosen = range(step * MINIBATCH, (step + 1) * MINIBATCH)
        total, weight = job.loss(model, job.collate([job.dataset[i] for i in chosen]))[:2]
        torch.autograd.backward(total / weight)
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * job.lr_schedule(step)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    "more",
    first_always(
        [
            {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine"},
            {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.1, "warmup_steps": 3},
            {"optim": "adafactor", "learning_rate": 1e-2, "lr_scheduler_type": "constant"},
        ]
    ),
    ids=["adamw", "sgd", "adafactor"],
)
def test_weights_are_those_of_the_trainer(tmp_path: Path, more: dict[str, Any]) -> None:
    args = arguments(tmp_path, **more)
    trainer = InOrder(model=build(), args=args, train_dataset=examples())
    trainer.train()
    job = hf.from_trainer(args, build, examples())
    found, wanted = trained(job).state_dict(), trainer.model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-4, atol=2e-6, msg=name)


def test_its_model_can_be_cut(tmp_path: Path) -> None:
    job = hf.from_trainer(arguments(tmp_path), build, examples(), eval_dataset=examples()[:4])
    assert not trace(job).uncut
    assert set(job.heldout_sets) == {"heldout"}


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match=r"label_smoothing_factor is not supported: got 0\.1"):
        hf.from_trainer(arguments(tmp_path, label_smoothing_factor=0.1), build, examples())
    args = arguments(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps")
    with pytest.raises(UserCodeError, match="does not follow from the step alone"):
        hf.from_trainer(args, build, examples())
    with pytest.raises(UserCodeError, match="must be a function that builds a new model"):
        hf.from_trainer(arguments(tmp_path), build(), examples())


def test_other_models_need_a_loss(tmp_path: Path) -> None:
    def classifier() -> nn.Module:
        config = transformers.LlamaConfig(**SMALL, num_labels=3, pad_token_id=0)
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
        return model

    with pytest.raises(UserCodeError, match="no loss is known for LlamaForSequenceClassification"):
        hf.from_trainer(arguments(tmp_path), classifier, examples())
