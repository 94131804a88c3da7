"""State that Python objects carry is found by its name where results depend on it."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pipeline.blocks import WIDTH, make_job, plain
from torch import nn

import spottrain
from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks import repetition
from spottrain.pipeline.model.checks.rehearsal import changing_state
from spottrain.pipeline.model.checks.repetition import (
    UNSEEN,
    is_mean,
    is_small,
    try_loss,
)
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.tracer import trace

EXAMPLES = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def job_of(**changes: Any) -> TrainingJob:
    return make_job(plain, **({"dataset": EXAMPLES} | changes))


def found(job: TrainingJob) -> str:
    return try_loss(job, trace(job))


# --- In modules ---------------------------------------------------------------------------


class Counting(nn.Linear):
    """Its output shrinks from call to call."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 1 / self.calls)


class Averaging(nn.Linear):
    """Subtracts a running mean that is no buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.mean: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Remembering(nn.Linear):
    """Looks back at the graph of the call before."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.before: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        before, self.before = self.before, out
        return out if before is None else out + 0.1 * before.mean()


class Late(nn.Linear):
    """Counts up to a step that no inspection reaches."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (2 if self.calls > 5_000 else 1)


class Toggling(nn.Linear):
    """Each second block of the model that runs in this process is doubled."""

    turn = itertools.count()

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + next(self.turn) % 3)


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (Counting, "Counting.calls"),
        (Averaging, "Averaging.mean"),
        (Late, "Late.calls"),
        (Toggling, "Toggling.turn"),
    ],
)
def test_state_of_a_module_is_found(block: type[nn.Module], name: str) -> None:
    assert found(make_job(plain, block, dataset=EXAMPLES)) == name


# --- Around the loss ----------------------------------------------------------------------

DRAWS = numpy.random.default_rng(0)
PYTHONS = random.Random(0)
TORCHS = torch.Generator().manual_seed(0)
CALLS = 0
SETTINGS: dict[str, Any] = {"calls": 0}


def total(model: nn.Module, batch: torch.Tensor, factor: Any) -> Any:
    return model(batch).square().sum() * factor, len(batch)


def of_numpy(model: nn.Module, batch: torch.Tensor) -> Any:
    share = float(DRAWS.beta(0.5, 0.5))
    return total(model, share * batch + (1 - share) * batch.flip(0), 1)


def of_python(model: nn.Module, batch: torch.Tensor) -> Any:
    return total(model, batch, PYTHONS.random())


def of_torch(model: nn.Module, batch: torch.Tensor) -> Any:
    factor = float(torch.rand((), generator=TORCHS))
    return total(model, batch, factor)


def of_a_global(model: nn.Module, batch: torch.Tensor) -> Any:
    global CALLS
    CALLS += 1
    return total(model, batch, min(1, CALLS / 1000))


def of_a_dictionary(model: nn.Module, batch: torch.Tensor) -> Any:
    SETTINGS["calls"] += 1
    return total(model, batch, SETTINGS["calls"])


def of_itself(model: nn.Module, batch: torch.Tensor) -> Any:
    of_itself.calls = getattr(of_itself, "calls", 0) + 1  # type: ignore[attr-defined]
    return total(model, batch, of_itself.calls)  # type: ignore[attr-defined]


def of_a_default(
    model: nn.Module,
    batch: torch.Tensor,
    seen: list[int] = [],  # noqa: B006
) -> Any:
    seen.append(1)
    return total(model, batch, len(seen))


def around() -> Any:
    calls = 0

    def counting(model: nn.Module, batch: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return total(model, batch, calls)

    return counting


class Annealed:
    """A loss that is an object."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> Any:
        self.calls += 1
        return total(model, batch, 0.5**self.calls)


def of_a_helper(model: nn.Module, batch: torch.Tensor, *, helper: Annealed) -> Any:
    return helper(model, batch)


def in_place(model: nn.Module, batch: torch.Tensor) -> Any:
    return total(model, batch.mul_(0.5), 1)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (of_numpy, f"{__name__}.DRAWS"),
        (of_python, f"{__name__}.PYTHONS"),
        (of_torch, f"{__name__}.TORCHS"),
        (of_a_global, f"{__name__}.CALLS"),
        (of_a_dictionary, f"{__name__}.SETTINGS"),
        (of_itself, "of_itself.calls"),
        (of_a_default, "a default of of_a_default"),
        (around(), "calls (around counting)"),
        (Annealed(), "Annealed.calls"),
        (Annealed().__call__, "Annealed.calls"),
        (functools.partial(of_a_helper, helper=Annealed()), "Annealed.calls"),
        (in_place, "the batch, which loss changes in place"),
    ],
)
def test_state_around_the_loss_is_found(loss: Callable[..., Any], name: str) -> None:
    assert found(job_of(loss=loss)) == name


def test_state_that_makes_a_later_call_raise_is_found() -> None:
    assert found(make_job(plain, Remembering, dataset=EXAMPLES)) == "Remembering.before"


