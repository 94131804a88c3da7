from __future__ import annotations

from dataclasses import replace

from tests.unit.morphing.plan.test_choose import MIB, inputs, linked, plan_of
from tests.unit.morphing.steps import FACTS, plan

from spottrain.morphing.memory.handover import handover_bytes
from spottrain.morphing.memory.memory import PAGE_BYTES
from spottrain.morphing.memory.room import megabytes
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.modes import DeviceFleet
from spottrain.morphing.simulate.compute import Compute
from spottrain.wire.plan import Plan

SECTION_BYTES = 800 + 800 + 1600 + PAGE_BYTES


def test_a_handover_holds_the_old_and_the_new_sections() -> None:
    halves = plan(2, 1, 4)
    uneven = replace(halves, stage_bounds=(0, 1, 4))
    assert handover_bytes(FACTS, halves, halves) == ((3 * SECTION_BYTES, 0, 0),) * 2
    assert handover_bytes(FACTS, uneven, halves) == (
        (3 * SECTION_BYTES, 0, 0),
        (4 * SECTION_BYTES, 0, 0),
    )
    assert handover_bytes(FACTS, halves, uneven) == (
        (3 * SECTION_BYTES, 0, 0),
        (4 * SECTION_BYTES, 0, 0),
    )


def test_room_to_undo_is_for_the_largest_of_both() -> None:
    large = replace(FACTS.sections[0], optimizer_bytes=100_000)
    facts = replace(FACTS, sections=(large, *FACTS.sections[1:]))
    first, swapped = plan(2, 1, 4, ["a", "b"]), plan(2, 1, 4, ["b", "a"])
    both = 100_000 + 1600 + PAGE_BYTES + 3 * SECTION_BYTES
    held = both + 101_600 + PAGE_BYTES, 0, 0
    assert handover_bytes(facts, swapped, first) == (held,) * 2


def test_a_new_worker_holds_no_old_sections() -> None:
    first, other = plan(2, 1, 4, ["a", "b"]), plan(1, 1, 4, ["c"])
    assert handover_bytes(FACTS, other, first) == ((5 * SECTION_BYTES, 0, 0),)


def test_ranks_that_share_state_hold_their_part_of_it_in_a_handover() -> None:
    alone = plan(1, 2, 4, ["a", "a"])
    slots = tuple(replace(slot, index=k) for k, slot in enumerate(alone.slots))
    whole = replace(alone, slots=slots)
    shared = replace(whole, shared_state=(1,) * 4)
    assert handover_bytes(FACTS, shared, shared) == ((3 * SECTION_BYTES, 0, 0),) * 2
    assert handover_bytes(FACTS, shared, whole) == ((5 * SECTION_BYTES, 0, 0),) * 2


def test_a_gpu_hands_over_in_the_home_of_its_state() -> None:
    halves, gpu = plan(2, 1, 4), Compute(on_gpu=True)
    on_device = replace(halves, state="device")
    sections = 3 * SECTION_BYTES
    locked = 2 * SECTION_BYTES - 2 * PAGE_BYTES  # neither words nor the undo slot
    at_host, at_device = ((0, sections, locked),) * 2, ((sections, 0, 0),) * 2
    assert handover_bytes(FACTS, halves, halves, gpu) == at_host
    assert handover_bytes(FACTS, on_device, on_device, gpu) == at_device
    moved = ((sections, sections, locked),) * 2
    assert handover_bytes(FACTS, on_device, halves, gpu) == moved
    assert handover_bytes(FACTS, halves, on_device, gpu) == moved
    newcomer = plan(2, 1, 4, ["a", "b"]), plan(1, 1, 4, ["c"])
    assert handover_bytes(FACTS, newcomer[1], newcomer[0], gpu) == (
        (0, 5 * SECTION_BYTES, 4 * (SECTION_BYTES - PAGE_BYTES)),
    )


def heavy(vms: int, mib: int) -> PlanInputs:
    """Eight sections of 408 MiB; a plan with 4 replicas of 4 each needs some 2500 MiB."""
    case = inputs(vms=vms, sections=8, memory_bytes=mib * MIB)
    big = tuple(replace(s, optimizer_bytes=400 * MIB) for s in case.facts.sections)
    case = replace(case, facts=replace(case.facts, sections=big))
    fast = linked(case.profile, bandwidth_bytes_per_s=1e12)
    return replace(case, profile=fast, schedule="varuna", recompute=True)


def running(depth: int, width: int, stage_bounds: tuple[int, ...]) -> Plan:
    vms = [f"vm{number:02}" for number in range(depth * width)]
    some = plan(depth, width, 16, vms, stage_bounds=stage_bounds)
    return replace(some, microbatch_size=4, minibatch_size=64)


def test_a_plan_that_leaves_no_room_for_the_handover_is_not_chosen() -> None:
    case, before = heavy(8, 2800), running(3, 3, (0, 3, 6, 8))
    free = plan_of(case)
    assert free.shape == "2x4"
    choice = choose_plan(replace(case, previous=before))
    assert choice.plan is not None
    assert choice.plan.shape != "2x4"
    held = max(handover_bytes(case.facts, choice.plan, before))
    assert held.device <= 2800 * MIB
    row = next(c for c in choice.candidates if c.shape == "2x4")
    assert row.step_s is None
    assert "its sections and those of 3x3 at once need" in row.why_not
    assert megabytes(2800 * MIB) in row.why_not
    large = replace(heavy(8, 3500), previous=before)
    assert plan_of(large).shape == plan_of(replace(large, previous=None)).shape


def test_a_plan_that_can_go_on_is_not_left_for_one_that_finds_no_room() -> None:
    case = heavy(8, 2800)
    everything = running(1, 8, (0, 8))
    choice = choose_plan(replace(case, previous=everything))
    assert choice.plan is None
    assert "those of 1x8 at once need" in choice.why_not


def test_a_plan_that_cannot_go_on_is_left_all_the_same() -> None:
    case = heavy(8, 2800)
    lost_one = running(1, 9, (0, 8))
    assert plan_of(replace(case, previous=lost_one)).shape == plan_of(case).shape


def test_the_running_shape_is_always_considered() -> None:
    case = replace(inputs(vms=7, virtual_nodes=32), schedule="varuna", recompute=True)
    before = running(1, 6, (0, 8))
    assert 6 not in DeviceFleet(case).widths(1, 32)
    assert 6 in DeviceFleet(replace(case, previous=before)).widths(1, 32)
    assert 6 not in DeviceFleet(replace(case, previous=before)).widths(2, 32)
