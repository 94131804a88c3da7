"""Blocks that are checkpointed or compiled, or in several lists, give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.chains import batch_of, run_chain, same_bits, tensors_of
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.rehearsal import rehearse
from spottrain.pipeline.model.job import CutPoint, TrainingJob
from spottrain.pipeline.model.skeleton import build_skeleton, compile_blocks
from spottrain.pipeline.model.tracer import trace

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.dropout(self.linear(x)))


Body = Callable[["Model", torch.Tensor], torch.Tensor]


def plainly(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


class Model(nn.Module):
    def __init__(self, body: Body = plainly) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.body = body
        blocks: list[Any] = list(self.blocks)
        blocks[2].linear.weight = blocks[0].linear.weight  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self, self.embed(x)))  # type: ignore[no-any-return]


def make_job(model: Callable[[], nn.Module]) -> TrainingJob:
    return TrainingJob(
        model=model,
        dataset=[torch.randn(3, WIDTH, generator=torch.manual_seed(1))] * 3,
        heldout=[torch.ones(3, WIDTH)],
        loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )


def check(job: TrainingJob, sections: int, like: TrainingJob | None = None) -> None:
    """Any chain of stages has the gradients of one, or of another job's one."""
    layout = trace(job)
    assert layout.num_sections == sections
    rehearse(job, layout)
    tensors, batch = tensors_of(job, layout), batch_of(job, 3)
    expected = run_chain(job, layout, [0, sections], batch, tensors)
    if like is not None:
        plain = run_chain(like, trace(like), [0, sections], batch, tensors)
        assert all(same_bits(expected[2][k], g) for k, g in plain[2].items())
    for bounds in (
        [0, 1, sections],
        [0, sections - 1, sections],
        [*range(sections + 1)],
    ):
        got = run_chain(job, layout, bounds, batch, tensors)
        assert torch.equal(got[0], expected[0])
        for key, gradient in expected[2].items():
            assert gradient is not None
            assert same_bits(got[2][key], gradient), key


# --- Activation checkpoints ---------------------------------------------------------------


def around_each(*, reentrant: bool) -> Body:
    def body(model: Model, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return body


def around_several(*, reentrant: bool) -> Body:
    def body(model: Model, x: torch.Tensor) -> torch.Tensor:
        blocks = list(model.blocks)
        return checkpoint_sequential(blocks, 2, x, use_reentrant=reentrant)  # type: ignore[no-any-return, no-untyped-call]

    return body


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [around_each, around_several])
def test_activation_checkpoints_around_blocks(around: Callable[..., Body], reentrant: bool) -> None:
    job = make_job(lambda: Model(around(reentrant=reentrant)))
    check(job, 4, like=make_job(Model))


# --- torch.compile -----------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def each_block(model: Model) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def wrapped_blocks(model: Model) -> nn.Module:
    compiled: list[Any] = [torch.compile(b, backend="eager") for b in model.blocks]
    model.blocks = nn.ModuleList(compiled)
    return model


def in_place(model: Model) -> nn.Module:
    model.compile(backend="eager", dynamic=False)
    return model


def whole(model: Model) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore")  # of torch itself, while it compiles
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [each_block, wrapped_blocks, in_place, whole])
def test_compiled_models(compiled: Callable[[Model], nn.Module]) -> None:
    before = torch._dynamo.utils.counters["frames"]["ok"]
    check(make_job(lambda: compiled(Model())), 4)
    assert torch._dynamo.utils.counters["frames"]["ok"] > before


@pytest.mark.filterwarnings("ignore")  # of torch itself, while it compiles
@pytest.mark.usefixtures("fresh_compiler")
def test_what_cannot_be_compiled_is_refused() -> None:
    def by_hand() -> nn.Module:
        model = Model()
        model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
        return model

    def points() -> nn.Module:
        return torch.compile(nn.Sequential(Block(), CutPoint(), Block()))  # type: ignore[return-value]

    for model in (by_hand, points):
        job = make_job(model)
        with pytest.raises(UserCodeError, match="compile its blocks instead"):
            rehearse(job, trace(job))


@pytest.mark.filterwarnings("ignore")  # of torch itself, while it compiles
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "how",
    [
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"options": {"triton.cudagraphs": True}},
    ],
)
def test_cuda_graphs_are_refused_with_what_to_use_instead(how: dict[str, Any]) -> None:
    def in_place() -> nn.Module:
        model = Model()
        model.blocks[1].compile(**how)
        return model

    def by_hand() -> nn.Module:
        model = Model()
        model.blocks[1].forward = torch.compile(model.blocks[1].forward, **how)
        return model

    def wrapped() -> nn.Module:
        return torch.compile(Model(), **how)  # type: ignore[return-value]

    for build in (in_place, by_hand, wrapped):
        model = build_skeleton(build)
        with pytest.raises(UserCodeError, match="use mode='max-autotune-no-cudagraphs'"):
            compile_blocks(model, ["blocks.0", "blocks.1"])


# --- Several lists ------------------------------------------------------------------------


class Picture(nn.Module):
    """A residual block of a convolutional network."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = x if self.short is None else self.short(x)
        return torch.relu(self.norm(self.convolution(x)) + short)


class ResNet(nn.Module):
    """Four lists of blocks, as torchvision has them, the last of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(WIDTH, 4, 1)
        self.layer1 = nn.Sequential(Picture(4, 4), Picture(4, 4))
        self.layer2 = nn.Sequential(Picture(4, 6), Picture(6, 6), Picture(6, 6))
        self.layer3 = nn.Sequential(Picture(6, 8), Picture(8, 8))
        self.layer4 = nn.Sequential(Picture(8, 12))
        self.fc = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.transpose(1, 2)[..., None].repeat(1, 1, 1, 3))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Staged(nn.Module):
    """A list of stages, each with a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4, 6, 8)
        self.stages = nn.ModuleList(self.stage(width, 2) for width in widths)
        self.widen = nn.ModuleList([nn.Conv2d(WIDTH, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 8, 1)])

    @staticmethod
    def stage(width: int, number: int) -> nn.Module:
        return nn.Sequential(*[Picture(width, width) for _ in range(number)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)[..., None].repeat(1, 1, 1, 3)
        for widen, stage in zip(self.widen, self.stages, strict=True):
            x = stage(widen(x))
        return x


@pytest.mark.rotated
def test_blocks_of_all_lists_are_cut() -> None:
    check(make_job(ResNet), 8)
    assert trace(make_job(ResNet)).blocks == "layer1, layer2, layer3, layer4"
    check(make_job(Staged), 9)


def test_lists_that_do_not_follow_one_another_leave_the_largest() -> None:
    class Parallel(Model):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = plainly(self, self.embed(x))
            return torch.stack([head(x) for head in self.heads]).sum(0)

    job = make_job(Parallel)
    assert trace(job).blocks == "blocks"
