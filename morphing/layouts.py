"""Plans laid out: sections cut into stages, devices taken, memory counted, simulated."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from spottrain.morphing.bounds import (
    Array,
    Pipe,
    Times,
    fastest,
    least_steps_s,
    make_pipe,
)
from spottrain.morphing.inputs import PlanInputs
from spottrain.morphing.memory import (
    StageLoad,
    stage_bytes,
    stage_loads,
    virtual_nodes_apart,
)
from spottrain.morphing.partition import partition, spread
from spottrain.morphing.placement import Device, place, take
from spottrain.morphing.shares import pace_of, share_virtual_nodes
from spottrain.morphing.simulator import simulate_step
from spottrain.wire import Plan, ScheduleKind

RUNNABLE: tuple[ScheduleKind, ...] = ("varuna", "1f1b", "gpipe")
"""What the runtime runs; the choice is among these. Of equals the first is taken."""
CHUNKS = (2, 3, 4)
"""Runs of sections a stage that are weighed for an interleaved schedule."""
SHORT = 8
"""Micro-batches a stage of a schedule long enough to tell what its stages hold."""
UNEVEN = 1.5
"""How much slower than evenly cut a stage may be made for want of memory, at first."""


@dataclass(frozen=True, slots=True, order=True)
class Manner:
    """How a pipeline is run; of equals the least is taken."""

    rank: int
    """Of its schedule among ``RUNNABLE``."""
    chunks: int
    in_flight_bound: int
    """0 for none."""
    recompute: bool

    @property
    def schedule(self) -> ScheduleKind:
        """The kind of its lists."""
        return RUNNABLE[self.rank]


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan that might be made."""

    depth: int
    width: int
    manner: Manner


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a draft cannot be made a plan."""

    reason: str
    needed_bytes: int | None = None
    room_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan that fits; its time is yet to be predicted."""

    plan: Plan
    speeds: tuple[float, ...]
    """Of its devices."""
    needed_bytes: int
    """Of its largest worker."""
    room_bytes: int
    """Of its smallest device."""
    usd_per_hour: float
    """Of all VMs that it uses part of."""


def manners(inputs: PlanInputs, depth: int) -> list[Manner]:
    """Return how a pipeline of ``depth`` might be run."""
    if depth == 1:
        # One stage has nothing to order: it goes forward and backward by turns.
        asked = inputs.schedule
        alone = asked if asked in RUNNABLE and asked != "interleaved" else RUNNABLE[0]
        return [Manner(RUNNABLE.index(alone), 1, 0, inputs.recompute is not False)]
    found = []
    for rank, schedule in enumerate(RUNNABLE):
        if inputs.schedule in (None, schedule):
            for chunks in CHUNKS if schedule == "interleaved" else (1,):
                if depth * chunks <= len(inputs.facts.sections):
                    found += [
                        Manner(rank, chunks, 0, recompute)
                        for recompute in (False, True)
                        if inputs.recompute in (None, recompute)
                    ]
    return found


