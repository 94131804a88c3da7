"""The losses of ``spottrain.hf`` are those of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from spottrain import TrainingJob, hf
from spottrain.pipeline.model.tracer import trace

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**TINY)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=3, n_head=2, n_positions=16)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def bert() -> nn.Module:
    config = transformers.BertConfig(**TINY)
    model: nn.Module = transformers.AutoModelForMaskedLM.from_config(config)
    return model


def padded_batch() -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(3)
    tokens = torch.randint(61, (4, 12), generator=dice)
    mask = (torch.arange(12) < torch.tensor([[12], [9], [5], [12]])).long()
    labels = tokens.masked_fill(mask == 0, hf.IGNORED)
    labels[0, :4] = hf.IGNORED  # a prompt
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize(
    ("build", "loss"),
    [
        (llama, hf.causal_lm_loss),
        (gpt2, hf.causal_lm_loss),
        (bert, hf.masked_lm_loss),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_the_models_own_loss(build: Any, loss: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    batch = padded_batch()
    own = model(**batch).loss
    total, weight = loss(model, batch)
    # BERT computes its own loss in the logits' type.
    torch.testing.assert_close(
        (total / weight).to(own.dtype),
        own,
        rtol=1e-6 if dtype is torch.float32 else 1e-2,
        atol=0,
    )


@pytest.mark.parametrize("build", [llama, gpt2])
def test_halves_of_a_batch_add_up(build: Any) -> None:
    torch.manual_seed(0)
    model = build().eval()
    batch = padded_batch()
    halves = [{k: v[part] for k, v in batch.items()} for part in (slice(2), slice(2, 4))]
    sums = [hf.causal_lm_loss(model, half) for half in halves]
    total, weight = hf.causal_lm_loss(model, batch)[:2]
    assert sum(int(x[1]) for x in sums) == int(weight) == 8 + 8 + 4 + 11
    torch.testing.assert_close(torch.stack([x[0] for x in sums]).sum(), total)


def test_without_labels_every_token_that_is_not_hidden_is_predicted() -> None:
    batch = padded_batch()
    del batch["labels"]
    assert int(hf.causal_lm_loss(llama(), batch)[1]) == 11 + 8 + 4 + 11


def test_accuracy_counts_what_is_predicted_right() -> None:
    class Parrot(nn.Module):
        """Predicts the next token to be the present one."""

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(input_ids, 9).float()

    tokens = torch.tensor([[1, 1, 1, 2], [3, 4, 5, 5]])
    result = hf.causal_lm_loss(Parrot(), {"input_ids": tokens}, accuracy=True)
    assert len(result) == 3
    right, weight = result[2]["accuracy"]
    assert (int(right), int(weight)) == (3, 6)
    result = hf.masked_lm_loss(Parrot(), {"input_ids": tokens, "labels": tokens}, accuracy=True)
    assert len(result) == 3
    assert [int(x) for x in result[2]["accuracy"]] == [8, 8]


@pytest.mark.parametrize(("build", "loss"), [(llama, hf.causal_lm_loss), (bert, hf.masked_lm_loss)])
def test_the_model_can_be_cut(build: Any, loss: Any) -> None:
    batch = padded_batch()
    examples = [{k: v[i] for k, v in batch.items()} for i in range(4)]
    job = TrainingJob(
        model=build,
        dataset=examples,
        loss=partial(loss, accuracy=True),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named]),
    )
    layout = trace(job)
    assert layout.num_sections == 3
    assert layout.metrics == ("accuracy",)
