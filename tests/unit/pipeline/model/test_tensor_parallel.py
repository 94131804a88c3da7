"""Which modules ranks divide, and what is refused before anything is rented."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.tensor_jobs import (
    HEADS,
    PLAN,
    WIDTH,
    Attention,
    Gpt,
    gpt,
    qwen3,
    qwen3_model,
)
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.division import can_divide, try_divided
from spottrain.pipeline.model.checks.repetition import first_tensors, trial_batch
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import TensorStyle, TrainingJob
from spottrain.pipeline.model.loss import LossSums
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tensor_parallel import Shards, find_styles
from spottrain.pipeline.model.tensor_ranks import Absent
from spottrain.pipeline.model.tracer import trace


def test_a_plan_divides_the_modules_that_its_patterns_match() -> None:
    layout = trace(gpt())

    assert layout.undivided == ""
    assert layout.tensor_styles == {
        name.replace("*", str(block)): style for name, style in PLAN.items() for block in (0, 1)
    }
    first, last = model_facts(gpt(), layout).sections
    assert (first.divided_share, first.divided_sums) == (1.0, 2)
    # A block has 12 matrices of 16 x 16, the head is one of 32 x 16 and whole.
    assert (last.divided_share, last.divided_sums) == (12 / 14, 2)


def test_a_transformers_model_is_divided_as_it_says_itself() -> None:
    model = qwen3_model()

    styles = find_styles(model, None, ())

    assert styles["lm_head"] == "colwise_gather_output"
    assert styles["model.layers.0.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert "model.embed_tokens" not in styles
    wrapped = nn.ModuleDict({"inner": model})
    assert find_styles(wrapped, None, ()) == {f"inner.{name}": s for name, s in styles.items()}


def test_a_head_that_is_tied_to_the_embedding_stays_whole() -> None:
    model = qwen3_model()
    model.lm_head.weight = model.model.embed_tokens.weight

    assert "lm_head" not in find_styles(model, None, ())


def test_a_transformers_model_of_unknown_styles_trains_on_whole_matrices_alone() -> None:
    def odd() -> nn.Module:
        model = qwen3_model()
        model._tp_plan["model.layers.*.mlp.up_proj"] = "packed_colwise"
        assert isinstance(model, nn.Module)
        return model

    job = replace(qwen3(), model=odd)
    layout = trace(job)

    assert layout.tensor_styles == {}
    with pytest.raises(UserCodeError, match=r"must be 1 for this model.*packed_colwise"):
        try_divided(job, layout, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.middle": "colwise"}, r"got blocks\.\*\.middle, which none is called"),
        ({"blocks.*.norm": "colwise"}, r"got blocks\.0\.norm, a LayerNorm"),
        ({"blocks.*.up": "sideways"}, "got sideways for"),
        ({"embedding": "colwise"}, "whose weights are tied: got embedding"),
    ],
)
def test_a_plan_of_ones_own_is_refused_in_a_line(
    plan: dict[str, TensorStyle], message: str
) -> None:
    with pytest.raises(UserCodeError, match=message):
        trace(replace(gpt(), tensor_plan=plan))


def whole() -> TrainingJob:
    return replace(gpt(), tensor_plan=None)


def compiled() -> TrainingJob:
    def model() -> nn.Module:
        made = gpt().model()
        assert isinstance(made, Gpt)
        made.blocks[0].compile()
        return made

    return replace(gpt(), model=model)


@pytest.mark.parametrize(
    ("job", "size", "message"),
    [
        (whole, 2, "must be 1 for this model: got 2; the model has no tensor_plan"),
        (gpt, 3, r"must divide the matrices of the model: got 3, and blocks\.0\.\S+ has 16"),
        (gpt, 8, "a rank with one of 8 parts cannot run the model"),
        (qwen3, 4, "4 must divide its heads"),
        (compiled, 2, "for a compiled model: got 2, and blocks.0 is"),
    ],
)
def test_a_number_of_ranks_that_a_model_cannot_have_is_refused(
    job: object, size: int, message: str
) -> None:
    assert callable(job)
    one = job()
    with pytest.raises(UserCodeError, match=message):
        try_divided(one, trace(one), size)
    assert not can_divide(one, trace(one), size)


@pytest.mark.parametrize("job", [gpt, qwen3])
def test_ranks_with_parts_come_to_the_loss_of_one_alone(job: object) -> None:
    assert callable(job)
    try_divided(job(), trace(job()), 2)
    assert can_divide(job(), trace(job()), 2)


class Fused(Attention):
    """Queries, keys and values are one matrix, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query(x).chunk(3, -1)
        query, key, value = (
            one.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in heads
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


def test_a_plan_that_divides_what_is_not_side_by_side_comes_to_another_loss() -> None:
    def model() -> nn.Module:
        made = Gpt()
        for block in made.blocks:
            block.attention = Fused()
        return made

    job = replace(gpt(), model=model)

    with pytest.raises(UserCodeError, match=r"2 ranks come to a loss of .*, one alone to"):
        try_divided(job, trace(job), 2)


@dataclass(frozen=True, slots=True)
class Counting(Absent):
    """Keeps the types of what ranks sum and gather, and how many elements these are."""

    met: list[tuple[str, torch.dtype, int]] = field(default_factory=list)

    def sum(self, tensor: torch.Tensor) -> None:
        self.met.append(("sum", tensor.dtype, tensor.numel()))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self.met.append(("gather", part.dtype, part.numel() * self.size))
        return Absent.gather(self, part)

    def sum_parts(self, whole: torch.Tensor) -> torch.Tensor:
        self.met.append(("scatter", whole.dtype, whole.numel()))
        return Absent.sum_parts(self, whole)


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_sum_activations_and_gradients_in_the_type_of_matrices(*, sequence: bool) -> None:
    job, layout = gpt(), trace(gpt())
    ranks = Counting(2)
    shards = Shards.of(layout, ranks, sequence=sequence)
    tensors = first_tensors(job, layout)
    parts = {section: shards.own_parts(whole) for section, whole in tensors.items()}
    stage = StageModel(job, layout, range(2), parts, precision="bf16", shards=shards)
    batch = trial_batch(job, 0)

    out = stage.forward(batch, [], int)
    forward = [*ranks.met]
    ranks.met.clear()
    assert isinstance(out, LossSums)
    torch.autograd.backward(out.loss)

    narrow, wide = torch.bfloat16, torch.float32
    whole = math.prod(layout.cuts[0].crossing[0].shape(len(batch)))
    if not sequence:
        assert forward == [("sum", narrow, whole)] * 4
        assert ranks.met == [("sum", narrow, whole)] * 4
        return
    # Behind the last block the activation is gathered, too, and before the first one its gradient.
    layers = [("gather", wide, whole), ("scatter", narrow, whole)] * 4
    assert forward == [*layers, ("gather", wide, whole)]
    again = [("gather", narrow, whole)] * 2 + [("scatter", narrow, whole)]
    assert ranks.met == [*again * 4, ("gather", wide, whole)]


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["colwise", "colwise_gather_output", "rowwise"]),
)
def test_parts_are_views_that_make_up_the_whole(size: int, style: TensorStyle) -> None:
    weight, bias = torch.zeros(16, 24), torch.zeros(16)
    for index in range(size):
        shards = Shards({"up": style}, Absent(size, index))
        shards.part_of("up.weight", weight).add_(1)
        shards.part_of("up.bias", bias).add_(1)
        assert shards.is_repeated("norm.weight")
    assert torch.equal(weight, torch.ones_like(weight))
    assert torch.equal(bias, torch.full_like(bias, size if style == "rowwise" else 1))
