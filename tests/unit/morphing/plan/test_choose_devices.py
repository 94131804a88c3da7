"""Choosing devices where they differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from tests.unit.morphing.plan.test_choose import inputs, plan_of

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.simulate.sharing import MAX_CROWDING
from spottrain.wire.plan import Slot


def test_large_devices_are_taken_where_the_fast_ones_are_too_small() -> None:
    small = inputs(vms=4)
    slots = tuple(
        replace(d, memory_bytes=2**40 if i < 2 else 1, speed=1.0 if i < 2 else 4.0)
        for i, d in enumerate(small.slots)
    )
    plan = plan_of(replace(small, slots=slots))
    assert {slot.vm_id for slot in plan.slots} <= {"vm00", "vm01"}


def test_faster_replicas_get_more_micro_batches() -> None:
    mixed = inputs(vms=4, virtual_nodes=64)
    slots = tuple(replace(d, speed=3.0 if i < 2 else 1.0) for i, d in enumerate(mixed.slots))
    plan = plan_of(replace(mixed, slots=slots))
    shares = {
        plan.slots[d * plan.pipeline_depth].vm_id: len(plan.virtual_nodes_of(d))
        for d in range(plan.data_parallel_width)
    }
    assert plan.data_parallel_width >= 2
    assert max(shares.values()) >= 2 * min(shares.values())


def test_a_device_too_slow_to_help_is_left_out() -> None:
    mixed = inputs(vms=5)
    slots = tuple(replace(d, speed=0.01 if i == 1 else 1.0) for i, d in enumerate(mixed.slots))
    plan = plan_of(replace(mixed, slots=slots))
    assert Slot(vm_id="vm01", index=0) not in plan.slots
    assert len(plan.slots) == 4


def test_one_vm_holds_all_replicas_where_there_is_no_other() -> None:
    choice = choose_plan(inputs(vms=1, slots_per_vm=4))
    assert choice.plan is not None
    assert choice.plan.shape == "1x4"
    assert {c.data_parallel_width for c in choice.candidates} >= {1, 2, 4}


def test_no_vm_holds_all_replicas_of_a_stage_if_others_can_hold_one() -> None:
    plan = plan_of(box_and_another())
    assert plan.shape == "1x8"
    assert plan.copies == 2


def test_one_vm_holds_all_replicas_where_others_cannot_and_it_pays() -> None:
    # Two stages have three replicas at most where the large VM may not hold all of one.
    plan = plan_of(replace(box_and_another(), pipeline_depth=2, lag_share=1.0))
    assert plan.shape == "2x4"
    assert plan.copies == 1


def box_and_another() -> PlanInputs:
    """A VM with eight slots, and one with one."""
    box = inputs(vms=1, slots_per_vm=8)
    other = replace(box.slots[0], slot=Slot(vm_id="vm01", index=0))
    return replace(box, slots=(*box.slots, other))


@pytest.mark.parametrize(
    ("origin", "cores", "is_range"),
    [("measured", 8, False), ("measured", 4, True), ("measured", 2, True), ("written", 2, False)],
)
def test_where_slots_share_cores_a_prediction_is_a_range(
    origin: Literal["measured", "written"], cores: int, is_range: bool
) -> None:
    case = inputs(vms=4)
    profile = replace(case.profile, origin=origin)
    slots = tuple(replace(device, machine="pc", cores=cores) for device in case.slots)
    alone = plan_of(replace(case, profile=profile))
    choice = choose_plan(replace(case, profile=profile, slots=slots))
    plan = choice.plan
    assert plan is not None
    most_s = MAX_CROWDING * plan.predicted_step_s if is_range else None
    assert plan.predicted_max_s == choice.candidates[0].max_step_s == most_s
    slower = plan.predicted_step_s > alone.predicted_step_s
    assert slower == (is_range and cores < len(plan.slots))


def test_for_examples_per_dollar_machines_may_be_left_unused() -> None:
    case = inputs(vms=16, sections=16)
    fast = plan_of(case)
    cheap = plan_of(replace(case, objective="examples_per_dollar"))
    assert len(cheap.slots) < len(fast.slots)
    assert cheap.predicted_step_s > fast.predicted_step_s
    assert cheap.predicted_step_s * len(cheap.slots) < fast.predicted_step_s * len(fast.slots)
