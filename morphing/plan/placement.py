"""Places stages and replicas on slots.

By priority: no VM holds all replicas of a stage, if that can be had; a pipeline is as fast as its slowest
device, so equal devices share one; and few sections move.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spottrain.morphing.memory.room import WorkerBytes
from spottrain.wire.model import ModelFacts
from spottrain.wire.plan import Plan, Slot

EQUAL_WITHIN = 0.05
"""Stages whose times differ by no more count as equally heavy: so little gain is not
worth moving sections."""

Kept = Sequence[Mapping[int, int]]
"""For each device the bytes that need not move, by the stage that it might get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A slot of the fleet and the properties of its device."""

    slot: Slot
    memory_bytes: int
    speed: float
    """Relative to the device of the profile; 2 computes twice as fast."""
    kind: str = ""
    """The device of one of ``PlanInputs.measured``, whose times it has; empty: it has those of
    ``PlanInputs.profile`` by its speed."""
    usd_per_hour: float = 0.0
    """Its share of the VM's price; 0 where prices do not matter."""
    is_gpu: bool = False
    """Whether ``memory_bytes`` are its own, beside its VM's memory."""
    host_memory_bytes: int = 0
    """Of a GPU: its share of its VM's memory; 0: unknown, then it is no limit."""
    locked_memory_bytes: int = 0
    """Of a GPU: what its worker may page-lock of that; 0: there is no limit."""
    machine: str = ""
    """The computer whose cores it shares with other slots; empty: unknown."""
    cores: int = 0
    """Cores of that computer; 0: as many as it has slots."""

    @property
    def room(self) -> WorkerBytes:
        """What a worker on it may take."""
        if not self.is_gpu:
            return WorkerBytes(self.memory_bytes)
        return WorkerBytes(self.memory_bytes, self.host_memory_bytes, self.locked_memory_bytes)


DeviceKind = tuple[str, float]
"""What the times of a device depend on: ``Device.kind`` and its speed."""


def kind_of(device: Device) -> DeviceKind:
    """Return what the times of a device depend on."""
    return device.kind, device.speed


def take(devices: Iterable[Device], depth: int, width: int) -> list[Device] | None:
    """Take the first devices that a plan of depth x width can be placed on safely.

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
    *,
    stage_s: Sequence[float] | None = None,
    chunks: int = 1,
) -> tuple[Device, ...]:
    """Assign a stage and a replica to every device.

    As many replicas as possible are made of devices of one speed, which is the most
    that a fleet can compute (a pipeline is as fast as its slowest device). Of the
    remaining devices, the faster ones get the heavier stages. Where that leaves a
    choice, a device stays with the sections it has in ``previous``, by their bytes. The
    others are assigned in the order of their names, so that the slots of a VM are
    neighbours in a pipeline. Where one VM would get all replicas of a stage, one of
    them swaps places, if possible with a device of its speed; where nobody can, it does get them. Replicas are ordered from
    fast to slow, a mixed one after those of equal devices that are no faster.

    Args:
        devices: What ``DeviceFleet.take`` returned: exactly one per place.
        stage_bounds: Runs of sections, as in ``Plan.stage_bounds``.
        width: Replicas.
        facts: Bytes of the sections.
        previous: The plan that runs now, if one does.
        stage_s: Time of a micro-batch on each stage; equal if not given.
        chunks: Runs of sections that each stage has.

    Returns:
        The devices in the order of ranks, as in ``Plan.slots``.
    """
    depth = (len(stage_bounds) - 1) // chunks
    stage_s = [1.0] * depth if stage_s is None else stage_s
    kept = _kept_bytes(devices, stage_bounds, depth, facts, previous)
    stages = _assign(devices, kept, _speed_quotas(devices, kept, stage_s))
    if width > 1:
        _separate(devices, kept, stages)
    by_stage = [[devices[i] for i in stage] for stage in stages]
    replicas = _make_replicas(by_stage, stage_s)
    return tuple(device for replica in replicas for device in replica)


def _kept_bytes(
    devices: Sequence[Device],
    stage_bounds: Sequence[int],
    depth: int,
    facts: ModelFacts,
    previous: Plan | None,
) -> Kept:
    """Return what each device has of each stage; those of an old stage share one map."""
    nothing: Counter[int] = Counter()
    if previous is None:
        return [nothing] * len(devices)
    stage_of = [
        run % depth
        for run, (start, end) in enumerate(itertools.pairwise(stage_bounds))
        for _ in range(start, end)
    ]
    had: dict[tuple[int, ...], Counter[int]] = {}
    of_slot = {}
    for rank, slot in enumerate(previous.slots):
        held = previous.held_by(rank)
        if held not in had:
            kept = had[held] = Counter()
            for k in held:
                section = facts.sections[k]
                kept[stage_of[k]] += section.param_bytes + section.optimizer_bytes
        of_slot[slot] = had[held]
    return [of_slot.get(device.slot, nothing) for device in devices]


def _speed_quotas(
    devices: Sequence[Device], kept: Kept, stage_s: Sequence[float]
) -> list[Counter[float]]:
    """Return how many devices of each speed every stage gets.

    Each speed gives every stage equally many, for replicas of equal devices. The rest
    make up mixed replicas, in the order of speeds: so no other way has more replicas of
    any speed or above. In each, faster devices get heavier stages; of equally heavy
    ones, those whose sections more of the fast and fewer of the slow devices have.
    """
    depth = len(stage_s)
    fleet = Counter(device.speed for device in devices)
    quotas = [Counter({v: n // depth for v, n in fleet.items()}) for _ in stage_s]
    left = [v for v in sorted(fleet, reverse=True) for _ in range(fleet[v] % depth)]
    keepers: list[Counter[float]] = [Counter() for _ in stage_s]
    for device, own in zip(devices, kept, strict=True):
        if left and own:
            keepers[max(own, key=lambda p: (own[p], -p))][device.speed] += 1
    for first in range(0, len(left), depth):
        speeds = left[first : first + depth]
        order = sorted(
            range(depth),
            key=lambda p: (
                -_weight(stage_s[p]),
                keepers[p][speeds[-1]] - keepers[p][speeds[0]],
            ),
        )
        for p, speed in zip(order, speeds, strict=True):
            quotas[p][speed] += 1
    return quotas


def _weight(stage_s: float) -> int:
    """Return a number that is the same for times that are nearly equal."""
    return round(math.log(max(stage_s, 1e-12)) / math.log(1 + EQUAL_WITHIN))


def _assign(devices: Sequence[Device], kept: Kept, quotas: list[Counter[float]]) -> list[list[int]]:
    """Return the devices' numbers by stage: greatest keepers first, then in turn."""
    depth = len(quotas)
    stages: list[list[int]] = [[] for _ in range(depth)]
    slots = [(device.slot.vm_id, device.slot.index) for device in devices]
    order = sorted(range(len(devices)), key=slots.__getitem__)
    keepers = sorted(
        ((p, i) for i in order for p in sorted(kept[i])),
        key=lambda pair: -kept[pair[1]][pair[0]],
    )
    waiting = dict.fromkeys(order)

    def put(p: int, i: int) -> None:
        stages[p].append(i)
        quotas[p][devices[i].speed] -= 1

    for p, i in keepers:
        if i in waiting and quotas[p][devices[i].speed]:
            put(p, i)
            del waiting[i]
    turns: Counter[float] = Counter()
    for i in waiting:
        speed = devices[i].speed
        while not quotas[turns[speed] % depth][speed]:
            turns[speed] += 1
        put(turns[speed] % depth, i)
        turns[speed] += 1
    return stages


