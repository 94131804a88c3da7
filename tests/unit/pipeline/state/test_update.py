from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.deferred import DeferredDevice
from tests.faults import Action, Fault, InjectedFaultError, Script
from tests.optimizers import ACCEPTED, StepMadeByFirstStep
from tests.tiers import costly
from tests.unit.pipeline.memory import LocalHolder
from tests.unit.pipeline.traffic import Traffic
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.faults import FaultScript, Hook
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.model.job import NamedParameters, TrainingJob
from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.model.optimizer import (
    optimizer_state_spec,
    use_fused_kernels,
)
from spottrain.pipeline.model.sections import TensorSpec
from spottrain.pipeline.state.agreement import MinibatchDecision
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.handover import DELAYED, MisfitError, saved_tensors
from spottrain.pipeline.state.handover import fill as load
from spottrain.pipeline.state.numbers import GROUPS
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.state.update import (
    contributions,
    gradient_norm,
    gradient_scale,
    skip_reason,
)
from spottrain.wire.model import TiedParameter

SHAPES = {"weight": (4, 3), "bias": (4,)}


class Counting(torch.optim.Optimizer):
    """Keeps a Python number: how often it has stepped, which scales its steps."""

    def __init__(self, named: NamedParameters) -> None:
        super().__init__([p for _, p in named], {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.add_(parameter.grad, alpha=-group["lr"] * state["count"])


OPTIMIZERS: dict[str, Callable[[NamedParameters], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.1),
    "adamax": lambda named: torch.optim.Adamax(named, lr=0.1),
    "nadam": lambda named: torch.optim.NAdam(named, lr=0.1),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1, initial_accumulator_value=0.5),
    "counting": Counting,
    "plain": lambda named: torch.optim.SGD(named, lr=1.0),
    **ACCEPTED,
}


def make_job(
    optimizer: str | Callable[[NamedParameters], torch.optim.Optimizer] = "adamw",
    **changes: Any,
) -> TrainingJob:
    values: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 4),
        "dataset": [0],
        "loss": lambda model, batch: (torch.zeros(()), 1.0),
        "optimizer": OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer,
        "lr_schedule": lambda step: 1.0 / (step + 1),
    }
    return TrainingJob(**{**values, **changes})


def specs_of(job: TrainingJob) -> tuple[ParameterSpec, ...]:
    named = [
        (name, TensorSpec(shape=shape, dtype=torch.float32, requires_grad=True))
        for name, shape in SHAPES.items()
    ]
    kept = optimizer_state_spec(job, named)
    return tuple(
        ParameterSpec(
            name,
            spec.shape,
            spec.dtype,
            True,
            kept.state.get(name, {}),
            kept.group_bytes.get(name, 0),
            kept.forms.get(name, {}),
        )
        for name, spec in named
    )


@pytest.fixture
def holder() -> Iterator[LocalHolder]:
    holder = LocalHolder()
    yield holder
    holder.close()


def open_memory(holder: LocalHolder, job: TrainingJob, versions: int = 1) -> SlotMemory:
    specs = tuple(spec._replace(versions=versions) for spec in specs_of(job))
    memory = SlotMemory(holder, job, [specs], HostDevice())
    memory.hold([0])
    return memory


