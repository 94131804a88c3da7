"""Plans laid out: sections cut into stages, devices taken, memory counted, simulated."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

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
from spottrain.morphing.fleet import Draft, Fleet, Manner, manners
from spottrain.morphing.inputs import PlanInputs
from spottrain.morphing.memory import (
    StageLoad,
    stage_bytes,
    stage_loads,
    virtual_nodes_apart,
)
from spottrain.morphing.partition import partition, spread
from spottrain.morphing.placement import Device, place
from spottrain.morphing.shares import pace_of, share_virtual_nodes
from spottrain.morphing.simulator import simulate_step
from spottrain.wire import Plan

SHORT = 8
"""Micro-batches a stage of a schedule long enough to tell what its stages hold."""
NEVER_BYTES = 1 << 62
"""More than any device has."""
UNEVEN = 1.25
"""How much slower than evenly cut a stage may be made for want of memory, at first."""


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
            places=self.places(depth, manner),
            stage_bytes=self._stage_params(depth, manner),
            profile=self.inputs.profile,
            reduction=self.inputs.reduction,
        )
        steps: list[float] = least_s.tolist()
        return steps

    def places(self, depth: int, manner: Manner) -> NDArray[np.int64] | None:
        """Return the most micro-batches in flight on each stage, as far as known."""
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
        if bound := manner.in_flight_bound:
            free = self._loads(depth, replace(manner, in_flight_bound=0), count)
            return tuple(
                replace(
                    load,
                    in_flight=min(load.in_flight, bound),
                    inputs_held=min(load.inputs_held, bound),
                )
                for load in free
            )
        return stage_loads(
            manner.schedule, depth, count, manner.recompute, chunks=manner.chunks
        )

    def loads(self, depth: int, manner: Manner, count: int) -> tuple[StageLoad, ...]:
        """Return the load of every stage of a replica of ``count`` micro-batches.

        But for GPipe, a short list tells all.
        """
        if manner.schedule != "gpipe":
            count = min(count, SHORT * depth * manner.chunks)
        return self._loads(depth, manner, count)

    def _stage_bytes(
        self, runs: tuple[range, ...], load: StageLoad, apart: int, width: int
    ) -> int:
        return stage_bytes(
            self.inputs.facts,
            self.times.sections,
            runs,
            load,
            virtual_nodes_apart=apart,
            width=width,
        ).total_bytes

    def needed_bytes(
        self,
        depth: int,
        manner: Manner,
        stage_bounds: Sequence[int],
        replica_bounds: Sequence[int],
    ) -> list[int]:
        """Return what the largest worker of each stage holds at most."""
        count, apart, width = self._crowd(replica_bounds)
        runs = [range(a, b) for a, b in itertools.pairwise(stage_bounds)]
        loads = self.loads(depth, manner, count)
        return [
            self._needed(tuple(runs[p::depth]), loads[p], apart, width)
            for p in range(depth)
        ]

    def _crowd(self, replica_bounds: Sequence[int]) -> tuple[int, int, int]:
        """Return what of the replicas matters for memory.

        The largest share, virtual nodes kept apart, and how many share the writing of
        checkpoints (more than there are sections are as good as so many).
        """
        count = max(b - a for a, b in itertools.pairwise(replica_bounds))
        apart = virtual_nodes_apart(replica_bounds, self.inputs.reduction)
        width = min(len(replica_bounds) - 1, len(self.inputs.facts.sections))
        return count, apart, width

    def _tight_cut(
        self,
        depth: int,
        manner: Manner,
        crowd: tuple[int, int, int],
        room_bytes: int,
        uneven: float,
    ) -> tuple[int, ...] | None:
        """Cut into stages that ``room_bytes`` are enough for, as evenly as that permits."""
        count, apart, width = crowd
        loads = self.loads(depth, manner, count)

        sections = len(self.inputs.facts.sections)

        def excess(stage: int, start: int, end: int) -> int:
            run = (range(start, end),)
            return self._needed(run, loads[stage], apart, width) - room_bytes

        @cache
        def farthest(stage: int, start: int) -> int:
            # Longer runs need more.
            ends = range(start + 1, sections - (depth - stage - 1) + 1)
            key = partial(excess, stage, start)
            return start + bisect.bisect_right(ends, 0, key=key)

        costs_s, last_s = self.times.costs_s(manner.recompute)
        even = self.cut(manner.recompute, depth)
        slowest_s = max(sum(costs_s[a:b]) for a, b in itertools.pairwise(even))
        return partition(
            costs_s,
            depth,
            lambda stage, start, end: end <= farthest(stage, start),
            last_s,
            uneven * slowest_s,
        )

    def largest_bound(self, draft: Draft, room_bytes: int) -> int | None:
        """Return the largest in-flight bound with which an even cut fits, if any does."""
        depth, manner = draft.depth, draft.manner
        replicas = self.shares_alike(draft)
        if manner.chunks > 1 or self.state_bytes > depth * room_bytes:
            return None
        even = self.cut(manner.recompute, depth)

        def fits(bound: int) -> bool:
            bounded = replace(manner, in_flight_bound=bound)
            return max(self.needed_bytes(depth, bounded, even, replicas)) <= room_bytes

        loads = self.loads(depth, manner, replicas[1])
        low, high = 0, max(load.in_flight for load in loads)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low or None

    def as_hard(self, draft: Draft, refused: Draft) -> bool:
        """Whether ``draft`` cannot fit for the reason that ``refused`` did not.

        With fewer replicas of the same kind, each has no fewer micro-batches and more of
        the checkpoints to write.
        """
        alike = len(self.fleet.orders) == len(self.fleet.speeds) == 1
        fast = self.inputs.reduction == "fast"
        return alike and fast and draft.width <= refused.width

    def fits_somehow(self) -> bool:
        """Whether there is any plan for the devices at hand, however slow."""
        most = min(len(self.inputs.facts.sections), len(self.fleet.devices))
        return any(
            self._least_bytes(p) <= self.fleet.most_bytes for p in range(most, 0, -1)
        )

    def _least_bytes(self, depth: int) -> int:
        """Return what the largest worker needs if memory is all that counts."""
        least = []
        for manner in manners(self.inputs, depth):
            tight = manner if manner.chunks > 1 else replace(manner, in_flight_bound=1)
            cut = self.cut(manner.recompute, depth * manner.chunks)
            alone = 0, self.virtual_nodes
            least.append(max(self.needed_bytes(depth, tight, cut, alone)))
        return min(least, default=NEVER_BYTES)

    def why_nothing_fits(self) -> str:
        """Return one line: how many devices of which size the model needs."""
        room = self.fleet.most_bytes
        have = f"{len(self.fleet.devices)} of at most {room} bytes"
        sections = len(self.inputs.facts.sections)
        for depth in range(1, sections + 1):
            if self.state_bytes <= depth * room and self._least_bytes(depth) <= room:
                return f"the model needs {depth} devices of {room} bytes: got {have}"
        least = self._least_bytes(sections)
        return (
            f"the model needs {sections} devices of {least} bytes each: got {have}; "
            "take larger devices or a smaller microbatch_size"
        )

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
            devices = fleet.take(order, draft.depth, draft.width)
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
        needed = self.needed_bytes(depth, manner, even, replicas)
        bounds = even
        if max(needed) > room_bytes:
            tight = None
            if manner.chunks == 1 and sum(needed) <= depth * room_bytes:
                crowd = self._crowd(replicas)
                tight = self._tight(depth, manner, crowd, room_bytes, uneven)
            if tight is None:
                most = max(needed)
                reason = f"a stage needs {most} bytes, a device has {room_bytes}"
                return Refusal(reason, most, room_bytes)
            bounds = tight
            needed = self.needed_bytes(depth, manner, bounds, replicas)
        if placed is None or bounds != even:
            placed = self._place(devices, draft, bounds)
        plan = self._plan(draft, bounds, replicas, placed)
        vms = {slot.vm_id for slot in plan.slots}
        return Layout(
            plan,
            tuple(device.speed for device in placed),
            max(needed),
            room_bytes,
            sum(fleet.vm_usd_per_hour[vm] for vm in vms),
        )

    def _stage_s(self, draft: Draft, bounds: Sequence[int]) -> list[float]:
        """Return what a micro-batch takes on each stage at speed 1."""
        costs_s, last_s = self.times.costs_s(draft.manner.recompute)
        runs = [sum(costs_s[a:b]) for a, b in itertools.pairwise(bounds)]
        runs[-1] = sum(last_s[bounds[-2] :])
        return [sum(runs[p :: draft.depth]) for p in range(draft.depth)]

    def _place(
        self, devices: list[Device], draft: Draft, bounds: tuple[int, ...]
    ) -> tuple[Device, ...]:
        return place(
            devices,
            bounds,
            draft.width,
            self.inputs.facts,
            self.inputs.previous,
            stage_s=self._stage_s(draft, bounds),
            chunks=draft.manner.chunks,
        )

    def _shares(
        self, draft: Draft, bounds: Sequence[int], placed: Sequence[Device]
    ) -> tuple[int, ...]:
        """Share virtual nodes out so that the slowest replica ends soonest."""
        depth = draft.depth
        stages = self._stage_s(draft, bounds)
        paces = [
            pace_of([s / device.speed for s, device in zip(stages, own, strict=True)])
            for own in (placed[i : i + depth] for i in range(0, len(placed), depth))
        ]
        group = depth if draft.manner.chunks > 1 else 1
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
