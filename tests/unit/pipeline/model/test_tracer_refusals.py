"""The tracer refuses models and user code that stages would run differently."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.pipeline.blocks import Blocks, linear, make_job, plain
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import CutPoint, TrainingJob
from spottrain.pipeline.model.tracer import trace


def assert_refused(job: TrainingJob, message: str) -> UserCodeError:
    with pytest.raises(UserCodeError, match=message) as caught:
        trace(job)
    assert "\n" not in str(caught.value)
    return caught.value


# --- Cut points -----------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_each_cut_point_must_run_once(calls: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = linear(), linear()
            self.cut, self.other = CutPoint(), CutPoint()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            for cut in [self.other, self.cut, self.cut][:calls]:
                x = cut(x)
            return self.two(x)  # type: ignore[no-any-return]

    job = make_job(plain, model=Model)
    if calls == 2:
        layout = trace(job)
        assert [cut.ends[0].module for cut in layout.cuts] == ["other", "cut"]
        assert layout.parameters[1] == ()
    else:
        assert_refused(job, "run (.*once each|each once).* without CutPoint modules")


# --- Made from parameters -------------------------------------------------------------


def spectral(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.spectral_norm(model.embed)


def anchored(model: Any) -> None:
    model.register_buffer("anchor", model.embed.weight.detach().clone())


def averaged(model: Any) -> None:
    model.averages = [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("attach", [spectral, anchored, averaged])
def test_what_is_made_from_values_of_parameters_is_refused(
    attach: Callable[[Any], None],
) -> None:
    def model() -> nn.Module:
        built = Blocks(plain, linear)
        attach(built)
        return built

    assert_refused(make_job(plain, model=model), "from values of parameters")


def test_a_frozen_parameter_may_keep_the_values_of_another() -> None:
    def model() -> nn.Module:
        built = Blocks(plain, linear)
        weight = built.embed.weight.detach().clone()
        built.anchor = nn.Parameter(weight, requires_grad=False)
        return built

    def loss(model: Any, batch: torch.Tensor) -> Any:
        total = model(batch).sum()
        drift = (model.embed.weight - model.anchor).square().sum()
        return total + drift, len(batch)

    job = make_job(plain, model=model, loss=loss)

    layout = trace(job)

    assert "anchor" in layout.parameters[-1]


# --- Buffers --------------------------------------------------------------------------


def clamp(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.head.weight.clamp_(-1, 1)
    return plain(self, x)


def test_a_parameter_that_changes_in_forward_is_refused() -> None:
    assert_refused(make_job(clamp), r"model changes its parameter head\.weight in forward")


def test_random_buffers_are_refused_since_stages_build_their_own() -> None:
    class Model(Blocks):
        def __init__(self) -> None:
            super().__init__(plain, linear)
            self.register_buffer("noise", torch.rand(3))

    assert_refused(make_job(plain, model=Model), "buffer noise of the model is random")


# --- The user's code --------------------------------------------------------------------


def test_code_that_reads_values_is_traced_on_the_cpu() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) if x.sum() > 0 else x

    layout = trace(make_job(body))
    assert layout.parameters == trace(make_job(plain)).parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": lambda model, batch: 1 / 0}, "loss raised ZeroDivisionError"),
        ({"loss": lambda model, batch: model(batch)}, "loss must return"),
        ({"dataset": []}, "dataset is empty"),
        ({"collate": lambda x: 1 / 0}, "data set or collate raised ZeroDivision"),
        ({"model": lambda: 1 / 0}, "raised ZeroDivisionError"),
    ],
)
def test_user_code_that_fails_is_reported(changes: dict[str, Any], message: str) -> None:
    assert_refused(make_job(plain, **changes), message)


KEPT = Blocks(plain, linear)


def reading() -> nn.Module:
    model = Blocks(plain, linear)
    if model.head.weight.std() > 1:
        model.head.weight.data.mul_(0.5)
    return model


class Sparse(Blocks):
    def __init__(self) -> None:
        super().__init__(plain, linear)
        self.embedding = nn.Embedding(4, 4, sparse=True)


def with_backward(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    loss = model(batch).square().sum()
    loss.backward(retain_graph=True)
    return loss, len(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: KEPT}, r"the same Blocks twice; .*model=lambda: Blocks\("),
        (
            {"model": lambda: Blocks(plain, lambda: KEPT.head)},
            r"module blocks\.0 twice; build all of it inside",
        ),
        ({"model": lambda: Blocks(plain, linear).to("cpu")}, r"remove \.to\(device\)"),
        ({"model": lambda: Blocks(plain, linear).cuda()}, r"remove \.to\(device\)"),
        ({"loss": lambda m, b: (m(b.to("cuda")).sum(), 1)}, r"remove \.to\(device\)"),
        ({"model": reading}, "must not read values of .*mean_resizing=False"),
        ({"model": Sparse}, r"embedding is an Embedding with sparse=True; leave"),
        ({"loss": with_backward}, "loss calls backward"),
        ({"loss": lambda m, b: m(b).mean()}, r"return \(mean \* n, n\)"),
    ],
)
def test_common_code_is_told_what_to_write_instead(changes: dict[str, Any], message: str) -> None:
    assert_refused(make_job(plain, **changes), message)


def test_tracing_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    trace(make_job(plain, lambda: nn.Sequential(linear(), nn.Dropout(0.5))))
    assert torch.equal(torch.rand(2), expected)


# --- Wrappers --------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.Sequential(
    nn.DataParallel(model)
)])  # fmt: skip
def test_wrappers_that_copy_the_model_are_refused(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    job = make_job(plain, model=lambda: wrap(Blocks(plain, linear)))
    assert_refused(job, "must not be in DataParallel: .*")


# --- Helper models ---------------------------------------------------------------------


def distilling(teacher: nn.Module, *, watched: bool) -> Any:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        with torch.set_grad_enabled(watched):
            wanted = teacher(batch)
        return (model(batch) - wanted).square().sum(), len(batch)

    return loss


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_of_a_helper_model_are_found_unless_they_would_be_trained(
    frozen: bool,
) -> None:
    teacher = linear().requires_grad_(not frozen)
    job = make_job(plain, loss=distilling(teacher, watched=True))
    if frozen:
        assert len(trace(job).helpers) == len(list(teacher.parameters()))
    else:
        assert_refused(job, "that is not the model's, so it would not be trained")
    job = make_job(plain, loss=distilling(teacher, watched=False))
    assert {id(p) for p in trace(job).helpers} == {id(p) for p in teacher.parameters()}
    assert trace(make_job(plain)).helpers == ()
