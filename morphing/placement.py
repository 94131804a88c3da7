"""Which slot computes which stage: few sections move, and no VM holds them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spottrain.wire import ModelFacts, Plan, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A slot of the fleet and what its device can do."""

    slot: Slot
    memory_bytes: int
    speed: float
    """Relative to the device of the profile; 2 computes twice as fast."""


def take(devices: Iterable[Device], depth: int, width: int) -> list[Device] | None:
    """Take the first devices that a plan of depth x width can be placed on.

    With two replicas or more a VM may give ``depth * (width - 1)`` devices at most: one
    place of every stage must be left to others.

    Returns:
        As many devices as the plan has places, or ``None`` if there are not enough.
    """
    most = depth * (width - 1) if width > 1 else depth
    taken: list[Device] = []
    given: Counter[str] = Counter()
    for device in devices:
        if len(taken) == depth * width:
            break
        if given[device.slot.vm_id] < most:
            given[device.slot.vm_id] += 1
            taken.append(device)
    return taken if len(taken) == depth * width else None


def place(
    devices: Sequence[Device],
    stage_bounds: Sequence[int],
    width: int,
    facts: ModelFacts,
    previous: Plan | None,
) -> tuple[Device, ...]:
    """Give every device a stage and a replica.

    A device stays with the sections it has in ``previous`` where it can, by their
    bytes. The others are dealt out in the order of their names, so that the slots of a
    VM are neighbours in a pipeline. Where all replicas of a stage came to lie on one
    VM, one of them changes places. Within a stage the fastest goes to replica 0, so
    that slow ones share a replica.

    Args:
        devices: What ``take`` returned: exactly one a place.
        stage_bounds: Sections of the stages.
        width: Replicas.
        facts: Bytes of the sections.
        previous: The plan that runs now, if one does.

    Returns:
        The devices in the order of ranks, as in ``Plan.slots``.
    """
    depth = len(stage_bounds) - 1
    owned = _owned_sections(previous)
    kept_bytes = [
        [_kept_bytes(facts, owned.get(d.slot, ()), stage_bounds, p) for d in devices]
        for p in range(depth)
    ]
    stages = _assign(devices, kept_bytes, width)
    if width > 1:
        _separate(devices, kept_bytes, stages)
    columns = [
        sorted((devices[i] for i in stage), key=lambda d: (-d.speed, d.slot))
        for stage in stages
    ]
    return tuple(columns[p][d] for d in range(width) for p in range(depth))


def _owned_sections(previous: Plan | None) -> dict[Slot, tuple[int, ...]]:
    if previous is None:
        return {}
    return {
        slot: previous.sections_of(rank % previous.pipeline_depth)
        for rank, slot in enumerate(previous.slots)
    }


def _kept_bytes(
    facts: ModelFacts, owned: Sequence[int], stage_bounds: Sequence[int], stage: int
) -> int:
    """Return the bytes that need not move if who has ``owned`` gets ``stage``."""
    wanted = range(stage_bounds[stage], stage_bounds[stage + 1])
    kept = [facts.sections[k] for k in owned if k in wanted]
    return sum(s.param_bytes + s.optimizer_bytes for s in kept)


def _assign(
    devices: Sequence[Device], kept_bytes: Sequence[Sequence[int]], width: int
) -> list[list[int]]:
    """Return the devices' numbers by stage: greatest keepers first, then in turn."""
    depth = len(kept_bytes)
    stages: list[list[int]] = [[] for _ in range(depth)]
    order = sorted(range(len(devices)), key=lambda i: devices[i].slot)
    keepers = sorted(
        ((p, i) for i in order for p in range(depth) if kept_bytes[p][i]),
        key=lambda pair: -kept_bytes[pair[0]][pair[1]],
    )
    waiting = dict.fromkeys(order)
    for p, i in keepers:
        if i in waiting and len(stages[p]) < width:
            stages[p].append(i)
            del waiting[i]
    turn = 0
    for i in waiting:
        while len(stages[turn % depth]) == width:
            turn += 1
        stages[turn % depth].append(i)
        turn += 1
    return stages


def _separate(
    devices: Sequence[Device],
    kept_bytes: Sequence[Sequence[int]],
    stages: list[list[int]],
) -> None:
    """Change places until no stage has all its replicas on one VM.

    A partner always exists: outside the VM there are as many devices as stages, this
    stage has none of them, so another has two and can give one away.
    """
    for p, stage in enumerate(stages):
        vm_id = devices[stage[0]].slot.vm_id
        if any(devices[i].slot.vm_id != vm_id for i in stage):
            continue
        swaps = [
            (
                kept_bytes[p][j]
                + kept_bytes[q][i]
                - kept_bytes[p][i]
                - kept_bytes[q][j],
                i,
                j,
                q,
            )
            for q, other in enumerate(stages)
            if sum(devices[j].slot.vm_id != vm_id for j in other) >= 2
            for j in other
            if devices[j].slot.vm_id != vm_id
            for i in stage
        ]
        _, i, j, q = max(swaps)
        stage[stage.index(i)], stages[q][stages[q].index(j)] = j, i
