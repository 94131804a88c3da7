"""A rehearsal finds at inspect what would fail in training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.pipeline.blocks import Blocks, linear, make_job, plain
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.rehearsal import (
    MAX_ASKED,
    check_schedule,
    rehearse,
    schedule_factors,
)
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.tracer import trace


def rehearsed(job: TrainingJob) -> None:
    rehearse(job, trace(job))


COUNT = itertools.count()


class Reading(nn.Linear):
    """A block that looks at values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.detach().sum()) < 1e9 else x


class Backwards(torch.autograd.Function):
    """The identity, which cannot go backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no way back")


def fails_in_backward(model: nn.Module, batch: torch.Tensor) -> Any:
    return Backwards.apply(model(batch)).sum(), len(batch)  # type: ignore[no-untyped-call]


def frozen() -> nn.Module:
    return Blocks(plain, linear).requires_grad_(False)


def half_frozen() -> nn.Module:
    model = Blocks(plain, linear)
    for module in (model.embed, *model.blocks[:2]):
        module.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "job",
    [
        make_job(plain),
        make_job(plain, heldout=[torch.ones(4)]),
        make_job(plain, heldout={"a": [torch.ones(4)], "none": []}),
        make_job(plain, lambda: Reading(4, 4)),
        make_job(plain, lambda: nn.LSTM(4, 4).requires_grad_(False) and linear()),
        make_job(plain, model=half_frozen),
    ],
)
def test_good_jobs_pass(job: TrainingJob) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rehearsed(job)
    assert torch.equal(torch.rand(2), expected)


def reports_more_in_evaluation(model: nn.Module, batch: torch.Tensor) -> Any:
    loss = model(batch).sum(), len(batch)
    return loss if model.training else (*loss, {"accuracy": (1.0, 1.0)})


def test_evaluations_may_measure_what_training_does_not() -> None:
    heldout = {"b": [torch.ones(4)], "a": [torch.ones(4)], "none": []}
    job = make_job(plain, loss=reports_more_in_evaluation, heldout=heldout)
    assert trace(job).metrics == ()
    assert rehearse(job, trace(job)) == ("a/accuracy", "b/accuracy")


def fails_in_evaluation(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).sum() / (1 if model.training else 0 // 0), len(batch)


@pytest.mark.parametrize("block", [linear, lambda: Reading(4, 4)])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda m, b: (m(b).sum().detach(), 1)}, "has no gradient; .*detach"),
        ({"loss": lambda m, b: (torch.zeros(()) * float(len(m(b))), 1)}, "no gradient"),
        ({"model": frozen}, "no parameter that is trained"),
        (
            {"loss": fails_in_backward},
            "backward raised ArithmeticError: no way back",
        ),
        ({"loss": fails_in_evaluation}, "loss raised ZeroDivisionError"),
    ],
)
def test_what_would_fail_in_training_is_refused(
    block: Callable[[], nn.Module], changes: dict[str, Any], message: str
) -> None:
    job = make_job(plain, block, heldout=[torch.ones(4)], **changes)
    with pytest.raises(UserCodeError, match=message) as caught:
        rehearsed(job)
    assert "\n" not in str(caught.value)


def test_schedules() -> None:
    check_schedule(None, 10)
    check_schedule(lambda step: min(1.0, step / 100) * 0.5 ** (step // 7), 10**6)
    asked: list[int] = []
    check_schedule(lambda step: asked.append(step) or 1.0, 8)  # type: ignore[func-returns-value]
    assert sorted(set(asked)) == [0, 1, 2, 4, 7]


def test_the_range_of_a_schedule_is_that_of_all_its_steps() -> None:
    assert schedule_factors(lambda step: float(step == 7), 20) == (0.0, 1.0, 0.0)
    assert schedule_factors(lambda step: float(step), 1) == (0.0, 0.0, 0.0)
    many = 10 * MAX_ASKED
    factors = schedule_factors(lambda step: float(step), many)
    assert factors == (0.0, many - 1.0, many - 1.0)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda step: next(COUNT), "of the step alone: it"),
        (lambda step: 1 / step, r"lr_schedule\(0\) raised ZeroDivisionError"),
        (lambda step: float("inf") if step else 1.0, "finite factor .* inf for step 1"),
        (lambda step: None, "finite factor .* got None for step 0"),
        (lambda step: "0.1", "finite factor .* got '0.1' for step 0"),
        (lambda step: "x" * 5000, r"finite factor .* got 'x{9,99}\.\.\.' for step 0"),
        (lambda step: -1e-3, "finite factor .* of zero or more: got -0.001 for step 0"),
    ],
)
def test_a_schedule_that_is_no_function_of_the_step_is_refused(
    schedule: Callable[[int], float], message: str
) -> None:
    with pytest.raises(UserCodeError, match=message):
        check_schedule(schedule, 100)
