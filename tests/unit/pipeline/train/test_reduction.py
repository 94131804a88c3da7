"""Gradients of a small stage, summed: against whole numbers added up in Python."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.pipeline.memory import LocalHolder
from torch import nn

from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.devices.deferred import DeferredDevice
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.train.reduction import (
    ExactReduction,
    FastReduction,
    GradientReduction,
    Replicas,
)
from spottrain.pipeline.train.working import WorkingSection

SHAPES = {"weight": (2, 3), "bias": (2,), "unused": (4,)}
SPECS = tuple(
    ParameterSpec(name, shape, torch.float32, True, {})
    for name, shape in SHAPES.items()
)
HOMES = ["cpu", "host", "device"]


class Stage:
    """A section, its parameters on the device, and their reduction."""

    def __init__(
        self,
        kind: type[GradientReduction],
        home: str,
        virtual_nodes: int,
        seed: int = 0,
    ) -> None:
        self.holder = LocalHolder()
        self.device: Device = HostDevice() if home == "cpu" else DeferredDevice(seed)
        on_device = self.device if home == "device" else None
        self.arena = SectionArena(self.holder, 0, SPECS, on_device)
        working = WorkingSection(
            self.arena, self.device, sums_gradients=kind is FastReduction
        )
        working.refresh()
        working.wait()
        self.parameters = {
            name: nn.Parameter(tensor) for name, tensor in working.parameters.items()
        }
        replicas = Replicas(
            virtual_nodes=range(virtual_nodes), num_virtual_nodes=virtual_nodes
        )
        tracker = TensorTracker(0)
        named = {0: list(self.parameters.items())}
        arguments: tuple[Any, ...] = (named, [working], replicas, self.device, tracker)
        self.reduction = kind(*arguments)

    def backward(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        """Leave these gradients, as the backward of a virtual node does."""
        total = (self.parameters["weight"] * weight).sum()
        total = total + (self.parameters["bias"] * bias).sum()
        total.backward()  # type: ignore[no-untyped-call]


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def gradients(seed: int, nodes: int, scale: float = 1.0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randn(SHAPES[n], generator=generator) * scale
            for n in ("weight", "bias")
        ]
        for _ in range(nodes)
    ]


def plain(tensors: list[torch.Tensor], used: int) -> torch.Tensor:
    """Quantise and sum: round(g * 2**used) of every virtual node, as whole numbers."""
    columns = zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True)
    unit = Fraction(2) ** used
    sums = [sum(round(Fraction(g) * unit) for g in column) for column in columns]
    rounded = [float(Fraction(total) / unit) for total in sums]
    return torch.tensor(rounded, dtype=torch.float64).float().view(tensors[0].shape)


@pytest.mark.parametrize("home", HOMES)
@settings(deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(-30, 8), st.integers(0, 9))
def test_exact_sums_are_quantise_and_sum(
    home: str, seed: int, nodes: int, magnitude: int, order: int
) -> None:
    stage = Stage(ExactReduction, home, nodes, order)
    given_ones = gradients(seed, nodes, 2.0**magnitude / 8)
    with stage.device.using():
        stage.reduction.begin(0, 0)
        for weight, bias in given_ones:
            stage.backward(weight, bias)
        fit = stage.reduction.reduce()[0]
        stage.device.synchronise()

    assert (fit.finite, fit.in_range) == (True, True)
    used = fixed_point.exponent(None, 0, nodes, torch.float32)
    for number, name in enumerate(("weight", "bias")):
        expected = plain([one[number] for one in given_ones], used)
        assert torch.equal(stage.arena.gradients[name], expected)
    assert stage.arena.gradients["unused"].eq(0).all()
    assert all(parameter.grad is None for parameter in stage.parameters.values())
    stage.reduction.close()
    stage.holder.close()


def test_exponents_follow_the_gradients_when_they_are_committed(home: str) -> None:
    stage, nodes = Stage(ExactReduction, home, 2), 2
    with stage.device.using():
        stage.reduction.begin(0, 0)
        stage.backward(torch.full((2, 3), 3.0), torch.zeros(2))
        stage.backward(torch.full((2, 3), -5.0), torch.zeros(2))
        stage.reduction.reduce()
    numbers = stage.arena.numbers
    assert numbers.exponents == [None, None, None]

    numbers.update(overflow=False, changes=True, scaled=False)

    # 5 < 2**3; zeros, and a parameter that was not used, leave what there was.
    assert numbers.exponents == [fixed_point.next_exponent(None, 3, nodes), None, None]
    stage.holder.close()


def test_gradients_out_of_range_fit_at_a_later_attempt(home: str) -> None:
    stage = Stage(ExactReduction, home, 1)
    huge = torch.full((2, 3), 2.0**30)
    fits = []
    with stage.device.using():
        for attempt in range(fixed_point.MAX_ATTEMPTS):
            stage.reduction.begin(attempt, 0)
            stage.backward(huge, torch.ones(2))
            fits.append(stage.reduction.reduce()[0].in_range)
            if fits[-1]:
                break
        stage.device.synchronise()

    assert fits == [False, False, True]
    assert stage.arena.gradients["weight"].eq(2.0**30).all()
    assert stage.arena.gradients["bias"].eq(1).all()
    stage.holder.close()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_are_in_range_but_said(
    home: str, value: float
) -> None:
    stage = Stage(ExactReduction, home, 1)
    with stage.device.using():
        stage.reduction.begin(0, 0)
        stage.backward(torch.full((2, 3), value), torch.ones(2))
        fit = stage.reduction.reduce()[0]

    assert (fit.finite, fit.in_range) == (False, True)
    stage.holder.close()


@pytest.mark.parametrize("kind", [FastReduction, ExactReduction])
def test_the_loss_scale_is_taken_out(kind: type[GradientReduction], home: str) -> None:
    stage = Stage(kind, home, 1)
    with stage.device.using():
        stage.reduction.begin(0, 10)
        stage.backward(torch.full((2, 3), 1.5 * 2.0**10), torch.zeros(2))
        stage.reduction.reduce()
        stage.device.synchronise()

    assert stage.arena.gradients["weight"].eq(1.5).all()
    stage.holder.close()


@pytest.mark.parametrize("kind", [FastReduction, ExactReduction])
def test_sums_begin_anew_with_every_minibatch(
    kind: type[GradientReduction], home: str
) -> None:
    stage = Stage(kind, home, 2)
    with stage.device.using():
        for _ in range(2):
            stage.reduction.begin(0, 0)
            for _ in range(2):
                stage.backward(torch.ones(2, 3), torch.zeros(2))
            stage.reduction.reduce()
        stage.device.synchronise()

    assert stage.arena.gradients["weight"].eq(2).all()
    stage.holder.close()


def test_losses_are_added_up_in_the_order_of_virtual_nodes() -> None:
    losses = [(0.1, 1.0), (1e16, 2.0), (-1e16, 3.0)]
    for kind in (FastReduction, ExactReduction):
        stage = Stage(kind, "cpu", 3)
        assert stage.reduction.total_loss(losses) == [(0.1 + 1e16) - 1e16, 6.0]
        stage.holder.close()
