"""Lays plans out: cuts stages, takes devices, checks memory, simulates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from spottrain.morphing.adapt.shares import ReplicaSpeed, replica_speed, share_virtual_nodes
from spottrain.morphing.memory.copies import copy_bytes, with_copies
from spottrain.morphing.memory.handover import handover_bytes
from spottrain.morphing.memory.memory import loader_bytes
from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.memory.room import (
    WorkerBytes,
    largest,
    megabytes,
    times,
    total,
)
from spottrain.morphing.plan.cuts import MAX_UNEVEN, Cuts
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.modes import DeviceFleet, Draft
from spottrain.morphing.plan.placement import Device, DeviceKind, kind_of, place
from spottrain.morphing.simulate.sharing import MAX_CROWDING, SharedCores, shared_cores
from spottrain.morphing.simulate.simulator import (
    expect_step,
    min_messages_s,
    min_sums_s,
    slowest_sums_s,
    slowest_update_s,
    stale_step,
)
from spottrain.wire.model import Network, Profile
from spottrain.wire.plan import Plan

NEAR = 0.05
"""Share by which a micro-batch size may be slower per example than the best one."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why a draft cannot become a plan."""

    reason: str
    needed: WorkerBytes | None = None
    room: WorkerBytes | None = None
    in_handover: bool = False
    """It would fit, but not beside the sections of the present plan."""


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """A plan that fits; its time is not predicted yet."""

    plan: Plan
    profiles: tuple[Profile, ...]
    """Of its devices."""
    sharing: SharedCores | None
    """How they share cores; None: each has one of its own."""
    needed: WorkerBytes
    """Of its largest workers."""
    room: WorkerBytes
    """Of its smallest devices."""
    usd_per_hour: float
    """Of all VMs that it uses part of."""


def _shortage(needed: WorkerBytes, room: WorkerBytes) -> str:
    """Return how much of which memory is needed, of those that are too small."""
    lacks = []
    if needed.device > room.device:
        lacks.append(f"{megabytes(needed.device)}, a device has {megabytes(room.device)}")
    if room.host and needed.host > room.host:
        have = megabytes(room.host)
        lacks.append(f"{megabytes(needed.host)} of its VM's memory, a slot has {have}")
    if needed.lacks_lock(room):
        lacks.append(
            f"{megabytes(needed.locked)} page-locked, its VM allows "
            f"{megabytes(room.locked)} (ulimit -l)"
        )
    return "; and ".join(lacks)


def _too_small(needed: WorkerBytes, room: WorkerBytes) -> Refusal:
    return Refusal(f"a stage needs {_shortage(needed, room)}", needed, room)


def _by_slot(groups: Sequence[Device], depth: int, size: int) -> list[Device]:
    """Return the device of each rank, given those of groups of ``size`` in their order."""
    rows = (groups[first : first + depth] for first in range(0, len(groups), depth))
    return [device for row in rows for _ in range(size) for device in row]


def _on_slots(plan: Plan, size: int) -> Plan:
    """Return a plan on groups of ``size`` slots of a VM as one on slots."""
    if size == 1:  # a plan before it may have had other groups
        return plan
    depth = plan.pipeline_depth
    slots = tuple(
        replace(slot, index=size * slot.index + number)
        for first in range(0, len(plan.slots), depth)
        for number in range(size)
        for slot in plan.slots[first : first + depth]
    )
    return replace(plan, slots=slots, devices_per_stage_replica=size)


class Shares(NamedTuple):
    """How a mini-batch is shared out; as in ``Plan``."""

    replica_bounds: tuple[int, ...]
    nodes_per_microbatch: tuple[int, ...]


