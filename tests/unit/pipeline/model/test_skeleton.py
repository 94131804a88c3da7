"""Models are built without memory for their parameters, or whole, with the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.skeleton import build_skeleton, materialise


class Zoo(nn.Module):
    """Ties of both kinds, lists, a frozen parameter, buffers, in-place initialising."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        shared = nn.Parameter(torch.randn(width, width))
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.one.weight = shared
        self.two.weight = shared
        self.three = nn.Linear(width, width, bias=False)
        self.three.weight = self.one.weight
        self.several = nn.ParameterList([torch.randn(width) for _ in range(2)])
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.small = nn.Linear(width, width).to(torch.bfloat16)
        self.register_buffer("table", torch.arange(float(width)))
        nn.init.orthogonal_(self.small.weight.data.float())
        nn.init.normal_(self.two.bias)


def job_of(factory: object) -> TrainingJob:
    return TrainingJob(model=factory, dataset=[], loss=None, optimizer=None)  # type: ignore[arg-type]


def test_parameters_are_on_meta_and_buffers_are_real() -> None:
    skeleton = build_skeleton(Zoo)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert torch.equal(skeleton.get_buffer("table"), torch.arange(4.0))


def test_names_shapes_types_ties_and_freezing_are_those_of_the_plain_model() -> None:
    def facts(model: nn.Module) -> list[tuple[object, ...]]:
        return [
            (name, p.shape, p.dtype, p.requires_grad, type(p))
            for name, p in model.named_parameters()
        ]

    skeleton, plain = build_skeleton(Zoo), Zoo()
    assert facts(skeleton) == facts(plain)
    assert skeleton.get_parameter("one.weight") is skeleton.get_parameter("three.weight")


def test_no_more_than_one_parameter_is_in_memory_at_a_time() -> None:
    alive = peak = 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            nonlocal alive, peak
            for index in range(10):
                self.register_parameter(str(index), nn.Parameter(self._make()))

        def _make(self) -> torch.Tensor:
            nonlocal alive, peak
            alive += 1
            peak = max(peak, alive)
            return torch.zeros(3).as_subclass(Counted)

    build_skeleton(Model)
    assert peak == 1


def test_registering_is_as_it_was_after_success_and_after_an_error() -> None:
    build_skeleton(Zoo)
    assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        build_skeleton(lambda: nn.Linear(2, math.floor(1 / 0)))
    assert not nn.Linear(2, 2).weight.is_meta


def test_materialising_gives_the_same_bits_every_time_and_leaves_the_dice_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (materialise(job_of(Zoo), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first.get_parameter("one.bias"), other.get_parameter("one.bias"))


@pytest.mark.parametrize("build", [build_skeleton, lambda f: materialise(job_of(f), 0)])
def test_a_factory_that_raises_or_builds_something_else_is_refused(
    build: object,
) -> None:
    assert callable(build)
    with pytest.raises(UserCodeError, match=r"must build a torch\.nn\.Module: got str"):
        build(lambda: "model")
    with pytest.raises(UserCodeError, match="raised KeyError") as caught:
        build(lambda: dict[str, nn.Module]()["missing"])
    assert "missing" in caught.value.traceback
