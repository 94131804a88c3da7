"""What a stage owns, what it depends on, and what it says of misbehaving user code."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from spottrain.errors import SpottrainError, UserCodeError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.stage import CHECK_FINITE, StageModel
from spottrain.pipeline.model.tracer import trace
from tests import chains


class Chain(nn.Module):
    """Four blocks and a matrix shared by both ends; ``mode`` makes it misbehave."""

    mode = "good"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            if self.mode == "skips" and index == 1:
                continue
            try:
                x = block(x)
            except BaseException:
                if self.mode != "swallows":
                    raise
        if self.mode == "raises":
            raise ZeroDivisionError("user's\nown")
        return self.head(x @ self.embed.weight @ self.embed.weight.T)  # type: ignore[no-any-return]


def make_job(**changes: Any) -> TrainingJob:
    parts: dict[str, Any] = {
        "model": Chain,
        "dataset": [torch.ones(4)] * 3,
        "loss": lambda model, batch: (model(batch).sum(), 1.0),
        "optimizer": lambda named: torch.optim.SGD(p for _, p in named),
    }
    return TrainingJob(**(parts | changes))


JOB = make_job()
BATCH = torch.arange(8.0).reshape(2, 4)


@pytest.fixture(scope="module")
def layout() -> ModelLayout:
    return trace(JOB)


def tensors_of(layout: ModelLayout) -> dict[int, dict[str, torch.Tensor]]:
    model = materialise(JOB, seed=1)
    return {
        section: {
            name: model.get_parameter(name).detach().clone() for name in layout.parameters[section]
        }
        for section in range(layout.num_sections)
    }


def make_stage(
    layout: ModelLayout, sections: range = range(4), job: TrainingJob = JOB
) -> StageModel:
    return StageModel(job, layout, sections, tensors_of(layout))


def seeds(section: int) -> int:
    return 7_000 + section


def loss_of(stage: StageModel, seeds: Any = seeds) -> torch.Tensor:
    result = stage.forward(BATCH, [], seeds)
    assert isinstance(result, tuple)
    return result[0].detach()


# --- Random numbers -----------------------------------------------------------------------


def test_dropout_depends_on_nothing_but_the_sections_seeds(layout: ModelLayout) -> None:
    stage = make_stage(layout)
    torch.manual_seed(1)
    first = loss_of(stage)
    torch.manual_seed(2)
    assert torch.equal(loss_of(stage), first)
    for changed in range(4):
        other = loss_of(stage, lambda k, changed=changed: seeds(k) + 9 * (k == changed))
        assert not torch.equal(other, first)


def test_sections_seed_all_that_user_code_draws_from(layout: ModelLayout) -> None:
    stage = make_stage(layout)
    drawn = []
    for state in (1, 2):
        random.seed(state)
        numpy.random.seed(state)
        loss_of(stage)
        drawn.append((random.random(), numpy.random.rand(), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_evaluation_mode_turns_dropout_off_and_training_mode_on(
    layout: ModelLayout,
) -> None:
    stage = make_stage(layout)
    stage.eval()
    calm = loss_of(stage)
    assert torch.equal(loss_of(stage, lambda k: k), calm)
    stage.train()
    assert not torch.equal(loss_of(stage), calm)


class LeftError(SpottrainError):
    """Says that the computation is of no more use."""


@pytest.mark.parametrize("passed", range(7))
def test_a_computation_can_be_left_between_any_two_sections(
    layout: ModelLayout, passed: int
) -> None:
    """Of four sections: before each forward, and before three backwards."""
    left = iter(range(passed))

    def check() -> None:
        if next(left, None) is None:
            raise LeftError

    stage = StageModel(JOB, layout, range(4), tensors_of(layout), check=check)
    with pytest.raises(LeftError):
        stage.forward(BATCH, [], seeds).loss.backward()  # type: ignore[union-attr]


def test_each_section_is_seeded_once_in_order_after_section_0(
    layout: ModelLayout,
) -> None:
    seen: list[int] = []

    def recording(section: int) -> int:
        seen.append(section)
        return section

    make_stage(layout, range(2, 4)).forward(BATCH, [torch.zeros(2, 8)], recording)
    assert seen == [0, 2, 3]


# --- What a stage owns --------------------------------------------------------------------


def test_a_tied_parameter_is_one_of_its_own_in_each_section(
    layout: ModelLayout,
) -> None:
    tensors = tensors_of(layout)
    stage = StageModel(JOB, layout, range(4), tensors)
    first, last = (dict(stage.parameters_of(k))["embed.weight"] for k in (0, 3))
    assert first is not last
    assert first.data_ptr() == tensors[0]["embed.weight"].data_ptr()
    assert last.data_ptr() == tensors[3]["embed.weight"].data_ptr()
    loss_of(stage)
    torch.autograd.backward(stage.forward(BATCH, [], seeds)[0])
    assert first.grad is not None
    assert last.grad is not None
    assert not torch.equal(first.grad, last.grad)


def test_parameters_come_in_the_order_of_the_layout(layout: ModelLayout) -> None:
    stage = make_stage(layout, range(1, 3))
    for section in stage.sections:
        names = [name for name, _ in stage.parameters_of(section)]
        assert tuple(names) == layout.parameters[section]


def test_a_stage_materialises_only_its_own_parameters(layout: ModelLayout) -> None:
    stage = make_stage(layout, range(1, 2))
    one_number = {
        name
        for name, parameter in stage._model.named_parameters()
        if parameter.untyped_storage().nbytes() == parameter.element_size()
    }
    assert one_number == layout.specs.keys() - set(layout.parameters[1])


def test_a_changed_storage_changes_the_result_at_once(layout: ModelLayout) -> None:
    tensors = tensors_of(layout)
    stage = StageModel(JOB, layout, range(4), tensors)
    before = loss_of(stage)
    tensors[3]["head.bias"].add_(1.0)
    assert not torch.equal(loss_of(stage), before)


def test_frozen_parameters_stay_frozen() -> None:
    def factory() -> nn.Module:
        model = Chain()
        model.blocks[2].requires_grad_(False)
        return model

    job = make_job(model=factory)
    layout = trace(job)
    stage = StageModel(job, layout, range(4), tensors_of(layout))
    torch.autograd.backward(stage.forward(BATCH, [], seeds)[0])
    frozen = [
        name
        for section in range(4)
        for name, parameter in stage.parameters_of(section)
        if parameter.grad is None
    ]
    assert frozen == ["blocks.2.0.weight", "blocks.2.0.bias"]


def test_storage_of_the_wrong_shape_is_refused(layout: ModelLayout) -> None:
    tensors = tensors_of(layout)
    tensors[0]["embed.weight"] = torch.zeros(3)
    with pytest.raises(SpottrainError, match=r"embed\.weight in section 0 must be"):
        StageModel(JOB, layout, range(1), tensors)


def test_the_first_section_that_is_not_finite_is_named_if_that_is_asked_for(
    layout: ModelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> torch.Tensor:
        tensors = tensors_of(layout)
        next(iter(tensors[2].values())).fill_(math.nan)
        return loss_of(StageModel(JOB, layout, range(4), tensors))

    assert run().isnan()
    monkeypatch.setenv(CHECK_FINITE, "1")

    with pytest.raises(UserCodeError, match="output of section 2 is not finite"):
        run()


def test_the_first_stage_receives_nothing_and_later_ones_do(layout: ModelLayout) -> None:
    with pytest.raises(SpottrainError, match=r"must receive 1 tensors: got 0"):
        make_stage(layout, range(1, 2)).forward(BATCH, [], seeds)
    with pytest.raises(SpottrainError, match=r"must receive 0 tensors: got 1"):
        make_stage(layout).forward(BATCH, [torch.zeros(2, 8)], seeds)


# --- User code that misbehaves ------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "sections", "message"),
    [
        ("swallows", range(2), "let BaseException pass"),
        ("skips", range(4), "must run once, as the end of section 2"),
        ("raises", range(4), "loss raised ZeroDivisionError: user's$"),
    ],
)
def test_misbehaving_user_code_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    layout: ModelLayout,
    mode: str,
    sections: range,
    message: str,
) -> None:
    stage = make_stage(layout, sections)
    monkeypatch.setattr(Chain, "mode", mode)
    with pytest.raises(UserCodeError, match=message) as caught:
        stage.forward(BATCH, [], seeds)
    assert ("ZeroDivisionError" in caught.value.traceback) == (mode == "raises")


def test_blocks_that_run_outside_the_loss_are_refused() -> None:
    class Again(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)

            def again(gradient: torch.Tensor) -> torch.Tensor:
                return torch.add(gradient, self.blocks[0](x).sum())

            result.register_hook(again)  # type: ignore[no-untyped-call]
            return result

    job = make_job(model=Again)
    layout = trace(job)
    stage = StageModel(job, layout, range(4), tensors_of(layout))
    loss, *_ = stage.forward(BATCH, [], seeds)
    with pytest.raises(UserCodeError, match=r"ran outside loss: .*torch\.utils\.check"):
        torch.autograd.backward(loss)


def test_a_loss_may_change_the_containers_of_its_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch.pop("x")).sum(), batch.pop("weight").sum()

    example = {"x": torch.ones(4), "weight": 1.0}
    job = make_job(loss=loss, dataset=[example] * 2)
    stage = StageModel(job, layout := trace(job), range(4), tensors_of(layout))
    batch = job.collate([example])
    for _ in range(2):  # a recompute runs it again
        assert isinstance(stage.forward(batch, [], seeds), tuple)


def test_a_stage_works_again_after_an_error(layout: ModelLayout) -> None:
    stage = make_stage(layout)
    good = loss_of(stage)
    with pytest.raises(UserCodeError, match="loss raised"):
        stage.forward(torch.ones(2, 5), [], seeds)
    assert torch.equal(loss_of(stage), good)


@pytest.mark.parametrize(
    "result", [None, (1.0, 2.0), (torch.ones(2), 1.0), (torch.ones(()), "many")]
)
def test_a_loss_of_the_wrong_kind_is_refused(layout: ModelLayout, result: object) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        model(batch)
        return result

    stage = make_stage(layout, job=make_job(loss=loss))
    with pytest.raises(UserCodeError, match=r"loss must return|weight of the loss"):
        stage.forward(BATCH, [], seeds)


class Writing(nn.Module):
    """A block that adds to what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += torch.tanh(self.inner(x + 1))
        return x


