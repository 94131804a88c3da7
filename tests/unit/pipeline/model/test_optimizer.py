"""What an optimizer keeps is learned by letting it take a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.optimizer import (
    build_optimizer,
    optimizer_state_spec,
    use_fused_kernels,
)
from spottrain.pipeline.model.sections import TensorSpec

NAMED = [
    ("weight", TensorSpec(shape=(3, 2), dtype=torch.float32, requires_grad=True)),
    ("bias", TensorSpec(shape=(3,), dtype=torch.float32, requires_grad=True)),
    ("frozen", TensorSpec(shape=(9,), dtype=torch.float32, requires_grad=False)),
]


def spec_of(optimizer: Any, named: Any = NAMED) -> Any:
    job = TrainingJob(
        model=nn.Module,
        dataset=[],
        loss=None,  # type: ignore[arg-type]
        optimizer=optimizer,
    )
    return optimizer_state_spec(job, named).state


def of(kind: Any, **options: Any) -> Any:
    return lambda named: kind([p for _, p in named], **options)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_adam_keeps_two_moments_and_a_step(options: dict[str, bool]) -> None:
    spec = spec_of(of(torch.optim.AdamW, **options))
    assert list(spec) == ["weight", "bias"]
    moment = TensorSpec(shape=(3, 2), dtype=torch.float32)
    assert spec["weight"] == {
        "step": TensorSpec(shape=(), dtype=torch.float32),
        "exp_avg": moment,
        "exp_avg_sq": moment,
    }


@pytest.mark.parametrize(
    ("kind", "options", "kept"),
    [
        (torch.optim.Adam, {}, {"step", "exp_avg", "exp_avg_sq"}),
        (torch.optim.AdamW, {}, {"step", "exp_avg", "exp_avg_sq"}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer"}),
    ],
)
def test_what_fused_kernels_keep_is_learned_without_memory(
    kind: Any, options: dict[str, float], kept: set[str]
) -> None:
    petabyte = TensorSpec(shape=(1 << 24, 1 << 24), dtype=torch.float32, requires_grad=True)
    spec = spec_of(of(kind, fused=True, **options), [("weight", petabyte)])
    assert spec["weight"].keys() == kept


def test_sgd_keeps_momentum_only_if_asked() -> None:
    assert all(not keys for keys in spec_of(of(torch.optim.SGD)).values())
    momentum = spec_of(of(torch.optim.SGD, momentum=0.9))
    assert momentum["bias"] == {"momentum_buffer": TensorSpec(shape=(3,), dtype=torch.float32)}


def test_groups_by_name_are_possible() -> None:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        decay = {"params": [p for name, p in named if name != "bias"]}
        rest = {"params": [p for name, p in named if name == "bias"], "amsgrad": True}
        groups: list[dict[str, Any]] = [decay, rest]
        return torch.optim.Adam(groups)

    spec = spec_of(optimizer)
    assert "max_exp_avg_sq" in spec["bias"]
    assert "max_exp_avg_sq" not in spec["weight"]


def test_a_trial_step_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam asks one whether a graph is captured: CUDA would begin where workers fork."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    seen = []

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            names = "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"
            seen.append(tuple(os.environ.get(name) for name in names))
            return super().step(closure)

    spec_of(of(Looking))

    assert seen == [("", "1")]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


class Odd(torch.optim.SGD):
    value: object = 3

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = type(self).value


def test_a_number_counts_as_a_float64_and_none_as_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = TensorSpec(shape=(), dtype=torch.float64, number_type=int)
    assert spec_of(of(Odd))["bias"] == {"odd": number}
    monkeypatch.setattr(Odd, "value", None)
    assert spec_of(of(Odd))["bias"] == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "state 'odd' of weight must be a tensor"),
        (
            [1, {"a": torch.device("cpu")}],
            r"state \"odd\[1\]\['a'\]\" of weight must be",
        ),
    ],
)
def test_other_state_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, value: object, message: str
) -> None:
    monkeypatch.setattr(Odd, "value", value)
    with pytest.raises(UserCodeError, match=message):
        spec_of(of(Odd))


def test_leaves_of_nested_state_are_named_as_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = [torch.ones(2), [], ("text", {"a": True}), None]
    monkeypatch.setattr(Odd, "value", value)
    assert spec_of(of(Odd))["bias"] == {
        "odd[0]": TensorSpec(shape=(2,), dtype=torch.float32),
        "odd[2][1]['a']": TensorSpec(shape=(), dtype=torch.float64, number_type=bool),
    }


def test_nothing_to_train_needs_no_optimizer() -> None:
    assert spec_of(of(torch.optim.AdamW), NAMED[2:]) == {}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda named: 1 / 0, "optimizer raised ZeroDivisionError"),
        (lambda named: None, r"must return a torch\.optim\.Optimizer: got NoneType"),
        (
            lambda named: torch.optim.SGD([nn.Parameter(torch.ones(1))]),
            "holds 1 parameter that it was not given",
        ),
        (
            lambda named: torch.optim.SGD(p for name, p in named if name == "head"),
            "empty parameter list: .* all parameters of the section with weight; .*=False in model",
        ),
    ],
)
def test_a_bad_optimizer_factory_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        build_optimizer(optimizer, [("weight", nn.Parameter(torch.ones(2)))])


@pytest.mark.parametrize(
    ("make", "fused"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1), True),
        (lambda p: torch.optim.Adam(p, lr=0.1), True),
        (lambda p: torch.optim.SGD(p, lr=0.1), True),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), True),
        (lambda p: torch.optim.AdamW(p, lr=0.1, fused=False), False),
        (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), None),
        (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), None),
        (lambda p: torch.optim.AdamW(p, lr=0.1, capturable=True), None),
    ],
)
def test_fused_kernels_are_used_unless_the_user_chose(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], fused: bool | None
) -> None:
    optimizer = make([nn.Parameter(torch.zeros(3))])

    use_fused_kernels(optimizer)

    assert optimizer.param_groups[0]["fused"] is fused


def test_an_optimizer_of_somebody_elses_is_left_alone() -> None:
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.zeros(3))])

    use_fused_kernels(optimizer)

    assert "fused" not in optimizer.param_groups[0]


def test_tensors_of_groups_are_counted_at_the_first_parameter_of_each() -> None:
    class Averaging(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["averages"] = [torch.zeros_like(p) for p in group["params"]]

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return Averaging([{"params": [p]} for _, p in named])

    job = TrainingJob(
        model=nn.Module,
        dataset=[],
        loss=None,  # type: ignore[arg-type]
        optimizer=optimizer,
    )
    found = optimizer_state_spec(job, NAMED)

    assert found.group_bytes == {"weight": 24, "bias": 12}
    assert found.num_bytes == 36


def test_state_is_learned_from_values_where_an_optimizer_looks_at_them() -> None:
    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    looked = bool(p.any()) and bool(p.grad.any())
                    self.state[p]["seen"] = torch.zeros_like(p) if looked else 0.0

    assert spec_of(of(Looking))["weight"]["seen"].shape == (3, 2)