def _separate(devices: Sequence[Device], kept: Kept, stages: list[list[int]]) -> None:
    """Swap devices until no stage has all its replicas on one VM, as far as that can be had.

    If ``take`` returned the devices a partner always exists: outside the VM there are as many
    devices as stages, this stage has none of them, so another has two and can give one away.
    """
    for p, stage in enumerate(stages):
        vm_id = devices[stage[0]].slot.vm_id
        if any(devices[i].slot.vm_id != vm_id for i in stage):
            continue
        swaps = [
            (
                devices[i].speed == devices[j].speed,
                kept[j].get(p, 0) + kept[i].get(q, 0) - kept[i].get(p, 0) - kept[j].get(q, 0),
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
        if not swaps:
            continue
        *_, i, j, q = max(swaps)
        stage[stage.index(i)], stages[q][stages[q].index(j)] = j, i


def _make_replicas(
    stages: Sequence[Sequence[Device]], stage_s: Sequence[float]
) -> list[list[Device]]:
    """Combine the devices of the stages into replicas, from fast to slow."""
    by_speed: list[defaultdict[float, list[Device]]] = []
    for stage in stages:
        by_speed.append(defaultdict(list))
        for device in sorted(stage, key=lambda d: (d.slot.vm_id, d.slot.index)):
            by_speed[-1][device.speed].append(device)
    replicas: list[list[Device]] = []
    left: list[list[Device]] = [[] for _ in stages]
    for speed in sorted(set().union(*by_speed), reverse=True):
        columns = [own[speed] for own in by_speed]
        pure = min(map(len, columns))
        if pure:
            replicas += _neighbours([column[:pure] for column in columns])
        for p, column in enumerate(columns):
            left[p] += column[pure:]
    replicas += [list(mixed) for mixed in zip(*left, strict=True)]
    slowest_s = [
        max(s / d.speed for s, d in zip(stage_s, replica, strict=True)) for replica in replicas
    ]
    order = sorted(range(len(replicas)), key=slowest_s.__getitem__)
    return [replicas[d] for d in order]


def _neighbours(columns: Sequence[Sequence[Device]]) -> list[list[Device]]:
    """Combine equally many devices per stage into replicas, slots of a VM together."""
    replicas = [[device] for device in columns[0]]
    for column in columns[1:]:
        waiting: defaultdict[str, deque[Device]] = defaultdict(deque)
        for device in column:
            waiting[device.slot.vm_id].append(device)
        alone = []
        for replica in replicas:
            near = waiting[replica[-1].slot.vm_id]
            if near:
                replica.append(near.popleft())
            else:
                alone.append(replica)
        rest = itertools.chain.from_iterable(waiting.values())
        for replica, device in zip(alone, rest, strict=True):
            replica.append(device)
    return replicas