class Flattening(Writing):
    """One that writes to a view of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = torch.tanh(self.inner(x + 1))
        x.view(-1).add_(added.view(-1))
        return x


@pytest.mark.parametrize("block", [Writing, Flattening])
def test_blocks_may_write_to_what_they_are_given(block: type[Writing]) -> None:
    def model() -> nn.Module:
        chain = Chain()
        chain.blocks = nn.ModuleList(block() for _ in range(4))
        return chain

    job = make_job(model=model)
    layout = trace(job)
    tensors = chains.tensors_of(job, layout)
    plain = materialise(job, seed=1)
    for parameter in plain.parameters():
        assert parameter.grad is None
    loss = job.loss(plain, BATCH)[0]
    loss.backward()  # type: ignore[no-untyped-call]

    for bounds in ([0, 4], [0, 2, 4], [0, 1, 2, 3, 4]):
        got = chains.run_chain(job, layout, bounds, BATCH, tensors)
        assert torch.equal(got[0], loss.detach())
        for (_, name), gradient in got[2].items():
            if name != "embed.weight":  # its gradient comes in two parts
                assert chains.same_bits(gradient, plain.get_parameter(name).grad), name
    assert layout.writes_input == {1, 2, 3}


def test_what_a_stage_has_received_is_there_for_another_forward() -> None:
    def model() -> nn.Module:
        chain = Chain()
        chain.blocks = nn.ModuleList(Writing() for _ in range(4))
        return chain

    job = make_job(model=model)
    layout = trace(job)
    stage = StageModel(job, layout, range(2, 4), chains.tensors_of(job, layout))
    received = torch.ones(2, 8)

    first = stage.forward(BATCH, [received], seeds)
    again = stage.forward(BATCH, [received], seeds)

    assert isinstance(first, tuple)
    assert isinstance(again, tuple)
    assert torch.equal(first.loss, again.loss)
    assert received.eq(1).all()
