from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pipeline.memory import LocalHolder

from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.model.sections import TensorSpec
from spottrain.pipeline.state.agreement import Contribution, MinibatchDecision
from spottrain.pipeline.state.arena import (
    ALIGNMENT_BYTES,
    UNUSABLE,
    ControlBlock,
    SectionArena,
    UndoSlot,
)

SPECS = (
    ParameterSpec(
        "weight",
        (3, 2),
        torch.float32,
        True,
        {
            "average": TensorSpec(shape=(3, 2), dtype=torch.float32),
            "count": TensorSpec(shape=(), dtype=torch.float64, number_type=int),
        },
    ),
    ParameterSpec("frozen", (5,), torch.float32, False, {}),
    ParameterSpec("half", (7,), torch.bfloat16, True, {}),
    ParameterSpec("bias", (2,), torch.float32, True, {}),
)
CONTRIBUTION = Contribution(4, 1.5, 2.0, 0.25, True)


@pytest.fixture
def holder() -> Iterator[LocalHolder]:
    holder = LocalHolder()
    yield holder
    holder.close()


def test_a_new_section_is_unusable_and_unprepared(holder: LocalHolder) -> None:
    record = SectionArena(holder, 4, SPECS).record()

    assert (record.version, record.prepared_step) == (UNUSABLE, None)


def test_memory_whose_first_worker_died_before_its_first_word_is_like_new(
    holder: LocalHolder,
) -> None:
    for name in ("control", "section-4"):
        os.close(holder.open(name, 1 << 16))

    record, control = SectionArena(holder, 4, SPECS).record(), ControlBlock(holder)

    assert (record.version, record.prepared_step) == (UNUSABLE, None)
    assert (control.decision, control.undo_section) == (None, None)


def test_a_successor_finds_all_that_was_written(holder: LocalHolder) -> None:
    arena = SectionArena(holder, 4, SPECS)
    arena.parameters["weight"].fill_(1.25)
    arena.gradients["half"].fill_(0.5)
    arena.state["weight"]["count"].fill_(3)
    arena.set_version(7, 2)
    arena.prepare(3, 7, CONTRIBUTION)
    before = arena.record()
    del arena

    successor = SectionArena(holder, 4, SPECS)

    assert successor.record() == before
    assert before.contribution == CONTRIBUTION
    assert successor.parameters["weight"].eq(1.25).all()
    assert successor.gradients["half"].eq(0.5).all()
    assert successor.state["weight"]["count"].item() == 3


def test_gradients_of_a_type_lie_side_by_side(holder: LocalHolder) -> None:
    arena = SectionArena(holder, 0, SPECS)

    for run in arena.gradient_runs:
        run.fill_(2)

    assert [run.dtype for run in arena.gradient_runs] == [torch.float32, torch.bfloat16]
    assert set(arena.gradients) == {"weight", "half", "bias"}
    assert all(gradient.eq(2).all() for gradient in arena.gradients.values())
    assert arena.parameters["weight"].eq(0).all()


def test_gradients_do_not_move_to_a_replica(holder: LocalHolder) -> None:
    arena, other = SectionArena(holder, 0, SPECS), SectionArena(holder, 1, SPECS)
    for tensor in (
        *arena.parameters.values(),
        *arena.gradients.values(),
        *arena.state["weight"].values(),
    ):
        tensor.fill_(3)

    for target, source in zip(other.movable, arena.movable, strict=True):
        target.copy_(source)

    assert all(tensor.eq(3).all() for tensor in other.parameters.values())
    assert all(tensor.eq(3).all() for tensor in other.state["weight"].values())
    assert all(tensor.eq(0).all() for tensor in other.gradients.values())


def test_spoiling_takes_version_and_mark_away(holder: LocalHolder) -> None:
    arena = SectionArena(holder, 0, SPECS)
    arena.set_version(7, 2)
    arena.prepare(3, 7, CONTRIBUTION)

    arena.invalidate()

    assert (arena.version, arena.record().prepared_step) == (UNUSABLE, None)


@pytest.mark.parametrize("flipped", [False, True])
def test_undo_restores_sections_that_were_not_flipped_and_nothing_else(
    holder: LocalHolder, flipped: bool
) -> None:
    arena = SectionArena(holder, 0, SPECS)
    arena.parameters["weight"].fill_(1)
    arena.set_version(7, 2)
    undo = UndoSlot(holder, [arena])
    undo.save(arena)
    arena.parameters["weight"].fill_(5)
    if flipped:
        arena.set_version(8, 3)

    undo.restore(arena)

    found = (arena.parameters["weight"][0, 0].item(), arena.version, arena.origin)
    assert found == ((5, 8, 3) if flipped else (1, 7, 2))


def test_undo_of_the_first_update_takes_back_that_there_is_state(
    holder: LocalHolder,
) -> None:
    arena = SectionArena(holder, 0, SPECS)
    arena.payload.fill_(1)
    arena.with_state = frozenset()
    arena.set_version(0, 1)
    undo = UndoSlot(holder, [arena])
    undo.save(arena)
    arena.payload.fill_(5)

    undo.restore(arena)

    assert not arena.with_state
    values = [arena.parameters[name] for name in arena.gradients]  # others do not change
    assert all((value.view(torch.uint8) == 1).all() for value in values)


def test_decisions_and_the_undo_mark_survive(holder: LocalHolder) -> None:
    decision = MinibatchDecision(3, 9, 1.5, 2.5, 3.5, False, True)
    control = ControlBlock(holder)
    assert control.decision is None
    assert control.undo_section is None

    control.decision, control.undo_section = decision, 2

    successor = ControlBlock(holder)
    assert (successor.decision, successor.undo_section) == (decision, 2)
    successor.decision = successor.undo_section = None
    again = ControlBlock(holder)
    assert again.decision is None
    assert again.undo_section is None


@given(
    shapes=st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3),
            st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_no_two_tensors_of_a_section_overlap(
    shapes: list[tuple[list[int], torch.dtype, bool]],
) -> None:
    holder = LocalHolder()
    specs = tuple(
        ParameterSpec(
            str(number),
            tuple(shape),
            dtype,
            trainable,
            {"state": TensorSpec(shape=tuple(shape), dtype=torch.float32)},
        )
        for number, (shape, dtype, trainable) in enumerate(shapes)
    )

    arena = SectionArena(holder, 0, specs)

    tensors = [
        *arena.parameters.values(),
        *arena.gradients.values(),
        *(tensor for values in arena.state.values() for tensor in values.values()),
    ]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
        assert not tensor.numel() or tensor.data_ptr() % ALIGNMENT_BYTES == 0
    assert all(tensor.eq(number).all() for number, tensor in enumerate(tensors))
    holder.close()
