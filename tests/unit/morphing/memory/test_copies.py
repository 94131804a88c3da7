"""Copies on other VMs: who keeps them, what they take, and when a plan has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.plan.test_choose import MIB, inputs, plan_of
from tests.unit.morphing.steps import FACTS, plan

from spottrain.morphing.memory.copies import copy_bytes, state_bytes
from spottrain.morphing.memory.handover import handover_bytes
from spottrain.morphing.memory.memory import PAGE_BYTES
from spottrain.wire.plan import Plan, Slot

SECTION_BYTES = 800 + 1600 + PAGE_BYTES
"""Without gradients."""


def copied(*vms: str) -> Plan:
    """Return a plan of a section each with copies on other VMs."""
    depth = len(vms)
    return replace(
        plan(depth, 1, 4, vms, stage_bounds=tuple(range(depth + 1))),
        peer_copies=1,
    )


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=8))
def test_copies_are_kept_by_other_vms_and_spread_over_them(vms: list[str]) -> None:
    depth = len(vms)
    slots = tuple(Slot(vm_id=vm, index=index) for index, vm in enumerate(vms))
    names = [str(index) for index in range(depth)]
    some = replace(copied(*names), slots=slots)
    holders = some.copy_holders
    assert len(holders) == (depth if len(set(vms)) > 1 else 0)
    for rank, holder in enumerate(holders):
        assert vms[rank] != vms[holder]
    if 1 < len(set(vms)) == depth:
        assert sorted(holders) == list(range(depth))
    assert not replace(some, peer_copies=0).copy_holders


def test_two_states_are_kept_of_own_and_of_others_sections() -> None:
    four = copied("a", "b", "c", "d")
    assert state_bytes(FACTS, four) == (2 * SECTION_BYTES,) * 4
    assert copy_bytes(FACTS, four) == (4 * SECTION_BYTES,) * 4
    halves = replace(four, pipeline_depth=2, slots=four.slots[:2], stage_bounds=(0, 2, 4))
    assert copy_bytes(FACTS, halves) == (8 * SECTION_BYTES,) * 2
    # Until the first ones are whole, those of the larger stages before are kept, too.
    assert copy_bytes(FACTS, four, halves) == (
        *(2 * SECTION_BYTES + 4 * SECTION_BYTES,) * 2,
        *(4 * SECTION_BYTES,) * 2,
    )
    assert copy_bytes(FACTS, replace(four, peer_copies=0)) == ()


def test_a_handover_keeps_one_state() -> None:
    halves = replace(copied("a", "b"), stage_bounds=(0, 2, 4))
    without = replace(halves, peer_copies=0)
    more = 4 * SECTION_BYTES
    for after, before in zip(
        handover_bytes(FACTS, halves, halves),
        handover_bytes(FACTS, halves, without),
        strict=True,
    ):
        assert after.device == before.device + more


@pytest.mark.rotated
def test_plans_of_one_replica_have_copies_where_memory_is_enough() -> None:
    asked = replace(inputs(vms=2, sections=8, memory_bytes=10**15), peer_copies=1)
    deep = replace(asked, pipeline_depth=2)
    plentiful = plan_of(deep)
    assert (plentiful.shape, plentiful.peer_copies) == ("2x1", 1)
    assert plan_of(replace(deep, peer_copies=0)).peer_copies == 0
    assert plan_of(replace(asked, pipeline_depth=1)).peer_copies == 0

    def with_memory(mib: int) -> Plan:
        small = (replace(slot, memory_bytes=mib * MIB) for slot in deep.slots)
        return plan_of(replace(deep, slots=tuple(small)))

    sizes = [with_memory(mib).peer_copies for mib in (200, 400, 800, 1600, 3200)]
    assert sizes == sorted(sizes)
    assert {0, 1} == set(sizes)
