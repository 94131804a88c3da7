"""Losses that call a model several times, and frozen models beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from tests.chains import batch_of, run_chain, same_bits, seeds, tensors_of
from tests.unit.pipeline.blocks import WIDTH, Blocks, linear, make_job, plain
from torch import nn
from torch.utils.checkpoint import checkpoint

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.rehearsal import rehearse
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import CutPoint, Helper, TrainingJob
from spottrain.pipeline.model.sections import ModelLayout, Running
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tracer import trace

Loss = tuple[torch.Tensor, int]


def apart(model: Any, batch: torch.Tensor) -> Loss:
    return (model(batch) - model(2 * batch)).square().sum(), len(batch)


def summed(model: Any, batch: torch.Tensor) -> Loss:
    """Three calls, each with what is computed of its result at once."""
    total = torch.zeros((), device=batch.device)
    for power in (1, 2, 3):
        total = total + model(batch / power).sigmoid().sum() ** power
    return total, len(batch)


def of_inner(model: Any, batch: torch.Tensor) -> Loss:
    return model(batch).square().sum(), len(batch)


class Pair(nn.Module):
    """Calls a model twice itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks(plain, dropping)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) - self.inner(x)


def dropping() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.5))


def checkpointed(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = x + checkpoint(block, nn.functional.dropout(x), use_reentrant=False)
    return x


def looking_back(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The embedding is used in all sections, and tied to the head."""
    first = x = self.embed(x)
    for block in self.blocks:
        x = block(x) + first
    return nn.functional.linear(x, self.embed.weight)


class Widening(nn.Module):
    """Returns another shape than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner(x[:, :WIDTH]), x], 1)


def by_hand() -> nn.Module:
    model = Blocks(plain, linear)
    model.blocks[1] = nn.Sequential(linear(), CutPoint())
    return model


def deep(number: int, width: int = WIDTH) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)) for _ in range(number))
    return nn.Sequential(nn.Linear(WIDTH, width), *blocks, nn.Linear(width, WIDTH))