class Fleet:
    """The devices at hand."""

    def __init__(self, inputs: PlanInputs) -> None:
        self.devices = inputs.slots
        kept = set() if inputs.previous is None else set(inputs.previous.slots)
        dear = inputs.objective == "examples_per_dollar"
        fastest_first = sorted(
            self.devices,
            key=lambda d: (
                d.usd_per_hour / d.speed if dear else 0.0,
                -d.speed,
                d.slot not in kept,
                d.slot,
            ),
        )
        roomiest_first = sorted(fastest_first, key=lambda d: -d.memory_bytes)
        self.orders = [fastest_first]
        if roomiest_first != fastest_first:
            self.orders.append(roomiest_first)
        self.speeds = sorted({d.speed for d in self.devices}, reverse=True)
        self.most_bytes = max((d.memory_bytes for d in self.devices), default=0)
        self.vm_slots = Counter(d.slot.vm_id for d in self.devices)
        self.vm_usd_per_hour: Counter[str] = Counter()
        for device in self.devices:
            self.vm_usd_per_hour[device.slot.vm_id] += device.usd_per_hour  # type: ignore[assignment]
        prices = sorted(d.usd_per_hour for d in self.devices)
        self.least_usd_per_hour = [0.0, *itertools.accumulate(prices)]
        self._sizes = Counter(self.vm_slots.values())

    @property
    def alone(self) -> bool:
        """Whether every VM has but one device."""
        return set(self._sizes) <= {1}

    def widest(self, depth: int, virtual_nodes: int) -> int:
        """Return the most replicas that can be placed, no VM having all of a stage."""
        width = min(len(self.devices) // depth, virtual_nodes)
        while width > 1 and self._placeable(depth, width) < depth * width:
            width -= 1
        return width

    def _placeable(self, depth: int, width: int) -> int:
        most = depth * (width - 1)
        return sum(count * min(size, most) for size, count in self._sizes.items())

    def widths(self, depth: int, shares: int) -> list[int]:
        """Return the widths worth weighing, at most some twenty.

        The widest; of all that give the largest replica equally many shares the
        narrowest; and those that leave out all devices slower than some speed.

        Args:
            depth: Pipeline depth.
            shares: What the mini-batch is shared out in.
        """
        widest = self.widest(depth, shares)
        if widest < 1:
            return []
        found = {1, widest}
        for speed in self.speeds[:-1]:
            found.add(sum(d.speed >= speed for d in self.devices) // depth)
        share = math.ceil(shares / widest)
        while share < shares:
            found.add(math.ceil(shares / share))
            share = max(share + 1, math.ceil(share * 1.25))
        return sorted(width for width in found if 1 <= width <= widest)


class Layouts:
    """Everything that drafts of one micro-batch size have in common, worked out once."""

    def __init__(self, inputs: PlanInputs, microbatch_size: int) -> None:
        self.inputs = inputs
        self.microbatch_size = microbatch_size
        self.virtual_nodes = inputs.minibatch_size // microbatch_size
        self.fleet = Fleet(inputs)
        self.times = Times(inputs.profile, microbatch_size)
        self.param_sums = np.concatenate(
            ([0.0], np.cumsum([s.param_bytes for s in inputs.facts.sections]))
        )
        self.cut = cache(self._cut)
        self.pipe = cache(self._pipe)
        self._needed = cache(self._stage_bytes)
        self._loads = cache(self._stage_loads)
        self._tight = cache(self._tight_cut)

    @cached_property
    def state_bytes(self) -> int:
        """What all stages together hold at least: parameters, gradients, optimizer."""
        sections = self.inputs.facts.sections
        return sum(2 * s.param_bytes + s.optimizer_bytes for s in sections)

    # --- Bounds -----------------------------------------------------------------------

    def least_steps_s(
        self, depth: int, manner: Manner, widths: Sequence[int]
    ) -> list[float]:
        """Return what a mini-batch takes at least for each of ``widths``."""
        pipe = self.pipe(depth, manner.chunks, manner.recompute)
        ring = np.array(widths, np.int64)
        group = depth if manner.chunks > 1 else 1
        counts = group * -(-(self.virtual_nodes // group) // ring)
        least_s = least_steps_s(
            pipe,
            counts,
            ring,
            places=self._places(depth, manner),
            stage_bytes=self._stage_params(depth, manner),
            profile=self.inputs.profile,
            reduction=self.inputs.reduction,
        )
        steps: list[float] = least_s.tolist()
        return steps

    def _places(self, depth: int, manner: Manner) -> NDArray[np.int64] | None:
        bound = manner.in_flight_bound or None
        if manner.schedule == "1f1b":
            return np.minimum(np.arange(depth, 0, -1), bound or depth)
        return None if bound is None else np.full(depth, bound)

    def _stage_params(self, depth: int, manner: Manner) -> Array:
        cuts = np.array(self.cut(manner.recompute, depth * manner.chunks))
        by_stage: Array = np.diff(self.param_sums[cuts]).reshape(-1, depth).sum(axis=0)
        return by_stage

    def _pipe(self, depth: int, chunks: int, recompute: bool) -> Pipe:
        return make_pipe(
            self.times,
            self.cut(recompute, depth * chunks),
            depth,
            recompute,
            fastest(self.inputs.profile, self.fleet.alone),
            max(self.fleet.speeds, default=1.0),
        )

    def _cut(self, recompute: bool, runs: int) -> tuple[int, ...]:
        """Cut the sections into runs as even as can be, whatever they hold."""
        costs_s, last_s = self.times.costs_s(recompute)
        bounds = partition(costs_s, runs, last_costs_s=last_s)
        assert bounds is not None
        return bounds

    # --- Memory -----------------------------------------------------------------------

    def _stage_loads(
        self, depth: int, manner: Manner, count: int
    ) -> tuple[StageLoad, ...]:
        loads = stage_loads(manner.schedule, depth, count, manner.recompute)
        bound = manner.in_flight_bound or count
        return tuple(
            replace(
                load,
                in_flight=min(load.in_flight, bound),
                inputs_held=min(load.inputs_held, bound),
            )
            for load in loads
        )

    def loads(self, depth: int, manner: Manner, count: int) -> tuple[StageLoad, ...]:
        """Return the load of every stage of a replica of ``count`` micro-batches.

        But for GPipe, a short list tells all.
        """
        if manner.schedule != "gpipe":
            count = min(count, SHORT * depth * manner.chunks)
        return self._loads(depth, manner, count)

    def _stage_bytes(self, runs: tuple[range, ...], load: StageLoad, apart: int) -> int:
        return stage_bytes(
            self.inputs.facts,
            self.times.sections,
            runs[0],
            load,
            virtual_nodes_apart=apart,
        ).total_bytes

    def needed_bytes(
        self,
        depth: int,
        manner: Manner,
        stage_bounds: Sequence[int],
        replica_bounds: Sequence[int],
    ) -> int:
        """Return what the largest worker of a plan holds at most."""
        count = max(b - a for a, b in itertools.pairwise(replica_bounds))
        apart = virtual_nodes_apart(replica_bounds, self.inputs.reduction)
        runs = [range(a, b) for a, b in itertools.pairwise(stage_bounds)]
        loads = self.loads(depth, manner, count)
        return max(
            self._needed(tuple(runs[p::depth]), loads[p], apart) for p in range(depth)
        )

    def _tight_cut(
        self,
        depth: int,
        manner: Manner,
        count: int,
        apart: int,
        room_bytes: int,
        uneven: float,
    ) -> tuple[int, ...] | None:
        """Cut into stages that ``room_bytes`` are enough for, as evenly as that permits."""
        if manner.chunks > 1 or self.state_bytes > depth * room_bytes:
            return None
        loads = self.loads(depth, manner, count)

        def fits(stage: int, start: int, end: int) -> bool:
            needed = self._needed((range(start, end),), loads[stage], apart)
            return needed <= room_bytes

        costs_s, last_s = self.times.costs_s(manner.recompute)
        even = self.cut(manner.recompute, depth)
        most_s = uneven * max(
            sum(costs_s[a:b]) for a, b in itertools.pairwise(even)
        )
        return partition(costs_s, depth, fits, last_s, most_s)

    def largest_bound(self, draft: Draft, room_bytes: int) -> int | None:
        """Return the largest in-flight bound with which an even cut fits, if any does."""
        depth, manner = draft.depth, draft.manner
        replicas = self.shares_alike(draft)
        if manner.chunks > 1 or self.state_bytes > depth * room_bytes:
            return None
        even = self.cut(manner.recompute, depth)

        def fits(bound: int) -> bool:
            bounded = replace(manner, in_flight_bound=bound)
            return self.needed_bytes(depth, bounded, even, replicas) <= room_bytes

        loads = self.loads(depth, manner, replicas[1])
        low, high = 0, max(load.in_flight for load in loads)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low or None

    # --- Plans ------------------------------------------------------------------------

    def shares_alike(self, draft: Draft) -> tuple[int, ...]:
        """Return the shares of replicas that are all equally fast."""
        group = draft.depth if draft.manner.chunks > 1 else 1
        shares = spread(self.virtual_nodes // group, draft.width)
        return tuple(group * bound for bound in shares)

    def lay_out(
        self, draft: Draft, fleet: Fleet | None = None, uneven: float = UNEVEN
    ) -> Layout | Refusal:
        """Choose devices and cut stages that fit into each of them."""
        fleet = fleet or self.fleet
        refusal = Refusal(f"one VM would hold all {draft.width} replicas of a stage")
        room = 0
        for order in fleet.orders:
            devices = take(order, draft.depth, draft.width)
            if devices is None:
                return refusal
            smallest = min(device.memory_bytes for device in devices)
            if smallest > room:
                room = smallest
                laid = self._on(draft, devices, fleet, room, uneven)
                if isinstance(laid, Layout):
                    return laid
                refusal = laid
        return refusal

    def _on(
        self,
        draft: Draft,
        devices: list[Device],
        fleet: Fleet,
        room_bytes: int,
        uneven: float,
    ) -> Layout | Refusal:
        """Lay out on ``devices``, whose smallest has ``room_bytes``."""
        depth, manner = draft.depth, draft.manner
        even = self.cut(manner.recompute, depth * manner.chunks)
        replicas = self.shares_alike(draft)
        placed = None
        if len({device.speed for device in devices}) > 1:
            placed = self._place(devices, draft, even)
            replicas = self._shares(draft, even, placed)
        needed = least = self.needed_bytes(depth, manner, even, replicas)
        bounds: tuple[int, ...] | None = even
        if needed > room_bytes:
            apart = virtual_nodes_apart(replicas, self.inputs.reduction)
            count = max(b - a for a, b in itertools.pairwise(replicas))
            bounds = self._tight(depth, manner, count, apart, room_bytes, uneven)
            if bounds is None:
                reason = f"a stage needs {least} bytes, a device has {room_bytes}"
                return Refusal(reason, least, room_bytes)
            needed = self.needed_bytes(depth, manner, bounds, replicas)
        if placed is None or bounds != even:
            placed = self._place(devices, draft, bounds)
        plan = self._plan(draft, bounds, replicas, placed)
        vms = {slot.vm_id for slot in plan.slots}
        return Layout(
            plan,
            tuple(device.speed for device in placed),
            needed,
            room_bytes,
            sum(fleet.vm_usd_per_hour[vm] for vm in vms),
        )

    def _place(
        self, devices: list[Device], draft: Draft, bounds: tuple[int, ...]
    ) -> tuple[Device, ...]:
        return place(
            devices, bounds, draft.width, self.inputs.facts, self.inputs.previous
        )

    def _shares(
        self, draft: Draft, bounds: Sequence[int], placed: Sequence[Device]
    ) -> tuple[int, ...]:
        """Share virtual nodes out so that the slowest replica ends soonest."""
        depth, manner = draft.depth, draft.manner
        costs_s, last_s = self.times.costs_s(manner.recompute)
        runs = [sum(costs_s[a:b]) for a, b in itertools.pairwise(bounds)]
        runs[-1] = sum(last_s[bounds[-2] :])
        stages = [sum(runs[p::depth]) for p in range(depth)]
        paces = [
            pace_of([s / d.speed for s, d in zip(stages, row, strict=True)])
            for row in itertools.batched(placed, depth)
        ]
        group = depth if manner.chunks > 1 else 1
        shares = share_virtual_nodes(
            self.virtual_nodes // group,
            [group * pace.per_virtual_node_s for pace in paces],
            fixed_s=[pace.fixed_s for pace in paces],
        )
        return tuple(group * bound for bound in shares)

    def _plan(
        self,
        draft: Draft,
        stage_bounds: tuple[int, ...],
        replica_bounds: tuple[int, ...],
        placed: Sequence[Device],
    ) -> Plan:
        manner = draft.manner
        return Plan(
            pipeline_depth=draft.depth,
            data_parallel_width=draft.width,
            microbatch_size=self.microbatch_size,
            minibatch_size=self.inputs.minibatch_size,
            schedule=manner.schedule,
            recompute=manner.recompute,
            stage_bounds=stage_bounds,
            replica_bounds=replica_bounds,
            slots=tuple(device.slot for device in placed),
            predicted_step_s=0.0,
            in_flight_bound=manner.in_flight_bound or None,
            chunks=manner.chunks,
        )

    def simulate(self, layout: Layout) -> Plan:
        """Return the plan of ``layout`` with its predicted time."""
        step = simulate_step(
            layout.plan,
            self.inputs.profile,
            self.inputs.facts,
            reduction=self.inputs.reduction,
            speeds=layout.speeds,
        )
        return replace(layout.plan, predicted_step_s=step.step_s)