class Layouts:
    """Makes plans of drafts, all of one micro-batch size."""

    def __init__(
        self,
        inputs: PlanInputs,
        microbatch_size: int,
        largest: Mapping[DeviceKind, int] | None = None,
    ) -> None:
        self.inputs = inputs
        self.microbatch_size = microbatch_size
        self.cuts = Cuts(inputs, microbatch_size, largest)
        self.waives_handover = False
        """True if plans need not fit beside the present plan's sections."""

    def lay_out(
        self, draft: Draft, fleet: DeviceFleet | None = None, uneven: float = MAX_UNEVEN
    ) -> PlanLayout | Refusal:
        """Choose devices and cut stages that fit into each of them."""
        fleet = fleet or self.cuts.fleet
        refusal, divides = Refusal("there are no devices"), self.inputs.group_size > 1
        tried: set[WorkerBytes] = set()
        for order in fleet.orders:
            devices = fleet.take(order, draft.depth, draft.width)
            room = fleet.smallest_room(devices)
            if room not in tried:
                tried.add(room)
                share = partial(self._share_state, draft, devices, fleet, uneven)
                laid = share() if divides else self._lay_out_on(draft, devices, fleet, room, uneven)
                if isinstance(laid, Refusal) and laid.room is not None and not divides:
                    shared = share()
                    if not isinstance(shared, Refusal) or shared.in_handover:
                        laid = shared
                if isinstance(laid, PlanLayout):
                    return laid
                refusal = laid
        return refusal

    def _lay_out_on(
        self,
        draft: Draft,
        devices: list[Device],
        fleet: DeviceFleet,
        room: WorkerBytes,
        uneven: float,
    ) -> PlanLayout | Refusal:
        """Lay out on ``devices``, whose smallest have ``room``."""
        even = self.cuts.even_cut(draft)
        replicas = self.cuts.even_shares(draft)
        placed = None
        merged: list[Shares] = []
        if self._may_differ(draft, devices):
            placed = self._place(devices, draft, even)
            replicas, merged = self._shares(draft, even, placed)
        fitting = self._fitting_cut(draft, replicas, room, uneven)
        if isinstance(fitting, Refusal):
            return fitting
        bounds, needed = fitting
        if placed is None or bounds != even:
            placed = self._place(devices, draft, bounds)
            if merged:
                _, merged = self._shares(draft, bounds, placed)
        plan = self._plan(draft, bounds, replicas, placed)
        profiles = tuple(map(self.cuts.profile_on, placed))
        if merged or any(device.kind for device in placed):
            tried = [*merged, Shares(replicas, ())]
            found = self._first_that_fits(plan, tried, placed)
            if isinstance(found, Refusal):
                return found
            plan, needed, room = found
        plan, needed = self._with_copies(plan, needed, placed)
        return self._laid_out(plan, placed, profiles, fleet, needed, room)

    def _fitting_cut(
        self,
        draft: Draft,
        replicas: Sequence[int],
        room: WorkerBytes,
        uneven: float,
        sharers: int = 1,
    ) -> tuple[tuple[int, ...], list[WorkerBytes]] | Refusal:
        """Cut evenly, or as evenly as ``room`` permits.

        Args:
            draft: What is cut.
            replicas: Bounds of the replicas' shares.
            room: Of every device.
            uneven: As of ``Cuts.tight_cut``.
            sharers: Ranks that share a stage's state.

        Returns:
            The bounds, and what the largest worker of each stage needs.
        """
        depth, mode, bounds = draft.depth, draft.mode, self.cuts.even_cut(draft)
        needed = self.cuts.needed_bytes(depth, mode, bounds, replicas, sharers)
        if largest(needed).beyond(room) <= 0:
            return bounds, needed
        tight = None
        if mode.chunks == 1 and total(needed).beyond(times(room, depth)) <= 0:
            tight = self.cuts.tight_cut(depth, mode, replicas, room, uneven, sharers)
        if tight is not None:
            needed = self.cuts.needed_bytes(depth, mode, tight, replicas, sharers)
        # More sections may make less segments.
        if tight is None or largest(needed).beyond(room) > 0:
            return _too_small(largest(needed), room)
        return tight, needed

    def _laid_out(
        self,
        plan: Plan,
        placed: Sequence[Device],
        profiles: tuple[Profile, ...],
        fleet: DeviceFleet,
        needed: Sequence[WorkerBytes],
        room: WorkerBytes,
    ) -> PlanLayout | Refusal:
        """Return the layout of a plan that fits, unless its handover does not."""
        refusal = self._handover(plan, placed)
        if refusal is not None:
            return refusal
        vms = {slot.vm_id for slot in plan.slots}
        return PlanLayout(
            plan,
            profiles,
            self._sharing(placed),
            largest(needed),
            room,
            math.fsum(fleet.vm_usd_per_hour[vm] for vm in vms),
        )

    def _share_state(
        self, draft: Draft, devices: list[Device], fleet: DeviceFleet, uneven: float
    ) -> PlanLayout | Refusal:
        """Lay out with ranks that share their stage's state wherever they are in one VM.

        Not where gradients are stale by one mini-batch, or no two ranks of a stage are in one VM.
        """
        inputs, size = self.inputs, self.inputs.group_size
        together = min(draft.width, fleet.most_slots) * size
        if inputs.semantics == "stale_by_one" or together < 2:
            return Refusal("no ranks can share state")
        room = fleet.smallest_room(devices)
        replicas = self.cuts.even_shares(draft)
        fitting = self._fitting_cut(draft, replicas, room, uneven, together)
        if isinstance(fitting, Refusal):
            return fitting
        bounds, _ = fitting
        placed = self._place(devices, draft, bounds)
        merged: list[Shares] = []
        if self._may_differ(draft, devices):
            replicas, merged = self._shares(draft, bounds, placed)
        weights = self.cuts.state_weights
        plan = replace(self._plan(draft, bounds, replicas, placed), shared_state=weights)
        found = self._first_that_fits(plan, [*merged, Shares(replicas, ())], placed)
        if isinstance(found, Refusal):
            return found
        plan, needed, room = found
        profiles = tuple(map(self.cuts.profile_on, placed))
        return self._laid_out(plan, placed, profiles, fleet, needed, room)

    def _sharing(self, placed: Sequence[Device]) -> SharedCores | None:
        """Return how ranks share cores."""
        if not self.inputs.counts_cores:
            return None
        return shared_cores(
            ((device.machine, device.cores) for device in placed),
            ((device.machine, device.cores) for device in self.inputs.slots),
        )

    def _with_copies(
        self, plan: Plan, needed: list[WorkerBytes], placed: Sequence[Device]
    ) -> tuple[Plan, list[WorkerBytes]]:
        """Add copies on other VMs to a plan with one replica, if all have room for them.

        Returns:
            The plan, and what its workers need.
        """
        if plan.data_parallel_width > 1 or not self.inputs.peer_copies:
            return plan, needed
        asked = replace(plan, peer_copies=self.inputs.peer_copies)
        copies = copy_bytes(self.inputs.facts, asked, self.inputs.previous)
        if not copies:
            return plan, needed
        on_gpu = self.cuts.compute.on_gpu
        more = [
            with_copies(one, num_bytes, on_gpu=on_gpu)
            for one, num_bytes in zip(needed, copies, strict=True)
        ]
        rooms = (device.room for device in placed)
        if all(one.beyond(room) <= 0 for one, room in zip(more, rooms, strict=True)):
            return asked, more
        return plan, needed

    def _handover(self, plan: Plan, placed: Sequence[Device]) -> Refusal | None:
        """Refuse a plan if its sections and those of the present one do not fit at once."""
        previous = self.inputs.previous
        if previous is None or self.waives_handover:
            return None
        loading = loader_bytes(self.inputs.profile, plan.microbatch_size)
        size, facts = self.inputs.group_size, self.inputs.facts
        was, to_be = (_on_slots(one, size) for one in (previous, plan))
        held = handover_bytes(facts, to_be, was, self.cuts.compute, loading)
        rooms = [device.room for device in _by_slot(placed, plan.pipeline_depth, size)]
        most, room = max(zip(held, rooms, strict=True), key=lambda at: at[0].beyond(at[1]))
        if most.beyond(room) <= 0:
            return None
        both = f"its sections and those of {previous.shape} at once need"
        reason = f"{both} {_shortage(most, room)}"
        return Refusal(reason, in_handover=True)

    def _place(
        self, devices: list[Device], draft: Draft, bounds: tuple[int, ...]
    ) -> tuple[Device, ...]:
        return place(
            devices,
            bounds,
            draft.width,
            self.inputs.facts,
            self.inputs.previous,
            stage_s=self.cuts.stage_s(draft, bounds),
            chunks=draft.mode.chunks,
        )

    def _may_differ(self, draft: Draft, devices: Sequence[Device]) -> bool:
        """Return whether replicas may get unlike shares, or micro-batches."""
        kinds = self.cuts.fleet.kinds
        if len(kinds) > 1:
            kinds = {kind_of(device) for device in devices}
        return len(kinds) > 1 or any(len(self._merges(draft, kind)) > 1 for kind in kinds)

    def _merges(self, draft: Draft, kind: DeviceKind) -> list[int]:
        return [1] if draft.mode.chunks > 1 else self.cuts.merges_on(kind)

    def _shares(
        self, draft: Draft, bounds: Sequence[int], placed: Sequence[Device]
    ) -> tuple[tuple[int, ...], list[Shares]]:
        """Share virtual nodes out so that the slowest replica finishes earliest.

        Returns:
            The best shares with micro-batches of one virtual node each, and better ones with
            micro-batches for each kind of device (VirtualFlow, section 5.1.2), best first.
        """
        depth, segments = draft.depth, draft.mode.segments
        own = [
            tuple(kind_of(device) for device in placed[i : i + depth])
            for i in range(0, len(placed), depth)
        ]
        kinds = sorted(set(itertools.chain(*own)))
        group = depth if draft.mode.chunks > 1 else 1

        @cache
        def stages_s(kind: DeviceKind, nodes: int) -> list[float]:
            on_kind = self.cuts.times_on(kind, nodes)
            beside_s = on_kind.overhead_s(segments)
            return [s + beside_s for s in self.cuts.stage_s(draft, bounds, on_kind)]

        @cache
        def pace(replica: tuple[DeviceKind, ...], nodes: int) -> ReplicaSpeed:
            return replica_speed([stages_s(kind, nodes)[p] for p, kind in enumerate(replica)])

        ends_s: dict[Shares, float] = {}
        alone: tuple[int, ...] = ()
        for chosen in itertools.product(*(self._merges(draft, kind) for kind in kinds)):
            most = dict(zip(kinds, chosen, strict=True))
            common = {replica: self._common(draft, replica, most) for replica in set(own)}
            sizes = tuple(common[replica] for replica in own)
            paces = [pace(replica, n) for replica, n in zip(own, sizes, strict=True)]
            shared = share_virtual_nodes(
                self.cuts.virtual_nodes // group,
                [group * p.per_virtual_node_s / n for p, n in zip(paces, sizes, strict=True)],
                fixed_s=[p.fixed_s for p in paces],
                sizes=sizes,
            )
            replica_bounds = tuple(group * bound for bound in shared)
            counts = [
                math.ceil((end - begin) / n)
                for (begin, end), n in zip(itertools.pairwise(replica_bounds), sizes, strict=True)
            ]
            end_s = max(
                p.fixed_s + count * p.per_virtual_node_s
                for p, count in zip(paces, counts, strict=True)
            )
            if set(sizes) == {1}:
                alone, sizes = replica_bounds, ()
            ends_s[Shares(replica_bounds, sizes)] = end_s
        best_first = sorted(ends_s, key=lambda one: (ends_s[one], one.nodes_per_microbatch))
        return alone, best_first[: best_first.index(Shares(alone, ()))]

    def _common(
        self, draft: Draft, replica: Sequence[DeviceKind], most: Mapping[DeviceKind, int]
    ) -> int:
        """Return the largest micro-batch of a replica that all its devices can compute."""
        able = set.intersection(*(set(self._merges(draft, kind)) for kind in replica))
        top = min(most[kind] for kind in replica)
        return max(nodes for nodes in able if nodes <= top)

    def _first_that_fits(
        self,
        plan: Plan,
        tried: Sequence[Shares],
        placed: Sequence[Device],
    ) -> tuple[Plan, list[WorkerBytes], WorkerBytes] | Refusal:
        """Return ``plan`` with the first shares for which all devices have room.

        Returns:
            It, what its workers need, and the room of the one that has the least left.
        """
        inputs, size = self.inputs, self.inputs.group_size
        slots = _by_slot(placed, plan.pipeline_depth, size)
        profiles = [self.cuts.profile_on(device) for device in slots]
        rooms = [device.room for device in slots]
        for shares in tried:
            one = replace(
                plan,
                replica_bounds=shares.replica_bounds,
                nodes_per_microbatch=shares.nodes_per_microbatch,
            )
            ranks = rank_bytes(
                inputs.facts,
                inputs.profile,
                _on_slots(one, size),
                inputs.reduction,
                self.cuts.compute,
                profiles,
            )
            needed = [rank.needed for rank in ranks]
            worst, room = max(zip(needed, rooms, strict=True), key=lambda at: at[0].beyond(at[1]))
            if worst.beyond(room) <= 0:
                return one, needed, room
        return _too_small(worst, room)

    def _plan(
        self,
        draft: Draft,
        stage_bounds: tuple[int, ...],
        replica_bounds: tuple[int, ...],
        placed: Sequence[Device],
    ) -> Plan:
        mode, inputs = draft.mode, self.inputs
        # With stale gradients, a thread that commits has the stream that links need.
        may_link = inputs.network != "gloo" and inputs.semantics == "synchronous"
        return Plan(
            pipeline_depth=draft.depth,
            data_parallel_width=draft.width,
            microbatch_size=self.microbatch_size,
            minibatch_size=self.inputs.minibatch_size,
            schedule=mode.schedule,
            recompute=mode.segments > 0,
            segments=max(1, mode.segments),
            stage_bounds=stage_bounds,
            replica_bounds=replica_bounds,
            slots=tuple(device.slot for device in placed),
            predicted_step_s=0.0,
            in_flight_bound=mode.in_flight_bound or None,
            links_on_devices=may_link and inputs.profile.within_vm.on_devices,
            chunks=mode.chunks,
            state=mode.state,
        )

    def update_s(self, layout: PlanLayout) -> float:
        """Return the time of the slowest update under the plan of ``layout``."""
        inputs = self.inputs
        return slowest_update_s(
            layout.plan,
            inputs.profile,
            inputs.facts,
            layout.profiles,
            self.cuts.compute,
            reduction=inputs.reduction,
            sharing=layout.sharing,
        )

    def sums_s(self, plan: Plan) -> dict[Network, float]:
        """Return the time of the slowest sum under ``plan`` by each possible library."""
        inputs = self.inputs
        return slowest_sums_s(
            plan, inputs.profile, inputs.facts, inputs.reduction, self.cuts.compute
        )

    def min_step_s(self, draft: Draft, layout: PlanLayout) -> float:
        """Return a lower bound on a mini-batch that only the placement tells: with the VMs'
        networks, which messages and sums of several stages may share."""
        inputs, plan, compute = self.inputs, layout.plan, self.cuts.compute
        messages_s = min_messages_s(plan, inputs.profile, compute) / compute.lanes
        sums_s = min_sums_s(plan, inputs.profile, inputs.facts, inputs.reduction, compute)
        (step_s,) = self.cuts.min_cut_steps_s(
            draft.depth, draft.mode, [draft.width], plan.stage_bounds, np.array([sums_s])
        )
        return max(messages_s, step_s)

    def simulate(self, layout: PlanLayout, limit_s: float = math.inf) -> Plan:
        """Return the plan of ``layout`` with its predicted times.

        Raises:
            TooSlowError: It was given up, since it takes longer than ``limit_s``.
        """
        expect = partial(expect_step, limit_s=limit_s)
        if self.inputs.semantics == "stale_by_one":
            expect = partial(stale_step)
        step = expect(
            layout.plan,
            self.inputs.profile,
            self.inputs.facts,
            reduction=self.inputs.reduction,
            profiles=layout.profiles,
            compute=self.cuts.compute,
            sharing=layout.sharing,
        )
        return replace(
            layout.plan,
            predicted_step_s=step.step_s,
            predicted_max_s=None if layout.sharing is None else MAX_CROWDING * step.step_s,
            network=step.network,
        )