class Visits(list[torch.Tensor]):
    """Examples that shrink each time they are read."""

    def __init__(self) -> None:
        super().__init__(EXAMPLES)
        self.visits = [0] * len(EXAMPLES)

    def __getitem__(self, index: Any) -> Any:
        self.visits[index] += 1
        return super().__getitem__(index) / self.visits[index]


def test_state_of_a_data_set_is_found() -> None:
    assert found(job_of(dataset=Visits())) == "Visits.visits"


def test_state_that_has_no_name_is_found_all_the_same() -> None:
    turns = itertools.cycle([1.0, 2.0, 3.0])
    loss = functools.partial(lambda model, batch, turns: total(model, batch, next(turns)))

    assert found(job_of(loss=functools.partial(loss, turns=turns))) == UNSEEN


# --- Welcome ------------------------------------------------------------------------------


class Caching(nn.Linear):
    """Keeps a table that it makes when it first needs one; counts for a log."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.table: Any = None
        self.calls = 0
        self.largest = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(float(WIDTH))
        self.calls += 1
        if self.calls % 100 == 0:
            self.largest = 0.0
        if not x.is_meta:
            self.largest = max(self.largest, float(x.detach().max()))
        out: torch.Tensor = super().forward(x) + self.table
        return out


def drawing(model: nn.Module, batch: torch.Tensor) -> Any:
    factor = random.random() + numpy.random.rand() + float(torch.rand(()))
    return total(model, batch, factor)


def by_step(model: nn.Module, batch: torch.Tensor) -> Any:
    step = spottrain.step() or 0
    return total(model, batch, 1 / (1 + step))


@functools.cache
def table() -> torch.Tensor:
    return torch.ones(())


def cached(model: nn.Module, batch: torch.Tensor) -> Any:
    return total(model, batch, table())


def logging(model: nn.Module, batch: torch.Tensor) -> Any:
    loss, weight = total(model, batch, 1)
    SETTINGS.setdefault("losses", []).append(float(loss))
    return loss, weight


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": drawing},
        {"loss": by_step},
        {"loss": cached},
        {"loss": logging},
        {"dataset": [torch.ones(WIDTH), torch.ones(WIDTH)]},
        {"dataset": [torch.ones(WIDTH)]},
    ],
)
def test_state_on_which_nothing_depends_is_welcome(changes: dict[str, Any]) -> None:
    assert found(job_of(**changes)) == ""


@pytest.mark.parametrize(
    "block", [Caching, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))]
)
def test_caches_and_dropout_of_blocks_are_welcome(
    block: Callable[[], nn.Module],
) -> None:
    assert found(make_job(plain, block, dataset=EXAMPLES)) == ""


def test_of_larger_models_it_is_told_what_each_call_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job(plain, Counting, dataset=EXAMPLES, loss=cached)
    layout = trace(job)
    assert is_small(layout)
    monkeypatch.setattr(repetition, "MOST_FLOPS", 0.5)

    assert not is_small(layout)
    assert changing_state(job, layout) == "Counting.calls"


# --- Means --------------------------------------------------------------------------------


def mean(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean(), batch.numel()


def mean_of_means(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean(), 1.0


def mean_metric(model: nn.Module, batch: torch.Tensor) -> Any:
    out = model(batch).square()
    return out.sum(), out.numel(), {"size": (out.mean(), len(batch))}


def in_pairs(model: nn.Module, batch: torch.Tensor) -> Any:
    out = model(batch)
    return (out @ out.T).logsumexp(1).sum(), len(batch)


@pytest.mark.parametrize(("loss", "what"), [(mean, "loss"), (mean_metric, "size")])
def test_a_mean_with_the_weight_of_a_sum_is_refused(loss: Callable[..., Any], what: str) -> None:
    with pytest.raises(UserCodeError, match=f"{what}.* must be a sum"):
        found(job_of(loss=loss))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), torch.tensor(-2)])
def test_a_weight_that_cannot_be_one_is_refused(weight: Any) -> None:
    with pytest.raises(UserCodeError, match="loss must have a sum of weights"):
        found(job_of(loss=lambda model, batch: (model(batch).square().sum(), weight)))


@pytest.mark.parametrize("loss", [mean_of_means, in_pairs])
def test_other_losses_are_no_means_by_mistake(loss: Callable[..., Any]) -> None:
    assert found(job_of(loss=loss)) == ""


SIZES = st.floats(1, 100)


@given(SIZES, SIZES, st.integers(1, 1000), st.integers(1, 1000))
def test_sums_are_told_from_means(a: float, b: float, n: int, m: int) -> None:
    assert not is_mean((a, n), (b, m), (a + b, n + m))
    assert not is_mean((a, 1), (b, 1), ((a + b) / 2, 1))
    assert is_mean((a, n), (b, m), ((a * n + b * m) / (n + m), n + m))


# --- Parameters that are no module's ------------------------------------------------------


class Holding(nn.Linear):
    """Uses a parameter by a list of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.held = [self.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.held[0]


def test_parameters_that_a_list_holds_are_refused_before_training() -> None:
    with pytest.raises(UserCodeError, match="meta"):
        found(make_job(plain, Holding, dataset=EXAMPLES))
