from __future__ import annotations

import pytest
from tests.builders import a_plan, slots_of

from spottrain.pipeline.comm.ranks import (
    memberships,
    neighbours,
    tied_ranks,
)
from spottrain.wire.model import TiedParameter
from spottrain.wire.plan import Plan, Slot


def plan(depth: int, width: int, chunks: int = 1) -> Plan:
    """One section a run, one group of virtual nodes a replica."""
    return a_plan(
        depth,
        width,
        schedule="interleaved" if chunks > 1 else "1f1b",
        virtual_nodes=depth * width,
        slots=slots_of(["vm"] * depth * width),
        chunks=chunks,
    )


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, (None, 1)), (1, (0, 2)), (2, (1, None)), (3, (None, 4)), (5, (4, None))],
)
def test_a_pipeline_has_two_ends(rank: int, expected: tuple[int | None, int | None]) -> None:
    assert neighbours(plan(3, 2), rank) == expected


@pytest.mark.parametrize(("rank", "expected"), [(0, (2, 1)), (2, (1, 0)), (3, (5, 4)), (5, (4, 3))])
def test_the_stages_of_an_interleaved_replica_form_a_ring(
    rank: int, expected: tuple[int, int]
) -> None:
    assert neighbours(plan(3, 2, chunks=2), rank) == expected


def test_two_interleaved_stages_are_each_others_neighbours_on_both_sides() -> None:
    assert [neighbours(plan(2, 1, chunks=2), rank) for rank in (0, 1)] == [
        (1, 1),
        (0, 0),
    ]


def test_a_tie_between_runs_of_one_stage_needs_no_group_of_its_own() -> None:
    tied = TiedParameter(name="w", sections=(0, 2))

    assert tied_ranks(plan(2, 2, chunks=2), tied, 1) == (2,)
    assert tied_ranks(plan(3, 2), tied, 1) == (3, 5)


def test_ranks_that_divide_a_stage_are_rows_side_by_side_and_have_a_group() -> None:
    divided = a_plan(
        2,
        2,
        slots=tuple(Slot(vm_id=f"{k // 4}{k % 2}", index=k // 2 % 2) for k in range(8)),
        tensor_parallel=2,
    )
    assert [divided.replica_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [divided.tensor_ranks(rank) for rank in (0, 3, 6)] == [(0, 2), (1, 3), (4, 6)]
    assert divided.stage_ranks(1) == (1, 3, 5, 7)
    assert neighbours(divided, 3) == (2, None)
    tied = TiedParameter(name="w", sections=(0, 1))
    assert {*memberships(divided, [tied])} == {
        *((0, 2, 4, 6), (1, 3, 5, 7)),
        *((0, 2), (1, 3), (4, 6), (5, 7)),
        # State is shared: of either stage two ranks hold its section, one in each VM.
        *((0, 4), (1, 5), (0, 1, 4, 5)),
    }


def test_groups_are_those_of_stages_then_those_of_ties() -> None:
    tied = TiedParameter(name="w", sections=(0, 1))
    assert plan(2, 2).stage_ranks(1) == (1, 3)
    assert memberships(plan(2, 2), [tied]) == [(0, 2), (1, 3), (0, 1), (2, 3)]