def choose_layouts(inputs: PlanInputs) -> Layouts:
    """Choose the micro-batch size.

    If it is left open: the smallest whose time per example is within ``NEAR`` of the
    best that fits (Varuna, section 4.3, takes the smallest at which that stops
    improving). Where replicas may compute several virtual nodes at once, that is found for
    each kind of device: virtual nodes are no larger than the least of all, and no replica
    computes more at once than what is found for its devices.
    """
    largest = dict(_sizes_by_kind(inputs)) if inputs.merges else {}
    if inputs.microbatch_size is not None:
        return Layouts(inputs, inputs.microbatch_size, largest)
    known = _dividing(inputs)
    least = min(largest.values(), default=0) or _best_size(inputs, known) or known[0]
    return Layouts(inputs, max(m for m in known if m <= max(least, known[0])), largest)


def _dividing(inputs: PlanInputs) -> list[int]:
    """Return the sizes that the mini-batch is a multiple of."""
    return [m for m in inputs.profile.microbatch_sizes if inputs.minibatch_size % m == 0]


def _sizes_by_kind(inputs: PlanInputs) -> Iterator[tuple[DeviceKind, int]]:
    """Yield the best size for each kind of device that can train by itself."""
    is_mixed = len(set(map(kind_of, inputs.slots))) > 1
    in_order = sorted(inputs.slots, key=kind_of)
    for kind, devices in itertools.groupby(in_order, key=kind_of):
        own = tuple(replace(device, kind="", speed=1.0) for device in devices)
        alone = replace(
            inputs, slots=own, profile=inputs.profile_on(kind), previous=None, merges=False
        )
        # A replica may compute fewer at once in the end, where there are others beside it.
        size = _best_size(alone, alone.profile.microbatch_sizes if is_mixed else _dividing(alone))
        if size is not None:
            yield kind, size


def _best_size(inputs: PlanInputs, sizes: Iterable[int]) -> int | None:
    """Return the best of some sizes for a plan of any shape, None if nothing fits."""
    known = (Layouts(inputs, m) for m in sizes if m <= inputs.minibatch_size)
    fitting = [layouts for layouts in known if layouts.cuts.fits_somehow()]
    if not fitting:
        return None
    again = int(inputs.recompute is not False)
    each_s = [
        (sum(layouts.cuts.times.costs_s(again)[0]) + layouts.cuts.times.overhead_s(again))
        / layouts.microbatch_size
        for layouts in fitting
    ]
    good = (1 + NEAR) * min(each_s)
    return next(f.microbatch_size for f, s in zip(fitting, each_s, strict=True) if s <= good)
