"""Any tensors pass cuts, and neither loss nor gradients depend on where the cuts are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from tests.chains import batch_of, run_chain, same_bits, seeds, tensors_of
from tests.tiers import first_always
from tests.unit.pipeline.blocks import WIDTH, Blocks, linear, make_job, plain
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.layout import as_sent, format_of
from spottrain.pipeline.model.checks.rehearsal import rehearse
from spottrain.pipeline.model.data import seed_everything
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import CutPoint, TrainingJob
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tracer import trace
from spottrain.wire.model import Precision
from tests import families


def residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = x + block(x)
    return self.head(x)  # type: ignore[no-any-return]


def residual_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x += block(x * 2)
        x *= 0.5
    return self.head(x)  # type: ignore[no-any-return]


def reverse(self: Any, x: torch.Tensor) -> torch.Tensor:
    for block in reversed(self.blocks):
        x = block(x)
    return self.head(x)  # type: ignore[no-any-return]


def recomputed(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = x + checkpoint(block, nn.functional.dropout(x), use_reentrant=True)
    return x


def skipping(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As a UNet does."""
    first = self.blocks[0](x)
    second = self.blocks[1](first)
    return self.blocks[3](self.blocks[2](second) + first)  # type: ignore[no-any-return]


def over_all(self: Any, x: torch.Tensor) -> torch.Tensor:
    outputs = []
    for block in self.blocks:
        x = block(x)
        outputs.append(x)
    return torch.cat(outputs)


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return x * self.scale(condition)  # type: ignore[no-any-return]


