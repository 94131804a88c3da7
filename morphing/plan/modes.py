"""The available devices, and the execution modes of pipelines on them."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from spottrain.morphing.memory.room import WorkerBytes, largest, smallest
from spottrain.morphing.plan import placement
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device, kind_of
from spottrain.wire.model import StateHome
from spottrain.wire.plan import ScheduleKind

RUNNABLE: tuple[ScheduleKind, ...] = ("varuna", "1f1b", "gpipe", "interleaved")
"""Schedules that the runtime supports. Of equals the first is taken."""
ENDLESS: tuple[ScheduleKind, ...] = ("varuna", "1f1b")
"""Those whose stages alternate forward and backward, so that they need not drain between
mini-batches."""
FEW_WIDTHS = 8
"""Of a mixed fleet so many widths are all considered: which replicas are best left out does
not follow from the largest share."""
CHUNKS = (2, 3, 4)
"""Runs of sections per stage that are considered for an interleaved schedule."""


@dataclass(frozen=True, slots=True, order=True)
class ExecutionMode:
    """Execution mode of a pipeline; of equals the smallest is taken."""

    rank: int
    """Of its schedule among ``RUNNABLE``."""
    chunks: int
    in_flight_bound: int
    """0 for none."""
    segments: int
    """In which each run of sections is recomputed; 0: nothing is recomputed."""
    on_device: bool = False
    """Whether committed state is kept on GPUs."""

    @property
    def state(self) -> StateHome:
        """Home of committed state."""
        return "device" if self.on_device else "host"

    @property
    def schedule(self) -> ScheduleKind:
        """The kind of its lists."""
        return RUNNABLE[self.rank]


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan to be considered."""

    depth: int
    width: int
    mode: ExecutionMode


def execution_modes(inputs: PlanInputs, depth: int) -> list[ExecutionMode]:
    """Return the execution modes of a pipeline of ``depth``.

    More segments are for want of memory only: see ``Cuts.segmented``.
    """
    if depth == 1:
        # One stage has nothing to order: it alternates forward and backward.
        asked = inputs.schedule
        possible = _possible(inputs)
        alone = asked if asked in possible and asked != "interleaved" else RUNNABLE[0]
        rank, segments = RUNNABLE.index(alone), int(inputs.recompute is True)
        return [ExecutionMode(rank, 1, 0, segments, home == "device") for home in inputs.homes]
    found = []
    for rank, schedule in enumerate(RUNNABLE):
        if inputs.schedule in (None, schedule) and schedule in _possible(inputs):
            for chunks in CHUNKS if schedule == "interleaved" else (1,):
                if depth * chunks <= len(inputs.facts.sections):
                    found += [
                        ExecutionMode(rank, chunks, 0, segments, home == "device")
                        for segments in (0, 1)
                        if inputs.recompute in (None, segments == 1)
                        for home in inputs.homes
                    ]
    return found


def _possible(inputs: PlanInputs) -> tuple[ScheduleKind, ...]:
    """Return the schedules that a job can have: those that fill pipelines again as they
    drain, where gradients may be stale; none of several runs where ranks divide matrices."""
    if inputs.semantics == "stale_by_one":
        return ENDLESS
    if inputs.group_size > 1:
        return tuple(schedule for schedule in RUNNABLE if schedule != "interleaved")
    return RUNNABLE


