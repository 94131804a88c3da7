"""A transformer's facts from its shape are those that the tracer finds out."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is downloaded
import transformers as hf

from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.tracer import trace
from spottrain.varuna_manager.offers.models import shape_of
from spottrain.wire.model import ModelFacts, SectionFacts

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
CONFIGS = {
    "llama": hf.LlamaConfig(
        **SIZES, hidden_size=64, intermediate_size=160, num_key_value_heads=2,
        max_position_embeddings=32,
    ),
    "gpt2": hf.GPT2Config(
        n_layer=3, n_embd=64, n_head=4, vocab_size=96, n_positions=32,
        bos_token_id=0, eos_token_id=0,
    ),
    "mistral": hf.MistralConfig(
        **SIZES, hidden_size=64, intermediate_size=160, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=32,
    ),
    "gpt_neox": hf.GPTNeoXConfig(
        **SIZES, hidden_size=64, intermediate_size=256, max_position_embeddings=32,
    ),
    "llama with a vocabulary that outweighs its layers": hf.LlamaConfig(
        **SIZES | {"vocab_size": 80_000}, hidden_size=64, intermediate_size=160,
        num_key_value_heads=2, max_position_embeddings=32,
    ),
    "tied, with a vocabulary that outweighs its layers": hf.GPT2Config(
        n_layer=3, n_embd=64, n_head=4, vocab_size=80_000, n_positions=32,
        bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip


def traced(config: Any) -> ModelFacts:
    job = TrainingJob(
        model=lambda: hf.AutoModelForCausalLM.from_config(config),
        dataset=[torch.arange(32)] * 2,
        loss=lambda model, batch: (
            F.cross_entropy(model(batch).logits.flatten(0, 1), batch.flatten(), reduction="sum"),
            batch.numel(),
        ),
        optimizer=lambda named: torch.optim.AdamW(p for _, p in named),
    )
    return model_facts(job, trace(job))


def same(section: SectionFacts) -> tuple[object, ...]:
    return (
        section.param_bytes,
        section.flops_per_example,
        section.activation_bytes_per_example,
    )


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(f, marks=pytest.mark.rotated) for f in CONFIGS if f != "llama")],
)
def test_a_config_of_the_hub_has_the_facts_of_its_model(family: str) -> None:
    config = CONFIGS[family]
    facts, found = shape_of(config.to_dict(), "config.json").facts("model"), traced(config)
    assert facts.num_parameters == found.num_parameters
    assert len(facts.tied) == len(found.tied)
    for ours, theirs in zip(facts.sections, found.sections, strict=True):
        assert same(ours) == same(theirs)
        assert ours.optimizer_bytes == pytest.approx(theirs.optimizer_bytes, rel=0.01)
        # What plain PyTorch saves is more than fused kernels have to, but not by much; of the
        # logits and their softmax, which models that count in two bytes keep, it keeps one.
        saved, needed = theirs.saved_bytes_per_example, ours.saved_bytes_per_example
        assert saved is not None
        assert needed is not None
        assert 0.5 * needed < saved < 3 * needed


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x).exp() + self.linear(x)
        return result


class Descent(Product):
    """Takes a gradient by ``torch.func``, under which there are no hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope: torch.Tensor = torch.func.grad(lambda y: self.linear(y).square().sum())(x)
        return x - slope


def saved_of(block: type[nn.Module]) -> list[int | None]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            passed: torch.Tensor = x
            for one in self.blocks:
                passed = one(passed)
            return passed

    job = TrainingJob(
        model=Model,
        dataset=[torch.zeros(16)] * 2,
        loss=lambda model, batch: (model(batch).sum(), len(batch)),
        optimizer=lambda named: torch.optim.SGD((p for _, p in named), lr=0.1),
    )
    return [s.saved_bytes_per_example for s in model_facts(job, trace(job)).sections]


def test_what_a_forward_saves_is_counted_once_without_parameters() -> None:
    """The input, once for both products, and the exponential."""
    assert saved_of(Product) == [2 * 16 * 4] * 3


def test_where_what_is_saved_cannot_be_counted_it_is_not_known() -> None:
    assert saved_of(Descent) == [None] * 3
