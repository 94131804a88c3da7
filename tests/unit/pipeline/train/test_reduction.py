"""Gradients of a small stage, summed: against whole numbers added up in Python."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.deferred import DeferredDevice
from tests.unit.pipeline.memory import LocalHolder
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.train.reduction import REDUCTIONS
from spottrain.pipeline.train.sums import Replicas, SectionRuns
from spottrain.pipeline.train.working import WorkingSection
from spottrain.wire.model import Reduction

SHAPES = {"weight": (2, 3), "bias": (2,), "unused": (4,)}
SPECS = tuple(ParameterSpec(name, shape, torch.float32, True, {}) for name, shape in SHAPES.items())
HOMES = ["cpu", "host", "device"]


class Stage:
    """A section, its parameters on the device, and their reduction."""

    def __init__(
        self,
        kind: Reduction,
        home: str,
        virtual_nodes: int,
        seed: int = 0,
    ) -> None:
        self.holder = LocalHolder()
        self.device: Device = HostDevice() if home == "cpu" else DeferredDevice(seed)
        on_device = self.device if home == "device" else None
        self.arena = SectionArena(self.holder, 0, SPECS, on_device)
        if on_device is None:
            self.device.lock_pages(self.arena.payload)
        working = WorkingSection(self.arena, self.device, sums_gradients=kind == "fast")
        working.refresh()
        working.wait()
        self.parameters = {
            name: nn.Parameter(tensor) for name, tensor in working.parameters.items()
        }
        microbatches = tuple(range(node, node + 1) for node in range(virtual_nodes))
        replicas = Replicas(microbatches=microbatches, num_virtual_nodes=virtual_nodes)
        tracker = TensorTracker(0)
        named = {0: list(self.parameters.items())}
        arguments: tuple[Any, ...] = (named, [working], replicas, self.device, tracker)
        self.reduction = REDUCTIONS[kind](*arguments)

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
        [torch.randn(SHAPES[n], generator=generator) * scale for n in ("weight", "bias")]
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
@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(-30, 8), st.integers(0, 9))
def test_exact_sums_are_quantise_and_sum(
    home: str, seed: int, nodes: int, magnitude: int, order: int
) -> None:
    stage = Stage("exact", home, nodes, order)
    given_ones = gradients(seed, nodes, 2.0**magnitude / 8)
    with stage.device.using():
        stage.reduction.begin(0, 0, 0)
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
    stage, nodes = Stage("exact", home, 2), 2
    with stage.device.using():
        stage.reduction.begin(0, 0, 0)
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
    stage = Stage("exact", home, 1)
    huge = torch.full((2, 3), 2.0**30)
    fits = []
    with stage.device.using():
        for attempt in range(fixed_point.MAX_ATTEMPTS):
            stage.reduction.begin(0, attempt, 0)
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
def test_gradients_that_are_not_finite_are_in_range_but_said(home: str, value: float) -> None:
    stage = Stage("exact", home, 1)
    with stage.device.using():
        stage.reduction.begin(0, 0, 0)
        stage.backward(torch.full((2, 3), value), torch.ones(2))
        fit = stage.reduction.reduce()[0]

    assert (fit.finite, fit.in_range) == (False, True)
    stage.holder.close()


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_the_loss_scale_is_taken_out(kind: Reduction, home: str) -> None:
    stage = Stage(kind, home, 1)
    with stage.device.using():
        stage.reduction.begin(0, 0, 10)
        stage.backward(torch.full((2, 3), 1.5 * 2.0**10), torch.zeros(2))
        stage.reduction.reduce()
        stage.device.synchronise()

    assert stage.arena.gradients["weight"].eq(1.5).all()
    stage.holder.close()


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_parameter_lacks_a_gradient_if_no_virtual_node_gave_one(
    kind: Reduction, home: str
) -> None:
    stage = Stage(kind, home, 2)
    lacking = []
    with stage.device.using():
        for uses in (("weight", "bias"), ("weight", "weight"), ("bias", "unused")):
            stage.reduction.begin(0, 0, 0)
            for name in uses:
                (stage.parameters[name] * 0).sum().backward()  # type: ignore[no-untyped-call]
            stage.reduction.reduce()
            lacking.append(stage.arena.lacking)
        stage.device.synchronise()

    assert lacking == [{"unused"}, {"bias", "unused"}, {"weight"}]
    stage.reduction.close()
    stage.holder.close()


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_sums_begin_anew_with_every_minibatch(kind: Reduction, home: str) -> None:
    stage = Stage(kind, home, 2)
    with stage.device.using():
        for _ in range(2):
            stage.reduction.begin(0, 0, 0)
            for _ in range(2):
                stage.backward(torch.ones(2, 3), torch.zeros(2))
            stage.reduction.reduce()
        stage.device.synchronise()

    assert stage.arena.gradients["weight"].eq(2).all()
    stage.holder.close()


def test_losses_are_added_up_in_the_order_of_virtual_nodes() -> None:
    losses = [(0.1, 1.0), (1e16, 2.0), (-1e16, 3.0)]
    for kind in REDUCTIONS:
        stage = Stage(kind, "cpu", 3)
        assert stage.reduction.total_loss(losses) == [(0.1 + 1e16) - 1e16, 6.0]
        stage.holder.close()


class Watched(DeferredDevice):
    """Says when transfers begin; none ends before somebody waits for it."""

    def __init__(self, log: list[str], names: dict[int, str]) -> None:
        super().__init__(0)
        self._log, self._names = log, names

    def download(self, source: torch.Tensor, target: torch.Tensor | None = None) -> Transfer:
        """Say which section's memory it reads."""
        name = self._names.get(source.untyped_storage()._cdata, "")
        if name:
            self._log.append(f"download {name}")
        return super().download(source, target)


