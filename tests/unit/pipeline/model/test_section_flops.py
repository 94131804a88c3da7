"""The tracer counts the matrix multiplications of each section's forward."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import costly
from tests.unit.pipeline.blocks import WIDTH, make_job, plain
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is downloaded
import itertools

import transformers as hf

from spottrain.morphing.plan.flops import model_flops_per_example
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.pipeline.model.checks.division import can_divide
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import CutPoint, TrainingJob
from spottrain.pipeline.model.recorder import Recorder
from spottrain.pipeline.model.tracer import trace
from spottrain_lab.planners.gpt import gpt_shape, minibatch_flops

EXAMPLES = Path(__file__).parents[4] / "examples"
LINEAR = 2 * WIDTH * WIDTH
"""FLOPs of one of the small model's layers over one example."""


def flops(job: TrainingJob) -> tuple[int, ...]:
    return trace(job).flops_per_example


# --- Against values computed by hand ----------------------------------------------------


def test_a_section_has_the_flops_of_what_runs_in_it() -> None:
    assert flops(make_job(plain)) == (2 * LINEAR, LINEAR, LINEAR, 2 * LINEAR)


def of_gpt(shape: TransformerShape) -> tuple[int, ...]:
    """One section for each layer, the logits in the last."""
    layers = [shape.layer_flops] * shape.layers
    layers[-1] += shape.head_flops
    return tuple(layers)


@pytest.mark.rotated
def test_the_byte_gpt_has_the_flops_of_the_formula() -> None:
    job = load_job("byte_gpt:training_job", EXAMPLES)
    shape = gpt_shape(layers=8, hidden=144, context=64, vocabulary=256)
    assert flops(job) == of_gpt(shape)
    facts = model_facts(job, trace(job))
    per_minibatch = minibatch_flops(shape, 32, recompute=False)
    assert 32 * (model_flops_per_example(facts) or 0) == per_minibatch


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("layers", "hidden", "heads", "length"), [(3, 32, 4, 16), (2, 48, 3, 7)])
def test_a_gpt2_of_hugging_face_has_the_flops_of_the_formula(
    attention: str, layers: int, hidden: int, heads: int, length: int
) -> None:
    config = hf.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=64,
        n_positions=length, bos_token_id=0, eos_token_id=0,
        attn_implementation=attention,
    )  # fmt: skip
    job = TrainingJob(
        model=lambda: hf.GPT2LMHeadModel(config),
        dataset=[torch.arange(length)] * 2,
        loss=lambda model, batch: (model(batch).logits.mean(), len(batch)),
        optimizer=lambda named: torch.optim.AdamW(p for _, p in named),
    )
    shape = gpt_shape(layers=layers, hidden=hidden, context=length, vocabulary=64)
    assert flops(job) == of_gpt(shape)


def test_a_llama_of_hugging_face_is_divided_as_its_shape_says() -> None:
    shape = TransformerShape(
        layers=2, hidden=32, heads=4, key_value_heads=2, head_size=8, feed_forward=64,
        is_gated=True, vocabulary=64, context=16,
    )  # fmt: skip
    config = hf.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, vocab_size=64, max_position_embeddings=16,
    )  # fmt: skip
    job = TrainingJob(
        model=lambda: hf.LlamaForCausalLM(config),
        dataset=[torch.arange(16)] * 2,
        loss=lambda model, batch: (model(batch).logits.mean(), len(batch)),
        optimizer=lambda named: torch.optim.AdamW(p for _, p in named),
    )
    layout = trace(job)
    built, told = (
        [
            (one.divided_share, one.divided_bytes, one.divided_sums, one.divided_gathers)
            for one in facts.sections
        ]
        for facts in (model_facts(job, layout), shape.facts("llama"))
    )
    assert built == told
    assert [size for size in (2, 4, 8) if can_divide(job, layout, size)] == [*shape.tensor_sizes]