def beside(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that builds a model with a helper as its attribute."""

    def model() -> nn.Module:
        made = Blocks(plain, dropping)
        made.helper = Helper(build())
        return made

    return model


class Wrapper(nn.Module):
    """Calls the model and its teacher itself."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Helper(deep(4))
        self.student = Blocks(plain, dropping)

    def forward(self, x: torch.Tensor) -> Any:
        return self.student(x) - self.teacher(x)


def as_taught(model: Any, batch: torch.Tensor) -> Loss:
    wanted = model.helper(batch)
    return (model(batch) - wanted).square().sum(), len(batch)


def preferred(model: Any, batch: torch.Tensor) -> Loss:
    margins = [one(batch).sum(1) - one(-batch).sum(1) for one in (model, model.helper)]
    return -nn.functional.logsigmoid(margins[0] - margins[1]).sum(), len(batch)


JOBS: dict[str, tuple[TrainingJob, Sequence[str]]] = {
    "two calls": (make_job(plain, dropping, loss=apart), ["", ""]),
    "three calls": (make_job(plain, dropping, loss=summed), ["", "", ""]),
    "calls inside of the model": (make_job(plain, model=Pair, loss=of_inner), ["inner"] * 2),
    "checkpoints": (make_job(checkpointed, dropping, loss=apart), ["", ""]),
    "shared values": (make_job(looking_back, dropping, loss=summed), [""] * 3),
    "other shapes": (
        make_job(lambda self, x: self.blocks[3](self.blocks[2](self.blocks[1](self.blocks[0](x)))),
                 Widening, loss=apart),
        ["", ""],
    ),
    "cut points": (make_job(plain, model=by_hand, loss=apart), ["", ""]),
    "a reference": (
        make_job(plain, model=beside(lambda: deep(4)), loss=preferred), ["", "", "helper", "helper"]
    ),
    "a deep teacher first": (
        make_job(plain, model=beside(lambda: deep(7, 6)), loss=as_taught), ["helper", ""]
    ),
    "a shallow teacher": (
        make_job(plain, model=beside(lambda: deep(2)), loss=as_taught), ["helper", ""]
    ),
    "a teacher without blocks": (
        make_job(plain, model=beside(linear), loss=as_taught), ["helper", ""]
    ),
    "a wrapper": (make_job(plain, model=Wrapper, loss=of_inner), ["student", "teacher"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", JOBS)
def test_loss_and_gradients_have_the_same_bits_whatever_the_cuts(kind: str) -> None:
    job, modules = JOBS[kind]
    layout = trace(job)
    assert [wave.module for wave in layout.waves] == [*modules], layout.uncut
    assert rehearse(job, layout) == ()
    batch, tensors = batch_of(job, 3), tensors_of(job, layout)
    last = layout.num_sections
    found = []
    for inner in (one for k in range(last) for one in combinations(range(1, last), k)):
        with torch.random.fork_rng():
            found.append(run_chain(job, layout, [0, *inner, last], batch, tensors))
    loss, _, gradients = found[0]
    for one in found[1:]:
        assert same_bits(one[0], loss)
        assert all(same_bits(one[2][key], gradient) for key, gradient in gradients.items())
    with torch.random.fork_rng():
        plain_loss, plain_gradients = in_torch(job, batch)
    if kind in WITHOUT_DROPOUT:
        torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
        for name, gradient in plain_gradients.items():
            parts = [g for (_, n), g in gradients.items() if n == name and g is not None]
            torch.testing.assert_close(sum(parts), gradient)


WITHOUT_DROPOUT = ("other shapes", "cut points")


def in_torch(job: TrainingJob, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = materialise(job, seed=1).train()
    loss = job.loss(model, batch)[0]
    loss.backward()  # type: ignore[no-untyped-call]
    named = model.named_parameters()
    return loss.detach(), {name: p.grad for name, p in named if p.grad is not None}


def test_each_call_has_a_dropout_of_its_own() -> None:
    job = make_job(plain, dropping, loss=lambda m, x: ((m(x) - m(x)).square().sum(), len(x)))
    layout = trace(job)
    loss, *_ = run_chain(job, layout, [0, 2, 4], batch_of(job, 3), tensors_of(job, layout))
    assert layout.num_sections == 4
    assert loss > 0


def test_a_helper_is_frozen_and_has_no_dropout() -> None:
    model = Wrapper().train()
    assert model.student.training
    assert not any(module.training for module in model.teacher.modules())
    assert not any(parameter.requires_grad for parameter in model.teacher.parameters())


def test_a_helper_costs_its_weights_and_a_forward() -> None:
    alone, helped = (
        model_facts(job, trace(job)) for job in (make_job(plain, dropping), JOBS["a reference"][0])
    )
    more = [
        h.param_bytes - a.param_bytes for a, h in zip(alone.sections, helped.sections, strict=True)
    ]
    assert sum(more) == sum(4 * p.numel() for p in deep(4).parameters())
    assert min(more) > 0
    for a, h in zip(alone.sections, helped.sections, strict=True):
        assert (h.gradient_bytes, h.optimizer_bytes) == (a.gradient_bytes, a.optimizer_bytes)


def test_statistics_after_two_calls_are_those_of_two_updates() -> None:
    def normalised(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, self.norm(x))

    job = make_job(normalised, loss=apart)
    layout = trace(job)
    assert layout.num_sections == 4
    assert layout.specs["norm.running_mean"].running == Running(torch.float32, 0.9**2)


# --- What is refused -----------------------------------------------------------------------


def dependent(model: Any, batch: torch.Tensor) -> Loss:
    return model(model(batch)).sum(), len(batch)


def drawing_between(model: Any, batch: torch.Tensor) -> Loss:
    first = model(batch)
    return (first - model(batch + torch.rand_like(batch))).sum(), len(batch)


def embedded_once(model: Any, batch: torch.Tensor) -> Loss:
    x = model.embed(batch)
    return (model(x) - model(x)).square().sum(), len(batch)


def with_condition(self: Any, x: torch.Tensor) -> torch.Tensor:
    condition = x
    for block in self.blocks:
        x = block(x) * condition
    return x


REFUSED: dict[str, tuple[TrainingJob, str]] = {
    "dependent calls": (make_job(plain, loss=dependent), "must not depend on what others return"),
    "random numbers between calls": (
        make_job(plain, loss=drawing_between), "drawn before the first"
    ),
    "a value of several sections of several calls": (
        make_job(with_condition, loss=embedded_once), "compute it within each call"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_in_waves_is_one_section(kind: str) -> None:
    job, reason = REFUSED[kind]
    layout = trace(job)
    assert (layout.num_sections, layout.waves) == (1, ())
    assert reason in layout.uncut
    assert "\n" not in layout.uncut


def test_a_loss_that_calls_a_model_less_often_later_is_told() -> None:
    def loss(model: Any, batch: torch.Tensor) -> Loss:
        calls = 2 if len(batch) < 3 else 1
        return sum(model(batch).sum() for _ in range(calls)), len(batch)

    job = make_job(plain, loss=loss)
    layout: ModelLayout = trace(job)
    assert len(layout.waves) == 2
    stage = StageModel(job, layout, range(2), tensors_of(job, layout))
    with pytest.raises(
        UserCodeError, match="loss called models 1 times, and 2 times for the first"
    ):
        stage.forward(batch_of(job, 3), [], seeds)