class Chain:
    """Two sections without a loss between them, and their reduction."""

    def __init__(self, kind: Reduction, on_device: bool, replicas: Replicas) -> None:
        self.log: list[str] = []
        self._names: dict[int, str] = {}
        self.holder = LocalHolder()
        self.device = Watched(self.log, self._names)
        specs = (ParameterSpec("weight", (3,), torch.float32, True, {}),)
        home = self.device if on_device else None
        self.arenas = [SectionArena(self.holder, k, specs, home) for k in range(2)]
        for arena in self.arenas if home is None else ():
            self.device.lock_pages(arena.payload)
        working = [
            WorkingSection(arena, self.device, sums_gradients=kind == "fast")
            for arena in self.arenas
        ]
        for section in working:
            section.refresh()
            section.wait()
        self.weights = [nn.Parameter(one.parameters["weight"]) for one in working]
        named = {k: [("weight", weight)] for k, weight in enumerate(self.weights)}
        tracker = TensorTracker(0)
        self.reduction = REDUCTIONS[kind](named, working, replicas, self.device, tracker)
        for one in self.reduction._sums:
            memory = one._runs[0] if isinstance(one, SectionRuns) else one.total
            assert memory is not None
            key = memory.untyped_storage()._cdata
            self._names[key] = f"section {one.section.arena.section}"

    def backward(self) -> None:
        """Go backward through the last section, then through the first one."""
        for k in (1, 0):
            self.weights[k].sum().backward()  # type: ignore[no-untyped-call]
            self.log.append(f"backward {k}")


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """A group of one rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("summed", ["alone", "on the host"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_section_comes_down_beside_the_backward_of_the_ones_before_it(
    kind: Reduction,
    on_device: bool,
    summed: str,
    world: dist.ProcessGroup,
) -> None:
    group = None if summed == "alone" else world
    replicas = Replicas(group, microbatches=(range(1), range(1, 2)), num_virtual_nodes=2)
    chain = Chain(kind, on_device, replicas)
    for _ in range(2):
        with chain.device.using():
            chain.reduction.begin(0, 0, 0)
            chain.backward()
            assert not any(line.startswith("download") for line in chain.log)
            chain.log.clear()
            chain.backward()
            found = chain.log.copy()
            chain.reduction.reduce()
            chain.device.synchronise()
        moves = not on_device or group is not None
        assert found == (
            ["download section 1", "backward 1", "download section 0", "backward 0"]
            if moves
            else ["backward 1", "backward 0"]
        )
        for arena in chain.arenas:
            assert arena.gradients["weight"].eq(2).all()
        chain.log.clear()
    chain.reduction.close()
    chain.holder.close()


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_section_comes_down_beside_the_sums_of_the_ones_before_it(
    kind: Reduction,
    world: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = Replicas(world, world)
    chain = Chain(kind, False, replicas)
    all_reduce = dist.all_reduce

    class Work:
        def __init__(self, work: dist.Work, number: int) -> None:
            self._work, self._number = work, number
            chain.log.append(f"begin sum {number}")

        def wait(self) -> None:
            self._work.wait()
            chain.log.append(f"end sum {self._number}")

    def sum_and_say(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        assert work is not None
        key = tensor.untyped_storage()._cdata
        name = chain._names.get(key)
        return work if name is None else Work(work, int(name[-1]))

    monkeypatch.setattr(dist, "all_reduce", sum_and_say)
    with chain.device.using():
        chain.reduction.begin(0, 0, 0)
        chain.backward()
        chain.log.clear()
        chain.reduction.reduce()

    assert chain.log == [
        "begin sum 1",
        "begin sum 0",
        "end sum 1",
        "download section 1",
        "end sum 0",
        "download section 0",
    ]
    assert all(arena.gradients["weight"].eq(1).all() for arena in chain.arenas)
    chain.holder.close()


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_a_gradient_that_comes_after_its_section_has_left_is_refused(
    kind: Reduction,
) -> None:
    chain = Chain(kind, False, Replicas())
    with chain.device.using():
        chain.reduction.begin(0, 0, 0)
        chain.backward()
        chain.device.synchronise()
        with pytest.raises(UserCodeError, match="the gradient of weight once"):
            chain.weights[1].sum().backward()  # type: ignore[no-untyped-call]
    chain.reduction.close()
    chain.holder.close()
