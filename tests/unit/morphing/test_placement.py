from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.partition import spread
from spottrain.morphing.placement import Device, place, take
from spottrain.wire import ModelFacts, Plan, SectionFacts, Slot

SECTIONS = 6
FACTS = ModelFacts(
    fingerprint="model",
    num_parameters=100,
    blocks="blocks",
    sections=tuple(
        SectionFacts(
            index=i, param_bytes=100, optimizer_bytes=0, activation_bytes_per_example=0
        )
        for i in range(SECTIONS)
    ),
    tied=(),
    dataset_len=1,
    heldout_len=0,
)


def device(vm: int, index: int = 0, speed: float = 1.0) -> Device:
    slot = Slot(vm_id=f"vm{vm}", index=index)
    return Device(slot=slot, memory_bytes=1, speed=speed)


def even_bounds(depth: int) -> tuple[int, ...]:
    return tuple(SECTIONS * p // depth for p in range(depth + 1))


def plan(devices: tuple[Device, ...], depth: int, width: int) -> Plan:
    return Plan(
        pipeline_depth=depth,
        data_parallel_width=width,
        microbatch_size=1,
        minibatch_size=width,
        schedule="1f1b",
        recompute=True,
        stage_bounds=even_bounds(depth),
        replica_bounds=spread(width, width),
        slots=tuple(d.slot for d in devices),
        predicted_step_s=0.0,
    )


fleets = st.lists(st.integers(1, 5), min_size=1, max_size=6).map(
    lambda sizes: [device(vm, i) for vm, size in enumerate(sizes) for i in range(size)]
)
depths = st.integers(1, SECTIONS)
widths = st.integers(1, 5)


@given(fleets, depths, widths)
def test_devices_are_taken_exactly_if_a_safe_placement_exists(
    fleet: list[Device], depth: int, width: int
) -> None:
    taken = take(fleet, depth, width)
    sizes = Counter(d.slot.vm_id for d in fleet)
    most = depth * max(width - 1, 1)
    possible = sum(min(size, most) for size in sizes.values()) >= depth * width
    assert (taken is not None) == possible
    if taken is not None:
        assert len(set(taken)) == len(taken) == depth * width


@given(fleets, depths, widths, depths, widths, st.randoms(use_true_random=False))
def test_no_vm_holds_all_replicas_of_a_stage_whatever_ran_before(
    fleet: list[Device],
    depth: int,
    width: int,
    old_depth: int,
    old_width: int,
    random: Random,
) -> None:
    random.shuffle(fleet)
    before = take(fleet, old_depth, old_width)
    previous = None if before is None else plan(tuple(before), old_depth, old_width)
    taken = take(fleet, depth, width)
    if taken is None:
        return
    placed = place(taken, even_bounds(depth), width, FACTS, previous)
    assert sorted(d.slot for d in placed) == sorted(d.slot for d in taken)
    if width > 1:
        for p in range(depth):
            assert len({d.slot.vm_id for d in placed[p::depth]}) > 1


@given(fleets, depths, widths)
def test_the_same_shape_on_the_same_devices_moves_no_section(
    fleet: list[Device], depth: int, width: int
) -> None:
    taken = take(fleet, depth, width)
    if taken is None:
        return
    bounds = even_bounds(depth)
    first = place(taken, bounds, width, FACTS, None)
    previous = plan(first, depth, width)
    assert place(list(reversed(taken)), bounds, width, FACTS, previous) == first


def test_a_spare_takes_the_place_of_the_lost_one() -> None:
    first = place([device(i) for i in range(4)], even_bounds(2), 2, FACTS, None)
    left = [d for d in first if d.slot.vm_id != "vm1"] + [device(9)]
    placed = place(left, even_bounds(2), 2, FACTS, plan(first, 2, 2))
    stage_of = {d.slot.vm_id: rank % 2 for rank, d in enumerate(placed)}
    before = {d.slot.vm_id: rank % 2 for rank, d in enumerate(first)}
    assert stage_of["vm9"] == before["vm1"]
    assert all(stage_of[vm] == before[vm] for vm in ("vm0", "vm2", "vm3"))


def test_a_deeper_pipeline_keeps_owners_where_their_sections_are() -> None:
    first = place([device(i) for i in range(2)], even_bounds(2), 1, FACTS, None)
    new = [device(i) for i in range(3)]
    placed = place(new, even_bounds(3), 1, FACTS, plan(first, 2, 1))
    assert [d.slot.vm_id for d in placed] == ["vm0", "vm2", "vm1"]


def test_slots_of_a_vm_are_neighbours_in_a_pipeline() -> None:
    fleet = [device(vm, i) for vm in range(2) for i in range(3)]
    placed = place(fleet, even_bounds(3), 2, FACTS, None)
    assert [d.slot.vm_id for d in placed] == ["vm0"] * 3 + ["vm1"] * 3


def test_slow_devices_share_a_replica() -> None:
    fleet = [device(i, speed=0.5 if i in (0, 3) else 1.0) for i in range(4)]
    placed = place(fleet, even_bounds(2), 2, FACTS, None)
    assert [d.speed for d in placed] == [1.0, 1.0, 0.5, 0.5]