def fill(arena: SectionArena, seed: int, tensors: Mapping[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


def same(contents: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    pairs = zip(contents, before, strict=True)
    return all(torch.equal(now[: then.numel()], then) for now, then in pairs)


def decision(step: int, **changes: Any) -> MinibatchDecision:
    values: dict[str, Any] = {
        "generation": 1,
        "step": step,
        "loss_sum": 8.0,
        "weight": 4.0,
        "square_norm": 16.0,
        "overflow": False,
        "stop": False,
    }
    return MinibatchDecision(**{**values, **changes})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_restored_from_memory_goes_on_as_if_it_had_never_stopped(
    holder: LocalHolder, optimizer: str
) -> None:
    job = make_job(optimizer)
    arena = open_memory(holder, job).arenas[0]
    fill(arena, 0, arena.parameters)
    arena.set_version(0, 1)
    plain = {n: nn.Parameter(p.clone()) for n, p in arena.parameters.items()}
    plain_optimizer = job.optimizer(list(plain.items()))
    use_fused_kernels(plain_optimizer)

    for step in range(4):
        memory = open_memory(holder, job)  # as a successor would, before every step
        arena = memory.arenas[0]
        fill(arena, 100 + step, arena.gradients)
        for name, parameter in plain.items():
            parameter.grad = arena.gradients[name] / 4
        for group in plain_optimizer.param_groups:
            group["lr"] = plain_optimizer.defaults["lr"] / (step + 1)
        plain_optimizer.step()
        memory.apply(decision(step), [0], FaultScript())

    assert arena.version == 4
    for name, parameter in plain.items():
        assert torch.equal(arena.parameters[name], parameter.detach())


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {*ACCEPTED}))
def test_an_optimizer_whose_first_minibatch_changed_nothing_begins_at_the_next(
    holder: LocalHolder, optimizer: str
) -> None:
    job = make_job(optimizer, lr_schedule=None)
    arena = open_memory(holder, job).arenas[0]
    fill(arena, 0, arena.parameters)
    arena.set_version(0, 1)
    plain = {n: nn.Parameter(p.clone()) for n, p in arena.parameters.items()}
    plain_optimizer = job.optimizer(list(plain.items()))
    use_fused_kernels(plain_optimizer)

    open_memory(holder, job).apply(decision(0, weight=0.0), [0], FaultScript())
    for step in (1, 2):
        memory = open_memory(holder, job)
        fill(memory.arenas[0], step, memory.arenas[0].gradients)
        for name, parameter in plain.items():
            parameter.grad = memory.arenas[0].gradients[name] / 4
        plain_optimizer.step()
        memory.apply(decision(step), [0], FaultScript())

    assert arena.version == 3
    for name, parameter in plain.items():
        assert torch.equal(arena.parameters[name], parameter.detach())


@pytest.mark.parametrize("optimizer", sorted({*OPTIMIZERS} - {*ACCEPTED, "counting"}))
@costly
@given(st.lists(st.sets(st.sampled_from(sorted(SHAPES))), max_size=4))
def test_parameters_without_a_gradient_are_left_alone_as_torch_leaves_them(
    optimizer: str, lacking: list[set[str]]
) -> None:
    job = make_job(optimizer, lr_schedule=None)
    holder = LocalHolder()
    arena = open_memory(holder, job).arenas[0]
    fill(arena, 0, arena.parameters)
    arena.set_version(0, 1)
    plain = {n: nn.Parameter(p.clone()) for n, p in arena.parameters.items()}
    plain_optimizer = job.optimizer(list(plain.items()))

    for step, names in enumerate(lacking):
        memory = open_memory(holder, job)  # as a successor would, before every step
        arena = memory.arenas[0]
        fill(arena, 100 + step, arena.gradients)
        arena.lacking = frozenset(names)
        for name, parameter in plain.items():
            parameter.grad = None if name in names else arena.gradients[name] / 4
        plain_optimizer.step()
        memory.apply(decision(step), [0], FaultScript())

    for name, parameter in plain.items():
        # Not its bits: torch's fused SGD, which is used here, does not take these.
        torch.testing.assert_close(arena.parameters[name], parameter.detach())
    holder.close()


class Late(Counting):
    """Keeps something more from its second step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["late"] = None if state["count"] < 2 else 1.0


def test_state_that_an_optimizer_makes_later_is_refused_not_lost(
    holder: LocalHolder,
) -> None:
    job = make_job(optimizer=Late)
    memory = open_memory(holder, job)
    memory.arenas[0].set_version(0, 1)
    memory.apply(decision(0), [0], FaultScript())

    with pytest.raises(UserCodeError, match=r"weight .*\['count', 'late'\]"):
        memory.apply(decision(1), [0], FaultScript())


def test_a_gradient_too_large_to_square_overflows(holder: LocalHolder) -> None:
    spec = ParameterSpec("weight", (1,), torch.float64, True, {})
    arena = SectionArena(holder, 0, (spec,))
    arena.gradients["weight"].fill_(1e200)

    assert contributions([arena], [], {}, {})[0].overflow


def test_a_buffer_gets_the_sum_of_its_changes_apart_from_optimizer_norm_and_clipping(
    holder: LocalHolder,
) -> None:
    job = make_job("plain", clip_grad_norm=0.5)
    buffer = ParameterSpec("mean", (2,), torch.float32, True, {}, running=True)
    memory = SlotMemory(holder, job, [(*specs_of(job), buffer)], HostDevice())
    memory.hold([0])
    arena = memory.arenas[0]
    arena.parameters["mean"].fill_(1.0)
    arena.set_version(0, 1)
    arena.gradients["mean"].copy_(torch.tensor([300.0, -4.0]))
    (one,) = contributions([arena], [], {0: (8.0, 4.0)}, {})

    memory.apply(decision(0, square_norm=one.square_norm), [0], FaultScript())
    memory.apply(decision(1, weight=0.0), [0], FaultScript())

    assert one.square_norm == 0.0
    assert arena.version == 2
    assert arena.parameters["mean"].tolist() == [301.0, -3.0]
    assert not arena.parameters["weight"].any()


def test_gradients_are_clipped_as_torch_clips_them(holder: LocalHolder) -> None:
    job = make_job("plain", clip_grad_norm=0.5)
    memory = open_memory(holder, job)
    arena = memory.arenas[0]
    arena.set_version(0, 1)
    fill(arena, 3, arena.gradients)
    plain = {n: nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
    for name, parameter in plain.items():
        parameter.grad = arena.gradients[name] / 4
    nn.utils.clip_grad_norm_(plain.values(), 0.5)
    (one,) = contributions([arena], [], {0: (8.0, 4.0)}, {})

    memory.apply(decision(0, square_norm=one.square_norm), [0], FaultScript())

    for name, parameter in plain.items():
        assert parameter.grad is not None
        torch.testing.assert_close(arena.parameters[name], -parameter.grad)


@pytest.mark.parametrize("change", [{"overflow": True, "square_norm": math.inf}, {"weight": 0.0}])
def test_a_minibatch_without_a_usable_gradient_counts_but_changes_nothing(
    holder: LocalHolder, change: dict[str, Any]
) -> None:
    memory = open_memory(holder, make_job())
    arena = memory.arenas[0]
    fill(arena, 0, arena.parameters)
    before = arena.parameters["weight"].clone()
    arena.set_version(0, 1)
    arena.gradients["weight"].fill_(math.inf)

    memory.apply(decision(0, **change), [0], FaultScript())

    assert (arena.version, arena.origin) == (1, 1)
    assert torch.equal(arena.parameters["weight"], before)


def test_a_minibatch_that_weighs_nothing_is_told() -> None:
    assert skip_reason(decision(0, weight=0.0), None) == "weight"
    assert skip_reason(decision(0), None) == ""


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("hook", [Hook.UNDO_SAVED, Hook.UPDATED, Hook.FLIPPED])
def test_a_successor_finds_a_section_before_or_after_an_update_never_within(
    holder: LocalHolder, tmp_path: Any, hook: Hook, version: int
) -> None:
    job = make_job()
    memory = open_memory(holder, job)
    arena = memory.arenas[0]
    fill(arena, 0, arena.parameters)
    arena.set_version(0, 1)
    for step in range(version):
        fill(arena, step, arena.gradients)
        memory.apply(decision(step), [0], FaultScript())
    fill(arena, 50, arena.gradients)
    before = [contents.clone() for contents in arena.undoable(version)]
    fault = Fault(hook, 0, 0, Action.RAISE, str(tmp_path / "mark"))

    with pytest.raises(InjectedFaultError):
        memory.apply(decision(version), [0], Script(faults=(fault,), rank=0, step=9))
    successor = open_memory(holder, job)

    arena = successor.arenas[0]
    assert successor.control.undo_section is None
    if hook is Hook.FLIPPED:
        assert arena.version == version + 1
        assert not same(arena.undoable(version), before)
    else:
        assert arena.version == version
        assert same(arena.undoable(version), before)


@pytest.mark.parametrize("hook", [Hook.UNDO_SAVED, Hook.UPDATED, Hook.FLIPPED])
def test_values_of_groups_are_undone_with_their_section(
    holder: LocalHolder, tmp_path: Any, hook: Hook
) -> None:
    job = make_job(StepMadeByFirstStep)
    memory = open_memory(holder, job)
    memory.arenas[0].set_version(0, 1)
    memory.apply(decision(0), [0], FaultScript())
    fault = Fault(hook, 0, 0, Action.RAISE, str(tmp_path / "mark"))

    with pytest.raises(InjectedFaultError):
        memory.apply(decision(1), [0], Script(faults=(fault,), rank=0, step=9))

    steps = 2 if hook is Hook.FLIPPED else 1
    found = open_memory(holder, job).arenas[0].numbers.group_values
    assert found == b'[[0,"step",%d],[1,"step",%d]]' % (steps, steps)


def test_a_skipped_minibatch_advances_no_value_of_groups(holder: LocalHolder) -> None:
    memory = open_memory(holder, make_job(StepMadeByFirstStep))
    arena = memory.arenas[0]
    arena.set_version(0, 1)
    memory.apply(decision(0), [0], FaultScript())
    before = arena.numbers.group_values

    memory.apply(decision(1, weight=0.0), [0], FaultScript())

    assert arena.version == 2
    assert arena.numbers.group_values == before


def test_constant_values_of_groups_are_configuration(holder: LocalHolder) -> None:
    memory = open_memory(holder, make_job("adamw"))
    memory.arenas[0].set_version(0, 1)

    memory.apply(decision(0), [0], FaultScript())

    assert memory.arenas[0].numbers.group_values == b""


@pytest.mark.parametrize("optimizer", ["adamw", "plain", "Nested", "StepMadeByFirstStep"])
def test_values_of_groups_are_in_checkpoints_and_missing_in_older_ones(
    holder: LocalHolder, optimizer: str
) -> None:
    job = make_job(optimizer)
    arena = open_memory(holder, job).arenas[0]
    fill(arena, 0, arena.parameters)
    arena.set_version(0, 1)
    open_memory(holder, job).apply(decision(0), [0], FaultScript())
    saved = {**saved_tensors(arena), **arena.numbers.tensors()}
    saved = {name: tensor.clone() for name, tensor in saved.items()}
    kept = arena.numbers.group_values
    open_memory(holder, job).apply(decision(1), [0], FaultScript())

    load(arena, saved, 1)
    assert arena.numbers.group_values == kept
    assert (GROUPS in saved) is (optimizer in ACCEPTED)

    saved.pop(GROUPS, None)
    load(arena, saved, 1)
    assert arena.numbers.group_values == b""


def test_a_checkpoint_whose_groups_are_more_is_refused(holder: LocalHolder) -> None:
    job = make_job("adamw")
    arena = open_memory(holder, job).arenas[0]
    arena.set_version(0, 1)
    arena.numbers.group_values = b'[[7,"step",1]]'

    with pytest.raises(UserCodeError, match=r"has 1 parameter groups .* of group 7"):
        open_memory(holder, job).apply(decision(0), [0], FaultScript())


def test_values_of_groups_that_grow_are_refused(holder: LocalHolder) -> None:
    arena = open_memory(holder, make_job("adamw")).arenas[0]

    with pytest.raises(UserCodeError, match="must not grow: got 100000 bytes"):
        arena.numbers.group_values = b" " * 100_000


def test_there_is_room_for_tensors_of_groups(holder: LocalHolder) -> None:
    spec = ParameterSpec("weight", (1,), torch.float32, True, {}, group_bytes=300_000)
    numbers = SectionArena(holder, 0, (spec,)).numbers

    numbers.group_values = b"x" * 400_000  # in base64

    assert numbers.group_values == b"x" * 400_000


def test_a_tied_parameter_counts_once_in_the_norm(holder: LocalHolder) -> None:
    job = make_job()
    specs = specs_of(job)
    arenas = [SectionArena(holder, section, specs) for section in (0, 1)]
    for arena in arenas:
        for gradient in arena.gradients.values():
            gradient.fill_(1)
    ties = [TiedParameter(name="weight", sections=(0, 1))]

    norms = [one.square_norm for one in contributions(arenas, ties, {}, {})]

    assert norms == pytest.approx([12 + 4, 4])


def test_a_gradient_that_is_not_finite_overflows(holder: LocalHolder) -> None:
    arena = SectionArena(holder, 0, specs_of(make_job()))
    arena.gradients["bias"][0] = math.nan

    assert contributions([arena], [], {}, {})[0].overflow


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


ROW = 1 << 14


@pytest.mark.parametrize("count", [1, ROW - 1, ROW, 3 * ROW + 5, 66 * ROW + 1])
def test_a_norm_has_the_same_bits_for_any_number_of_threads(
    holder: LocalHolder, threads: Callable[[int], None], count: int
) -> None:
    spec = ParameterSpec("weight", (count,), torch.float32, True, {})
    arena = SectionArena(holder, 0, (spec,))
    fill(arena, count, arena.gradients)
    expected = 0.0
    for row in torch.split(arena.gradients["weight"], ROW):
        norm = float(torch.linalg.vector_norm(row, dtype=torch.float64))
        expected += norm * norm

    for number in (1, 2, 3):
        threads(number)
        assert contributions([arena], [], {}, {})[0].square_norm == expected


def test_a_norm_of_a_million_elements_takes_one_call(holder: LocalHolder) -> None:
    spec = ParameterSpec("weight", (1 << 20,), torch.float32, True, {})
    arena = SectionArena(holder, 0, (spec,))

    with Traffic() as traffic:
        contributions([arena], [], {}, {})

    assert traffic.calls["linalg_vector_norm"] == 1


@pytest.mark.parametrize(("versions", "per_parameter"), [(1, 24), (2, 32)])
def test_an_update_copies_what_it_changes_once_and_no_gradient(
    holder: LocalHolder, versions: int, per_parameter: int
) -> None:
    """Trained parameter and moments; the version after the present one begins as a copy."""
    count = 1 << 16
    job = make_job()
    named = [("weight", TensorSpec(shape=(count,), dtype=torch.float32, requires_grad=True))]
    kept = optimizer_state_spec(job, named)
    state, forms = kept.state["weight"], kept.forms["weight"]
    spec = ParameterSpec(
        "weight", (count,), torch.float32, True, state, 0, forms, versions=versions
    )
    frozen = ParameterSpec("frozen", (8 * count,), torch.float32, False, {})
    memory = SlotMemory(holder, job, [(frozen, spec)], HostDevice())
    memory.hold([0])
    arena = memory.arenas[0]
    arena.set_version(0, 1)
    updater = memory.updater([0], FaultScript())
    updater.apply(decision(0), [0])
    arena.gradients["weight"].fill_(3)
    with Traffic() as traffic:
        updater.apply(decision(1), [0])

    assert traffic.num_bytes["copy_"] == pytest.approx(per_parameter * count, rel=0.1)
    assert arena.gradients_of(1)["weight"].eq(3).all()


@pytest.mark.parametrize("sections", [1, 4])
def test_a_commit_waits_once_for_a_norm_and_once_for_its_device(
    holder: LocalHolder, sections: int
) -> None:
    class Waited(DeferredDevice):
        waits = 0

        def synchronise(self) -> None:
            self.waits += 1
            super().synchronise()

    device = Waited(3)
    job = make_job()
    memory = SlotMemory(holder, job, [specs_of(job)] * sections, device)
    memory.move_home("device")
    memory.hold(range(sections))
    for arena in memory.arenas.values():
        arena.set_version(0, 1)
    updater = memory.updater(range(sections), FaultScript())
    device.waits, device.host_reads = 0, []

    with device.using():
        contributions(memory.arenas.values(), [], {}, {})
        updater.apply(decision(0), range(sections))

    assert len(device.host_reads) == device.waits == 1
    assert {arena.version for arena in memory.arenas.values()} == {1}


def test_the_norm_and_the_scale_are_of_the_mean_gradient() -> None:
    one = decision(0)

    assert gradient_norm(one) == 1.0
    assert gradient_norm(decision(0, weight=0.0)) == 0.0
    assert gradient_scale(one, None) == 0.25
    assert gradient_scale(one, 2.0) == 0.25
    assert gradient_scale(one, 0.5) == pytest.approx(0.125, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "plain"])
def test_two_versions_are_kept_and_an_update_writes_over_the_older_one(
    holder: LocalHolder, optimizer: str
) -> None:
    job = make_job(optimizer)
    once = open_memory(LocalHolder(), job)
    twice = open_memory(holder, job, versions=2)
    arenas = once.arenas[0], twice.arenas[0]
    for arena in arenas:
        for version in (0, 1):
            fill(arena, 0, arena.parameters_at(version))
        arena.set_version(0, 1)
    for step in range(4):
        before = {n: p.clone() for n, p in arenas[1].parameters.items()}
        ahead = [run.clone() for run in arenas[1].gradient_runs_of(step + 1)]
        for memory, arena in zip((once, twice), arenas, strict=True):
            fill(arena, 10 + step, arena.gradients)
            memory.apply(decision(step, overflow=step == 2), [0], FaultScript())

        for name, parameter in arenas[1].parameters.items():
            assert torch.equal(parameter, arenas[0].parameters[name])
            assert torch.equal(arenas[1].parameters_at(step)[name], before[name])
        assert all(map(torch.equal, arenas[1].gradient_runs_of(step + 1), ahead))


def test_an_interrupted_update_gives_both_versions_back(
    holder: LocalHolder, tmp_path: Path
) -> None:
    job = make_job("adamw")
    memory = open_memory(holder, job, versions=2)
    arena = memory.arenas[0]
    for version in (0, 1):
        fill(arena, version, arena.parameters_at(version))
    arena.set_version(1, 1)
    fill(arena, 5, arena.gradients)
    kept = [arena.numbers.contents.clone(), arena.payload.clone()]
    fault = Fault(Hook.UPDATED, 0, 0, Action.RAISE, str(tmp_path / "mark"))
    with pytest.raises(InjectedFaultError):
        memory.apply(decision(1), [0], Script(faults=(fault,), rank=0, step=0))
    assert not same([arena.numbers.contents, arena.payload], kept)

    found = open_memory(holder, job, versions=2).arenas[0]
    assert same([found.numbers.contents, found.payload], kept)


def test_a_checkpoint_holds_both_versions_and_the_first_one_has_one(
    holder: LocalHolder,
) -> None:
    job = make_job("adamw")
    memory = open_memory(holder, job, versions=2)
    arena = memory.arenas[0]
    first = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    load(arena, first, 0)
    assert all(p.eq(1).all() for p in arena.parameters_at(-1).values())
    arena.set_version(0, 1)
    for step in range(2):
        fill(arena, step, arena.gradients)
        memory.apply(decision(step), [0], FaultScript())
    saved = {**saved_tensors(arena), **arena.numbers.tensors()}
    saved = {name: tensor.clone() for name, tensor in saved.items()}
    kept = [{n: p.clone() for n, p in arena.parameters_at(v).items()} for v in (1, 2)]
    memory.apply(decision(2), [0], FaultScript())

    load(arena, saved, 2)
    arena.set_version(2, 1)
    for version, parameters in zip((1, 2), kept, strict=True):
        for name, parameter in parameters.items():
            assert torch.equal(arena.parameters_at(version)[name], parameter)
    del saved[f"weight//{DELAYED}"]
    with pytest.raises(MisfitError, match="must hold weight//"):
        load(arena, saved, 2)


@pytest.mark.parametrize("optimizer", ["adamw", "counting"])
def test_an_update_beside_a_mini_batch_is_no_change_of_what_that_computes_with(
    holder: LocalHolder, optimizer: str
) -> None:
    """Where gradients are stale by one, the older of two versions is written meanwhile."""
    job = make_job(optimizer)
    specs = tuple(spec._replace(versions=2) for spec in specs_of(job))
    memory = SlotMemory(holder, job, (specs,), HostDevice())
    memory.hold([0])
    arena = memory.arenas[0]
    arena.set_version(0, 0)
    updater = memory.updater([0], FaultScript())
    for step in range(3):
        weight = arena.parameters["weight"].detach().requires_grad_()
        x = torch.ones(2, 3, requires_grad=True)  # its gradient takes the weight
        loss = (x @ weight.t()).square().sum()

        updater.apply(decision(step), [0])

        # Raises if what it was computed with has changed.
        torch.autograd.backward(loss)