class DeviceFleet:
    """The available devices."""

    def __init__(self, inputs: PlanInputs) -> None:
        self.devices = inputs.slots
        self._previous = inputs.previous
        kept = set() if inputs.previous is None else set(inputs.previous.slots)
        by_price = inputs.objective == "examples_per_dollar"
        fastest_first = sorted(
            self.devices,
            key=lambda d: (
                d.usd_per_hour / d.speed if by_price else 0.0,
                -d.speed,
                d.slot not in kept,
                d.slot,
            ),
        )
        largest_first = sorted(fastest_first, key=lambda d: -d.memory_bytes)
        roomiest_first = sorted(fastest_first, key=lambda d: -d.room.host)
        self.orders = [fastest_first]
        for order in (largest_first, roomiest_first):
            if order not in self.orders:
                self.orders.append(order)
        self.speeds = sorted({d.speed for d in self.devices}, reverse=True)
        rooms = sorted({device.room for device in self.devices}) or [WorkerBytes(0)]
        self._room = rooms[0] if len(rooms) == 1 else None
        self.kinds = {kind_of(device) for device in self.devices}
        unlimited = {
            kind: 0
            for kind in ("host", "locked")
            if any(getattr(room, kind) == 0 for room in rooms)
        }
        self.max_room = largest(rooms)._replace(**unlimited)
        """The largest of each memory."""
        self.vm_slots = Counter(d.slot.vm_id for d in self.devices)
        self.vm_usd_per_hour: defaultdict[str, float] = defaultdict(float)
        for device in self.devices:
            self.vm_usd_per_hour[device.slot.vm_id] += device.usd_per_hour
        prices = sorted(d.usd_per_hour for d in self.devices)
        self.min_usd_per_hour = [0.0, *itertools.accumulate(prices)]
        self._sizes = Counter(self.vm_slots.values())

    def smallest_room(self, devices: Sequence[Device]) -> WorkerBytes:
        """Return the least of each memory that any of some devices has."""
        return self._room or smallest([device.room for device in devices])

    @cached_property
    def cores(self) -> int | None:
        """How many devices compute at once if all do; None if each has its own core."""
        machines = Counter((d.machine, d.cores) for d in self.devices)
        if all(not 0 < at[1] < count for at, count in machines.items()):
            return None
        return sum(min(at[1] or count, count) for at, count in machines.items())

    @property
    def alone(self) -> bool:
        """True if every VM has one device only."""
        return self.most_slots <= 1

    @property
    def most_slots(self) -> int:
        """Devices of the largest VM."""
        return max(self._sizes, default=0)

    def copies(self, depth: int, width: int) -> int:
        """Return how many VMs can hold each stage of a plan: one per replica, or 1 where some
        VM has to hold all replicas of one."""
        most = depth * (width - 1)
        placeable = sum(count * min(size, most) for size, count in self._sizes.items())
        return width if placeable >= depth * width else 1

    def rings(self, depth: int, width: int) -> int:
        """Return how many stages sum their gradients through the network of a VM, for each stage
        of the VM with most; 0 where that depends on more than the numbers of devices.

        Devices of one speed that nothing keeps are given to the stages in turn, VM by VM
        (``placement.place``). So where the replicas of a stage are farther apart than a VM has
        devices, all its stages leave it.
        """
        most = self.most_slots
        is_sure = len(self._sizes) == len(self.speeds) == len(self.orders) == 1
        if self._previous is not None or not is_sure or (width - 1) * depth < most:
            return 0
        return min(depth, most)

    def take(self, order: list[Device], depth: int, width: int) -> list[Device]:
        """Take the first devices of ``order`` that a plan can be placed on, so that no VM
        holds all replicas of a stage if that is possible."""
        most = depth * (width - 1) if width > 1 else depth
        if max(self._sizes) > most and (safe := placement.take(order, depth, width)):
            return safe
        return order[: depth * width]

    def widths(self, depth: int, shares: int) -> list[int]:
        """Return the widths worth considering, about twenty at most.

        The widest; of all that give the largest replica equally many shares the
        narrowest; those that leave out all devices slower than some speed; and that of
        the running plan.

        Args:
            depth: Pipeline depth.
            shares: Number of units in which the mini-batch is shared out.
        """
        widest = min(len(self.devices) // depth, shares)
        if widest < 1:
            return []
        found = {1}
        if len(self.speeds) > 1:
            found |= set(range(1, widest + 1)) if widest <= FEW_WIDTHS else {widest}
        if self._previous is not None and self._previous.pipeline_depth == depth:
            found.add(self._previous.data_parallel_width)
        for speed in self.speeds[:-1]:
            found.add(sum(d.speed >= speed for d in self.devices) // depth)
        share = math.ceil(shares / widest)
        while share < shares:
            found.add(math.ceil(shares / share))
            share = max(share + 1, math.ceil(share * 1.25))
        return sorted(width for width in found if 1 <= width <= widest)
