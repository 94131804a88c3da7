"""Optimizers that training would get wrong are refused before anything is rented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optimizers import ACCEPTED, REFUSED, Base
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.trial import try_optimizer
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.tracer import trace


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def try_one(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    job = TrainingJob(
        model=Model,
        dataset=[torch.ones(6)],
        loss=lambda model, batch: (model(batch).sum(), float(len(batch))),
        optimizer=optimizer,
    )
    try_optimizer(job, trace(job))


def of(kind: Any, **options: Any) -> Any:
    return lambda named: kind([p for _, p in named], **options)


TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": of(torch.optim.AdamW, amsgrad=True),
    "AdamW fused": of(torch.optim.AdamW, fused=True),
    "AdamW foreach": of(torch.optim.AdamW, foreach=True),
    "AdamW tensor lr": of(torch.optim.AdamW, lr=torch.tensor(1e-3)),
    "SGD": of(torch.optim.SGD, lr=0.1),
    "SGD momentum": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "NAdam": of(torch.optim.NAdam),
    "RAdam": of(torch.optim.RAdam),
    "Adagrad": of(torch.optim.Adagrad),
    "RMSprop": of(torch.optim.RMSprop, momentum=0.9, centered=True),
    "ASGD": of(torch.optim.ASGD),
    "Adafactor": of(torch.optim.Adafactor),
    "Adamax": of(torch.optim.Adamax),
    "Adadelta": of(torch.optim.Adadelta),
    "Rprop": of(torch.optim.Rprop),
}


@pytest.mark.parametrize("name", [*TORCH, *ACCEPTED])
def test_an_optimizer_that_treats_parameters_apart_is_accepted(name: str) -> None:
    try_one(TORCH.get(name) or ACCEPTED[name])


@pytest.mark.parametrize("kind", REFUSED)
def test_an_optimizer_that_training_would_get_wrong_is_refused(
    kind: type[Base],
) -> None:
    with pytest.raises(UserCodeError, match=REFUSED[kind]):
        try_one(kind)


def test_a_scheduler_in_the_factory_is_no_reason_to_refuse() -> None:
    def factory(named: Any) -> torch.optim.Optimizer:
        optimizer = of(torch.optim.SGD, lr=0.1, momentum=0.9)(named)
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer  # type: ignore[no-any-return]

    try_one(factory)


class Pair(torch.optim.Optimizer):
    """Two optimizers in one, as Muon for matrices and AdamW for the rest."""

    def __init__(self, named: Any, *, shared: bool) -> None:
        parameters = [p for _, p in named]
        matrices = [p for p in parameters if p.ndim == 2]
        rest = [p for p in parameters if p.ndim != 2]
        self.both = [
            torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
            torch.optim.AdamW(rest, lr=0.1),
        ]
        super().__init__(parameters, {"lr": 0.1})
        if shared:
            self.param_groups = [g for one in self.both for g in one.param_groups]
            for one in self.both:
                one.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.both:
            one.step()


def test_two_optimizers_in_one_are_accepted_if_state_and_groups_are_one() -> None:
    try_one(lambda named: Pair(named, shared=True))
    with pytest.raises(UserCodeError, match="Pair changes its attribute 'both'"):
        try_one(lambda named: Pair(named, shared=False))


def test_optimizers_that_need_a_closure_are_refused() -> None:
    with pytest.raises(UserCodeError, match=r"raised TypeError: .*closure"):
        try_one(of(torch.optim.LBFGS))


def test_an_optimizer_without_a_learning_rate_needs_none() -> None:
    class Unscheduled(Base):
        def __init__(self, named: Any) -> None:
            super().__init__(named)
            for group in self.param_groups:
                group["lr"] = None

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad)

    try_one(Unscheduled)


def test_nothing_is_tried_where_nothing_is_trained() -> None:
    job = TrainingJob(
        model=lambda: Model().requires_grad_(False),
        dataset=[torch.ones(6)],
        loss=lambda model, batch: (model(batch).sum(), float(len(batch))),
        optimizer=of(torch.optim.SGD),
    )
    try_optimizer(job, trace(job))
