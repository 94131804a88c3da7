"""Plans whose ranks in one VM share their stage's state: where memory asks for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import model_facts
from tests.unit.morphing.plan.test_tensor_groups import MIB, inputs, plan_of

from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs


def with_memory(vms: dict[str, int], memory_mib: int, size: int = 1) -> PlanInputs:
    """Four sections whose optimizer keeps two numbers for each of theirs."""
    case = inputs(vms, size)
    facts = model_facts(replace(one, optimizer_bytes=2 * MIB) for one in case.facts.sections)
    slots = tuple(replace(device, memory_bytes=memory_mib * MIB) for device in case.slots)
    return replace(case, facts=facts, slots=slots)


def test_replicas_in_one_vm_share_state_where_memory_asks_for_it() -> None:
    box = partial(with_memory, {"box": 8})
    whole, shared = plan_of(box(28)), plan_of(box(24))
    assert whole.shape == shared.shape == "1x8"
    assert not whole.shared_state
    assert shared.shared_state == (3 * MIB,) * 4
    assert shared.predicted_step_s == whole.predicted_step_s
    chosen = choose_plan(box(24)).candidates[0]
    assert chosen.shares_state
    assert chosen.stage_bytes is not None
    assert chosen.stage_bytes <= 24 * MIB


def test_replicas_in_vms_of_their_own_share_nothing() -> None:
    plan = plan_of(with_memory(dict.fromkeys("abcdefgh", 1), 24))
    assert not plan.shared_state
    assert plan.pipeline_depth > 1


def test_ranks_that_divide_matrices_always_share_state() -> None:
    plan = plan_of(replace(with_memory({"box": 2}, 60, 2), pipeline_depth=1))
    assert plan.shape == "1x1x2"
    assert [len(plan.held_by(rank)) for rank in range(2)] == [2, 2]
    why_not = choose_plan(with_memory({"box": 2}, 8, 2)).why_not
    assert why_not.startswith("the model needs")


def test_stages_that_share_state_are_cut_where_they_fit() -> None:
    case = replace(with_memory({"box": 4}, 200, 2), reduction="exact", pipeline_depth=2)
    sizes = (1, 1, 1, 6)
    sections = [
        replace(one, param_bytes=n * MIB, divided_bytes=n * MIB, optimizer_bytes=2 * n * MIB)
        for n, one in zip(sizes, case.facts.sections, strict=True)
    ]
    case = replace(case, facts=model_facts(sections))
    assert plan_of(case).stage_bounds == (0, 2, 4)
    slots = tuple(replace(device, memory_bytes=96 * MIB) for device in case.slots)
    plan = plan_of(replace(case, slots=slots))
    assert plan.stage_bounds == (0, 3, 4)
    needed = rank_bytes(case.facts, case.profile, plan, "exact")
    even = replace(plan, stage_bounds=(0, 2, 4))
    too_much = rank_bytes(case.facts, case.profile, even, "exact")
    assert max(one.total_bytes for one in needed) <= 96 * MIB
    assert max(one.total_bytes for one in too_much) > 96 * MIB


def test_state_is_not_shared_where_gradients_are_stale() -> None:
    case = replace(
        with_memory({"box": 8}, 24), pipeline_depth=1, semantics="stale_by_one", schedule="varuna"
    )
    assert choose_plan(case).plan is None


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1),
    st.integers(12, 40),
    st.sampled_from([1, 2]),
)
def test_all_ranks_of_a_plan_that_shares_state_have_room(
    vms: dict[str, int], memory_mib: int, size: int
) -> None:
    case = with_memory(vms, memory_mib, size)
    if (plan := choose_plan(case).plan) is not None and plan.shared_state:
        needed = [one.total_bytes for one in rank_bytes(case.facts, case.profile, plan, "fast")]
        assert max(needed) <= memory_mib * MIB
        if size == 1:
            whole = rank_bytes(case.facts, case.profile, replace(plan, shared_state=()), "fast")
            assert max(one.total_bytes for one in whole) > memory_mib * MIB
        again = replace(case, previous=plan)
        assert plan_of(again) == plan


@pytest.mark.parametrize("memory_mib", [24, 28])
def test_the_same_devices_again_share_as_before(memory_mib: int) -> None:
    case = with_memory({"box": 8}, memory_mib)
    plan = plan_of(case)
    assert plan_of(replace(case, previous=plan)) == plan