class Convolutions(nn.Module):
    """Of 12x12 pixels: to 4 channels, to 8 at half the size in groups, to a class."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.cut = CutPoint()
        self.second = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 2, 2, stride=2)
        self.head = nn.Linear(2, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(self.first(x))
        x = self.up(self.second(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def test_a_convolutional_network() -> None:
    first = 2 * (12 * 12) * 4 * (3 * 9)
    second = 2 * (6 * 6) * 8 * (2 * 9)  # each output sees 2 of the 4 channels
    up = 2 * (6 * 6) * 8 * (2 * 4)  # each input writes 2 channels of 2x2
    job = make_job(plain, model=Convolutions, dataset=[torch.ones(3, 12, 12)] * 2)
    assert flops(job) == (first, second + up + 2 * 2 * 10)


OTHERS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {
    "mv": (torch.mv, [(3, 4), (4,)], 2 * 3 * 4),
    "addmv": (torch.addmv, [(3,), (3, 4), (4,)], 2 * 3 * 4),
    "dot": (torch.dot, [(4,), (4,)], 2 * 4),
    "addbmm": (torch.addbmm, [(2, 4), (3, 2, 5), (3, 5, 4)], 3 * 2 * 2 * 5 * 4),
    "baddbmm": (torch.baddbmm, [(3, 2, 4), (3, 2, 5), (3, 5, 4)], 3 * 2 * 2 * 5 * 4),
    "einsum": (
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        [(3, 2, 5), (3, 5, 4)],
        3 * 2 * 2 * 5 * 4,
    ),
    "attention": (
        F.scaled_dot_product_attention,
        [(2, 3, 8, 4), (2, 3, 6, 4), (2, 3, 6, 4)],
        2 * (2 * 2 * 3 * 8 * 6 * 4),
    ),
    "attention of grouped queries": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 4, 8, 4), (2, 2, 8, 4), (2, 2, 8, 4)],
        2 * (2 * 2 * 4 * 8 * 8 * 4),
    ),
    "experts": (
        lambda a, b: F.grouped_mm(
            a.bfloat16(), b.bfloat16(), offs=torch.tensor([3, 8], dtype=torch.int32)
        ),
        [(8, 16), (2, 16, 24)],
        2 * 8 * 16 * 24,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_operation_counts_the_same_on_both_devices(name: str, device: str) -> None:
    operation, shapes, expected = OTHERS[name]
    with torch.device(device):
        tensors = [torch.ones(shape, requires_grad=True) for shape in shapes]
        recorder = Recorder()
        with recorder:
            operation(*tensors)
    assert recorder.facts.flops == {0: expected}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_lstm_counts_its_steps(device: str) -> None:
    lstm = nn.LSTM(4, 5, num_layers=2, device=device).requires_grad_(False)
    recorder = Recorder()
    with recorder:
        lstm(torch.ones(7, 3, 4, device=device))
    layers = 4 * 5 * (4 + 5) + 4 * 5 * (5 + 5)
    assert recorder.facts.flops == {0: 2 * 7 * 3 * layers}


def test_a_loss_that_reads_values_has_the_same_flops() -> None:
    def reading(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) * float(x.sum())

    assert flops(make_job(reading)) == flops(make_job(plain))


# --- Properties -------------------------------------------------------------------------


@given(st.sets(st.integers(1, 7), min_size=1))
@costly
def test_the_sum_over_sections_does_not_depend_on_the_cut(cuts: set[int]) -> None:
    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for index in range(8):
            layers += [CutPoint()] if index in cuts else []
            layers += [nn.Linear(4 + index, 5 + index), nn.ReLU()]
        return nn.Sequential(*layers)

    job = make_job(plain, model=model)
    per_section = flops(job)
    assert len(per_section) == len(cuts) + 1
    assert sum(per_section) == sum(2 * (4 + k) * (5 + k) for k in range(8))
    bounds = [0, *sorted(cuts), 8]
    assert per_section == tuple(
        sum(2 * (4 + k) * (5 + k) for k in range(begin, end))
        for begin, end in itertools.pairwise(bounds)
    )
