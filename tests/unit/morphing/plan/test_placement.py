from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_plan, model_facts, section_facts

from spottrain.morphing.plan.placement import Device, place, take
from spottrain.wire.plan import Plan, Slot

SECTIONS = 6
FACTS = model_facts(
    (section_facts(i, param_bytes=100, optimizer_bytes=0) for i in range(SECTIONS)),
    num_parameters=100,
)


def device(vm: int, index: int = 0, speed: float = 1.0) -> Device:
    slot = Slot(vm_id=f"vm{vm}", index=index)
    return Device(slot=slot, memory_bytes=1, speed=speed)


def even_bounds(depth: int) -> tuple[int, ...]:
    return tuple(SECTIONS * p // depth for p in range(depth + 1))


def plan(devices: tuple[Device, ...], depth: int, width: int) -> Plan:
    return a_plan(
        depth,
        width,
        schedule="1f1b",
        num_sections=SECTIONS,
        slots=tuple(d.slot for d in devices),
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


kinds = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1.0, 2.0, 4.0])))
mixed_fleets = kinds.filter(bool).map(
    lambda vms: [device(vm, i, speed) for vm, (size, speed) in enumerate(vms) for i in range(size)]
)


def replicas(placed: Sequence[Device], depth: int) -> list[list[float]]:
    """Return the speeds of each replica's devices."""
    return [
        [d.speed for d in placed[first : first + depth]] for first in range(0, len(placed), depth)
    ]


@given(mixed_fleets, depths, widths, depths, widths, st.data())
def test_no_other_replicas_have_more_speed_whatever_ran_before(
    fleet: list[Device],
    depth: int,
    width: int,
    old_depth: int,
    old_width: int,
    data: st.DataObject,
) -> None:
    fleet = data.draw(st.permutations(fleet))
    before = take(fleet, old_depth, old_width)
    previous = None if before is None else plan(tuple(before), old_depth, old_width)
    taken = take(sorted(fleet, key=lambda d: -d.speed), depth, width)
    if taken is None:
        return
    placed = place(taken, even_bounds(depth), width, FACTS, previous)
    throughputs = [min(speeds) for speeds in replicas(placed, depth)]
    assert throughputs == sorted(throughputs, reverse=True)
    safe_anyhow = max(Counter(d.slot.vm_id for d in taken).values()) < width
    if width == 1 or safe_anyhow:
        # Devices in the order of speed, so many at a time: none can do better.
        speeds = sorted((d.speed for d in taken), reverse=True)
        assert throughputs == speeds[depth - 1 :: depth]
        fleet_of = Counter(speeds)
        pure = sum(len(set(own)) == 1 for own in replicas(placed, depth))
        assert pure >= sum(n // depth for n in fleet_of.values())


def test_like_devices_share_a_replica_and_the_mixed_one_is_last() -> None:
    fleet = [device(i, speed=4.0 if i % 3 == 0 else 1.0) for i in range(8)]
    placed = place(fleet, even_bounds(2), 4, FACTS, None)
    assert replicas(placed, 2) == [[4.0] * 2, [1.0] * 2, [1.0] * 2, [4.0, 1.0]]


def test_of_three_kinds_a_mixed_replica_stands_where_its_pace_puts_it() -> None:
    speeds = [4.0, 4.0, 4.0, 2.0, 1.0, 1.0]
    fleet = [device(i, speed=speed) for i, speed in enumerate(speeds)]
    placed = place(fleet, even_bounds(2), 3, FACTS, None)
    assert replicas(placed, 2) == [[4.0, 4.0], [4.0, 2.0], [1.0, 1.0]]


def test_the_faster_devices_of_a_mixed_replica_get_the_heavier_stages() -> None:
    fleet = [device(i, speed=speed) for i, speed in enumerate([1.0, 2.0, 4.0])]
    placed = place(fleet, even_bounds(3), 1, FACTS, None, stage_s=[1.0, 4.0, 2.0])
    assert [d.speed for d in placed] == [1.0, 4.0, 2.0]


def test_fast_devices_leave_their_sections_to_share_a_replica() -> None:
    # Both fast ones hold the first half: kept there, each would wait for a slow one.
    fleet = [device(i, speed=4.0 if i < 2 else 1.0) for i in range(4)]
    held = [fleet[0], fleet[2], fleet[1], fleet[3]]
    placed = place(fleet, even_bounds(2), 2, FACTS, plan(tuple(held), 2, 2))
    assert replicas(placed, 2) == [[4.0, 4.0], [1.0, 1.0]]
    before = {d.slot: rank % 2 for rank, d in enumerate(held)}
    moved = [d for rank, d in enumerate(placed) if before[d.slot] != rank % 2]
    assert len(moved) == 2


def test_a_slow_spare_takes_the_lost_ones_stage_if_stages_are_equal() -> None:
    for lost in range(4):
        first = place([device(i) for i in range(4)], even_bounds(4), 1, FACTS, None)
        left = [d for i, d in enumerate(first) if i != lost]
        fleet = [*left, device(9, speed=0.5)]
        placed = place(
            fleet,
            even_bounds(4),
            1,
            FACTS,
            plan(first, 4, 1),
            stage_s=[1.0, 1.01, 0.99, 1.0],
        )
        assert placed == (*first[:lost], fleet[-1], *first[lost + 1 :])


def test_a_slow_spare_takes_the_lightest_stage_if_that_is_worth_a_move() -> None:
    first = place([device(i) for i in range(4)], even_bounds(4), 1, FACTS, None)
    fleet = [*first[1:], device(9, speed=0.5)]
    stage_s = [1.0, 1.0, 0.5, 1.0]
    placed = place(fleet, even_bounds(4), 1, FACTS, plan(first, 4, 1), stage_s=stage_s)
    assert placed == (first[2], first[1], fleet[-1], first[3])


def test_a_stage_is_spread_over_vms_before_devices_are_matched_by_speed() -> None:
    fleet = [device(0, i, 4.0) for i in range(2)] + [device(1, speed=1.0)]
    fleet += [device(2, speed=1.0)]
    placed = place(fleet, even_bounds(2), 2, FACTS, None)
    assert replicas(placed, 2) == [[4.0, 4.0], [1.0, 1.0]]
    for p in range(2):
        assert len({d.slot.vm_id for d in placed[p::2]}) == 2


def test_slots_of_a_vm_stay_neighbours_where_some_are_missing() -> None:
    pairs = [device(1, 0), device(1, 1), device(2, 0), device(2, 1)]
    gone, alone, new = device(3), device(0), device(9)
    before = plan((gone, alone, *pairs), 2, 3)
    placed = place([new, alone, *pairs], even_bounds(2), 3, FACTS, before)
    assert placed == (*pairs, new, alone)


def test_each_run_of_an_interleaved_stage_is_kept() -> None:
    fleet = [device(i) for i in range(2)]
    before = plan((fleet[1], fleet[0]), 2, 1)
    # Stage 0 has sections 0 and 3 to 5, stage 1 the others.
    bounds = (0, 1, 3, 6, 6)
    placed = place(fleet, bounds, 1, FACTS, before, chunks=2)
    assert [d.slot.vm_id for d in placed] == ["vm0", "vm1"]