def conditioned(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As diffusion models do with a timestep."""
    condition = self.embed(x)
    for block in self.blocks:
        x = block(x, condition)
    return x


class TwoStreams(nn.Module):
    """Of which one is turned over, and integers go along."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()

    def forward(self, streams: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = streams["x"], streams["y"]
        chosen = (x + streams["chosen"][:, None]).argmax(-1)
        return {"chosen": chosen, "y": (y.T + self.one(x).T).T, "x": self.other(y).relu() + x}


def two_streams(self: Any, x: torch.Tensor) -> torch.Tensor:
    streams = {"x": self.embed(x), "y": x, "chosen": torch.zeros(len(x), dtype=torch.int64)}
    for block in self.blocks:
        streams = block(streams)
    return self.head(streams["x"] + streams["y"]) * streams["chosen"][:, None]  # type: ignore[no-any-return]


class ManyWords(nn.Module):
    """A model whose embedding and head are larger than its blocks."""

    def __init__(self, *, tied: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.embed, self.drop = nn.Embedding(1_100_000, WIDTH), nn.Dropout(0.5)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.blocks = nn.ModuleList(linear() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1_100_000, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(x.abs().long())).sum(1)
        x = self.norm(x) if self.scale == 1 else x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)[:, :100]  # type: ignore[no-any-return]


class Helped(nn.Module):
    """A model with a frozen one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Blocks(plain, linear)
        self.teacher = Blocks(lambda self, x: self.embed(x), linear)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = self.teacher(x)
        return self.student(x) - target  # type: ignore[no-any-return]


TEACHER = Blocks(plain, lambda: nn.Dropout(0.5)).requires_grad_(False)


def with_teacher(model: nn.Module, batch: Any) -> Any:
    target = TEACHER(batch.cpu()).to(batch.device)
    return (model(batch) - target).sum(), len(batch)


def with_noise(model: nn.Module, batch: Any) -> Any:
    noise = torch.rand(len(batch), device=batch.device)
    return (model(batch).flatten(1).sum(1) * noise).sum(), len(batch)


def dropping_half() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.5))


JOBS: dict[str, tuple[TrainingJob, Sequence[int]]] = {
    "residuals outside of blocks": (make_job(residual), (2, 2, 2)),
    "residuals in place": (make_job(residual_in_place), (2, 2, 2)),
    "blocks in reverse": (make_job(reverse), (1, 1, 1)),
    "residuals around checkpoints": (make_job(recomputed, dropping_half), (2, 2, 2)),
    "a skip over blocks": (make_job(skipping), (1, 2, 2)),
    "a second tensor for all blocks": (make_job(conditioned, Conditioned), (2, 2, 2)),
    "outputs of all blocks": (make_job(over_all), (1, 2, 3)),
    "two streams and integers": (make_job(two_streams, TwoStreams), (3, 3, 3)),
    "a teacher with dropout": (make_job(plain, loss=with_teacher), (2, 2, 2)),
    "a frozen module": (make_job(plain, model=Helped), (2, 2, 2)),
    "many words": (make_job(plain, model=ManyWords), (1, 1, 1, 1, 1)),
    "many words, tied": (
        make_job(plain, model=functools.partial(ManyWords, tied=True)),
        (1, 1, 1, 1, 1),
    ),
    "noise before the model": (make_job(plain, loss=with_noise), (2, 2, 2)),
}


@pytest.mark.parametrize("kind", JOBS)
def test_loss_and_gradients_have_the_same_bits_whatever_the_cuts(kind: str) -> None:
    job, crossing = JOBS[kind]
    layout = trace(job)
    assert [len(cut.crossing) for cut in layout.cuts] == [*crossing], layout.uncut
    assert rehearse(job, layout) == ()
    every = [inner for k in range(4) for inner in combinations((1, 2, 3), k)]
    compare(job, layout, every)


@pytest.mark.parametrize("kind", ["residuals outside of blocks", "two streams and integers"])
def test_a_cut_model_trains_as_torch_does(kind: str) -> None:
    job, _ = JOBS[kind]
    layout = trace(job)
    batch, tensors = batch_of(job, 3), tensors_of(job, layout)
    _, _, gradients = run_chain(job, layout, [0, 2, 4], batch, tensors)
    model = materialise(job, seed=1).train()
    seed_everything(seeds(0))
    job.loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
    for (_, name), gradient in gradients.items():
        assert same_bits(gradient, model.get_parameter(name).grad), name


class Product(nn.Module):
    """Uses what it is given several times, in a narrower type under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = x + self.one(x) * self.two(x) * self.three(x)
        return product.float()


def test_autocast_converts_what_has_come_in_as_what_was_made_here() -> None:
    job = make_job(plain, Product)
    compare(job, trace(job), [(), (1, 2, 3)], "bf16")


# --- Models that people train --------------------------------------------------------------


class Plain(nn.Module):
    """Parameters of the root's own, a mask, cuts by hand."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(families.VOCABULARY, families.WIDTH))
        self.positions = nn.Parameter(torch.randn(families.LENGTH, families.WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, families.WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.widen = nn.Linear(families.WIDTH, 2 * families.WIDTH)
        self.first_cut = CutPoint()
        self.middle = nn.LSTM(2 * families.WIDTH, 2 * families.WIDTH, batch_first=True)
        self.second_cut = CutPoint()
        self.narrow = nn.Linear(2 * families.WIDTH, families.WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        keep = (tokens != 0)[..., None] * self.scale
        x = self.dropout(self.tokens[tokens] + self.positions)
        x = self.first_cut(self.widen(x) * keep.repeat(1, 1, 2))
        x = self.second_cut(self.dropout(self.middle(x)[0]).transpose(0, 1))
        scores: torch.Tensor = (self.narrow(x).transpose(0, 1) * keep) @ self.tokens.T
        return scores


def masked_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["input_ids"]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    return loss, (batch["input_ids"] != 0).sum()


REAL = {
    "GPT-2": 4,
    "Llama": 4,
    "Llama tied": 4,
    "BERT": 4,
    "ViT": 4,
    "ConvNeXt": 5,
    "OPT": 4,
    "Mixtral": 4,
    "Qwen2 tied": 4,
    "T5": 8,
    "BART": 8,
    "Whisper": 8,
    "DeBERTa-v3": 4,
    "CLIP": 8,
    "DiT by hand": 4,
    "a root with parameters": 3,
    "BERT, SimCSE": 4,
    "GPT by hand, R-Drop": 4,
    "ResNet by hand, BatchNorm, SimSiam": 9,
    "Llama, DPO with a reference": 4,
    "ViT, distilled from a larger one": 4,
}
PERMUTED = ("ConvNeXt", "DiT by hand")
"""Those whose blocks pass on transposed tensors."""
"""Models, and how many sections each has."""


def real_job(name: str) -> TrainingJob:
    if name in families.FAMILIES:
        return families.FAMILIES[name].job()
    return families.Family(Plain, loss=masked_loss).job()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", first_always(REAL))
def test_real_models_have_the_same_bits_whatever_the_cuts(name: str) -> None:
    job = real_job(name)
    layout = trace(job)
    number = layout.num_sections
    assert number == REAL[name]
    inner = {(), (1,), (number // 2,), (number - 1,), tuple(range(1, number))}
    compare(job, layout, sorted(inner))


def without_dropout(job: TrainingJob) -> TrainingJob:
    def build() -> nn.Module:
        model = job.model()
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, float) and (isinstance(module, nn.Dropout) or "drop" in name):
                    setattr(module, name, 0.0)
        return model

    return replace(job, model=build)


def lay_out_as_sent(model: nn.Module, layout: ModelLayout) -> None:
    """Give what passes from block to block, and its gradients, the strides that it has between
    stages: sums over it are in the order of its memory."""

    def sent(tensor: torch.Tensor) -> torch.Tensor:
        tensor, memory_format = as_sent(tensor.view_as(tensor)), format_of(tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient.contiguous(memory_format=memory_format))  # type: ignore[no-untyped-call]
        return tensor

    for unit in layout.units:
        model.get_submodule(unit).register_forward_pre_hook(
            lambda _, args, kwargs: tree_map_only(torch.Tensor, sent, (args, kwargs)),
            with_kwargs=True,
        )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model_name", first_always(REAL))
def test_stages_give_the_bits_of_the_plain_model_without_dropout(model_name: str) -> None:
    job = without_dropout(real_job(model_name))
    layout = trace(job)
    batch = batch_of(job, 3)
    model = materialise(job, seed=1).train()
    if model_name in PERMUTED:
        lay_out_as_sent(model, layout)
    seed_everything(seeds(0))
    plain_loss, *_ = job.loss(model, batch_of(job, 3))
    torch.autograd.backward(plain_loss)
    bounds = list(range(layout.num_sections + 1))
    loss, _, gradients = run_chain(job, layout, bounds, batch, tensors_of(job, layout))
    assert torch.equal(loss, plain_loss.detach())
    for name, parameter in model.named_parameters():
        parts = [g for (_, n), g in gradients.items() if n == name and g is not None]
        if parameter.grad is None:
            assert parts == []
        elif len(parts) == 1:
            assert torch.equal(parts[0], parameter.grad), name
        else:  # a sum over two sections
            torch.testing.assert_close(sum(parts), parameter.grad)


def compare(
    job: TrainingJob,
    layout: ModelLayout,
    every: Sequence[tuple[int, ...]],
    precision: Precision = "fp32",
) -> None:
    batch, tensors = batch_of(job, 3), tensors_of(job, layout)
    one: Any = None
    for inner in every:
        bounds = [0, *inner, layout.num_sections]
        with torch.random.fork_rng():
            loss, weight, gradients = run_chain(job, layout, bounds, batch, tensors, precision)
        one = one or (loss, weight, gradients)
        assert same_bits(loss, one[0]), bounds
        assert weight == one[1]
        assert gradients.keys() == one[2].keys()
        for key, gradient in gradients.items():
            assert same_bits(gradient, one[2][key]), (bounds, key)


@pytest.mark.parametrize(("scale", "before"), [(1.0, "norm"), (2.0, "embed")])
def test_an_embedding_and_a_head_larger_than_blocks_are_sections_of_their_own(
    scale: float, before: str
) -> None:
    layout = trace(make_job(plain, model=functools.partial(ManyWords, scale=scale)))
    assert [cut.ends[0].module for cut in layout.cuts] == [before, *layout.units]
    assert [*layout.parameters[0], *layout.parameters[5]] == ["embed.weight", "head.weight"]


# --- What is known of them -----------------------------------------------------------------


def test_all_that_passes_a_cut_counts_for_its_bytes() -> None:
    job, _ = JOBS["two streams and integers"]
    facts = model_facts(job, trace(job))
    each = (8 + 4 * WIDTH + 4 * WIDTH) * 1
    assert [s.activation_bytes_per_example for s in facts.sections] == [each, each, each, 0]


def test_what_has_no_gradient_is_known() -> None:
    layout = trace(JOBS["two streams and integers"][0])
    assert {(one.dtype, one.has_gradient) for one in layout.cuts[0].crossing} == {
        (torch.int64, False),
        (torch.float32, True),
    }


# --- What is refused -----------------------------------------------------------------------


def test_code_between_blocks_that_is_another_one_in_evaluations_keeps_a_model_whole() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x) if self.training else block(x) - x
        return x

    job = make_job(body)
    assert trace(job).num_sections == 4
    evaluated = replace(job, heldout=job.dataset)
    assert "in evaluations other values pass" in trace(evaluated).uncut


def test_code_between_blocks_that_changes_later_is_told() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x) if len(x) < 3 else x * block(x)
        return x

    job = make_job(body)
    layout = trace(job)
    stage = StageModel(job, layout, range(2), tensors_of(job, layout))
    with pytest.raises(UserCodeError, match="must run the same code between its blocks each time"):
        stage.forward(batch_of(job, 3), [], seeds)
