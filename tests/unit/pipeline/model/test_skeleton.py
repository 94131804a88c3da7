"""Models are built without memory for their parameters, whole, or in parts, with the same
bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import costly
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.skeleton import (
    build_skeleton,
    first_values,
    materialise,
)


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


class Drawn(nn.Module):
    """Draws in every way: late, with generators, after seeds of its own, by rejection."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        self.first = nn.Embedding(5, 4)
        self.square, self.wide = nn.Linear(4, 4), nn.Linear(4, 6)
        self.scaled = nn.Parameter(torch.randn(4) * 0.1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.seeded = nn.Parameter(torch.rand(3))
        self.last = nn.Linear(4, 5, bias=False)
        self.last.weight = self.first.weight
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.wide.weight, generator=own)
        nn.init.normal_(self.wide.bias, generator=own)
        nn.init.sparse_(self.first.weight, 0.5)
        self.first.weight.data[0].zero_()


class Derived(Drawn):
    """Computes a parameter from another one, and one from what is no parameter any more."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Linear(4, 6)
        self.copy.weight.data.copy_(self.wide.weight)
        self.square.weight = nn.Parameter(self.square.weight * 2)


def parts_of(model: type[nn.Module]) -> st.SearchStrategy[list[list[str]]]:
    names = [name for name, _ in model().named_parameters()]
    part = st.lists(st.sampled_from(names), min_size=1, unique=True)
    return st.lists(part, min_size=1, max_size=4)


@costly
@given(st.data(), st.sampled_from([Zoo, Drawn, Derived]), st.integers(0, 3))
def test_parameters_have_the_same_bits_whichever_are_built_together(
    data: st.DataObject, model: type[nn.Module], seed: int
) -> None:
    parts = data.draw(parts_of(model))
    whole = materialise(job_of(model), seed)

    for names, values in zip(parts, first_values(job_of(model), seed, parts), strict=True):
        assert set(values) == set(names)
        for name, value in values.items():
            assert torch.equal(value, whole.get_parameter(name)), name


def test_only_a_part_has_values_while_it_is_built() -> None:
    with_values: list[int] = []

    def factory() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        with_values.append(
            sum(one.untyped_storage().device.type == "cpu" for one in layers.parameters())
        )
        return layers

    list(first_values(job_of(factory), 1, [["0.weight", "0.bias"], ["3.bias"]]))

    assert with_values == [0, 2, 1]


def test_a_factory_that_raises_while_a_part_is_built_is_told() -> None:
    def factory() -> nn.Module:
        raise KeyError("missing")

    with pytest.raises(UserCodeError, match="raised KeyError"):
        next(first_values(job_of(factory), 1, [["weight"]]))


def test_layers_of_one_shape_begin_differently() -> None:
    layers = materialise(job_of(lambda: nn.ModuleList(nn.Linear(3, 3) for _ in "ab")), 1)
    first, second = (layers.get_parameter(f"{number}.weight") for number in range(2))
    assert not torch.equal(first, second)
