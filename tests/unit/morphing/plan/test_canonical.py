from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.plan.test_choose import MIB, inputs

from spottrain.morphing.plan.choose import canonical, choose_plan, rename_vms
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.wire.plan import Plan, Slot


@st.composite
def fleets(draw: st.DrawFn) -> PlanInputs:
    """Any fleet of different VMs, with or without a plan that runs on some of it."""
    vms = draw(st.integers(1, 5))
    devices: list[Device] = []
    for number in range(vms):
        speed = draw(st.sampled_from([1.0, 1.0, 2.0]))
        memory_bytes = draw(st.sampled_from([2**40, 250 * MIB, 200 * MIB]))
        usd_per_hour = draw(st.sampled_from([0.1, 0.3, 0.7]))
        devices += [
            Device(
                slot=Slot(vm_id=f"vm{number}", index=index),
                memory_bytes=memory_bytes,
                speed=speed,
                usd_per_hour=usd_per_hour,
            )
            for index in range(draw(st.integers(1, 3)))
        ]
    case = inputs(sections=draw(st.integers(1, 5)), virtual_nodes=draw(st.integers(1, 12)))
    objective = draw(st.sampled_from(["throughput", "examples_per_dollar"]))
    case = replace(case, slots=tuple(devices), objective=objective)  # type: ignore[arg-type]
    if draw(st.booleans()):
        part = replace(case, slots=tuple(devices[: draw(st.integers(1, len(devices)))]))
        case = replace(case, previous=choose_plan(part).plan)
        case = replace(case, slots=tuple(devices[draw(st.integers(0, 1)) :]))
    return case


@given(fleets(), st.integers(0, 9))
def test_the_order_of_slots_does_not_matter(case: PlanInputs, seed: int) -> None:
    slots = list(case.slots)
    random.Random(seed).shuffle(slots)
    assert choose_plan(replace(case, slots=tuple(slots))) == choose_plan(case)


def renamed(case: PlanInputs, names: dict[str, str]) -> PlanInputs:
    slots = tuple(replace(d, slot=replace(d.slot, vm_id=names[d.slot.vm_id])) for d in case.slots)
    previous = None if case.previous is None else rename_vms(case.previous, names)
    return replace(case, slots=slots, previous=previous)


@given(fleets(), st.permutations(range(5)))
def test_names_of_vms_matter_only_between_equal_vms(case: PlanInputs, order: list[int]) -> None:
    names = {f"vm{i}": f"vm{order[i]}" for i in range(5)}
    one, other = choose_plan(case), choose_plan(renamed(case, names))
    assert one.candidates == other.candidates
    assert one.why_not == other.why_not
    assert nameless(one.plan) == nameless(other.plan)


def nameless(plan: Plan | None) -> Plan | None:
    """Return ``plan`` with its VMs named in the order of its ranks."""
    if plan is None:
        return None
    names: dict[str, str] = {}
    for slot in plan.slots:
        names.setdefault(slot.vm_id, str(len(names)))
    return rename_vms(plan, names)


def test_vms_of_the_present_plan_come_first() -> None:
    case = inputs(vms=4)
    running = choose_plan(replace(case, slots=case.slots[2:])).plan
    assert running is not None
    neutral, theirs = canonical(replace(case, previous=running))
    assert [theirs[d.slot.vm_id] for d in neutral.slots] == [
        *(slot.vm_id for slot in running.slots),
        "vm00",
        "vm01",
    ]
    assert neutral.previous is not None
    assert rename_vms(neutral.previous, theirs) == running
