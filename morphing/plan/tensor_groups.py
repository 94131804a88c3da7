"""Plans whose stages are groups of devices that divide matrices: tensor parallelism.

A group is planned as one device, by what ``group_profile`` says of it. What each of its devices has
of parameters and state, the memory model knows (``morphing.memory``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from spottrain.morphing.plan.candidates import Candidate
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.compute import Compute
from spottrain.morphing.simulate.reducing import hop_of
from spottrain.wire.model import MicrobatchProfile, ModelFacts, Profile, SectionProfile
from spottrain.wire.plan import Plan, Slot

Members = Mapping[Slot, tuple[Slot, ...]]
"""The slots of each group, by the first one."""


def grouped(inputs: PlanInputs) -> tuple[PlanInputs, Members]:
    """Return inputs whose slots are groups, with a profile and a previous plan of groups.

    What is left over of a VM is left out.
    """
    size = inputs.group_size
    vms: defaultdict[str, list[Device]] = defaultdict(list)
    for device in sorted(inputs.slots, key=lambda device: device.slot):
        vms[device.slot.vm_id].append(device)
    groups = [
        own[first : first + size]
        for own in vms.values()
        for first in range(0, len(own) - size + 1, size)
    ]
    previous = inputs.previous
    if previous is not None:
        leads = previous.devices_per_stage_replica == size
        previous = _of_first(previous) if leads else None
    members = {group[0].slot: tuple(device.slot for device in group) for group in groups}
    slots = tuple(map(_as_one, groups))
    profile, *others = (
        group_profile(one, inputs.facts, size, inputs.compute)
        for one in (inputs.profile, *inputs.measured)
    )
    changed = replace(
        inputs, slots=slots, previous=previous, profile=profile, measured=tuple(others)
    )
    return changed, members


def spread(plan: Plan, members: Members) -> Plan:
    """Return a plan on groups as one on their slots."""
    depth, leaders = plan.pipeline_depth, plan.slots
    size = len(members[leaders[0]])
    slots = [
        members[leader][index]
        for first in range(0, len(leaders), depth)
        for index in range(size)
        for leader in leaders[first : first + depth]
    ]
    return replace(plan, slots=tuple(slots), devices_per_stage_replica=size)


def group_profile(profile: Profile, facts: ModelFacts, size: int, compute: Compute) -> Profile:
    """Return the profile of groups of ``size`` devices: that of one device if it is 1.

    Sections are as they were measured in groups of that size. Where they were not, their times
    are derived: the share of the matrices that is divided shrinks to one part, and what is beside
    these matrices with them, though without ``sequence_parallel`` each rank does all of it; sums
    of activations, each of the shape of what leaves the section, are added as measured within a
    VM; of each device a group is taken to need what one alone would. In both cases a task that
    receives an activation or a gradient takes the time in which the ranks put it together, of
    which each was sent a part (Narayanan's dissertation, 4.1.3).

    Args:
        profile: Measured on single devices, and perhaps in groups.
        facts: Say what is divided.
        size: Devices of a group.
        compute: What they compute on.
    """
    if size == 1:
        return profile
    measured = _measured(profile, size)
    sums = _Sums(profile, size, compute)

    def in_groups(one: MicrobatchProfile) -> MicrobatchProfile:
        examples = one.microbatch_size
        sections = measured.get(examples) or sums.divided(one, facts)
        received = max((compute.sent_bytes(section) for section in one.sections[:-1]), default=0.0)
        overheads = replace(profile.overheads_at(examples), receiving_s=sums.gather_s(received))
        return replace(one, sections=sections, overheads=overheads)

    return replace(profile, microbatches=tuple(map(in_groups, profile.microbatches)), groups=())


def on_slots(candidate: Candidate, inputs: PlanInputs) -> Candidate:
    """Return a candidate on groups as one on their slots."""
    groups = candidate.pipeline_depth * candidate.data_parallel_width
    is_measured = candidate.microbatch_size in _measured(inputs.profile, inputs.group_size)
    return replace(
        candidate,
        unused_slots=len(inputs.slots) - groups * inputs.group_size,
        tensor_parallel=inputs.group_size,
        tensor_times="measured" if is_measured else "derived",
    )


def _measured(profile: Profile, size: int) -> dict[int, tuple[SectionProfile, ...]]:
    """Return the sections that were measured in groups of a size, by micro-batch size."""
    return {
        one.microbatch_size: one.sections
        for group in profile.groups
        if group.size == size
        for one in group.microbatches
    }


class _Sums:
    """Times in which a group sums activations, or puts them together.

    Args:
        profile: Has rings and links.
        size: Devices of a group.
        compute: What they compute on.
    """

    def __init__(self, profile: Profile, size: int, compute: Compute) -> None:
        self._size, self._divide_sequence = size, profile.sequence_parallel
        self._compute = compute
        on_device = compute.on_gpu and compute.network != "gloo"
        self._hop = hop_of(profile, size, between_vms=False, rings=1, on_device=on_device)

    def divided(self, alone: MicrobatchProfile, facts: ModelFacts) -> tuple[SectionProfile, ...]:
        """Derive the times of sections from those of one device alone.

        Ranks that divide the sequence scatter a sum, and gather parts before the next matrices
        as they come out of a norm, not in the type of matrices; backwards, which scatter and
        gather as well, gather again what these matrices were given.
        """
        own = [float(one.output_bytes) for one in alone.sections]
        summed = list(map(self._compute.summed_bytes, alone.sections))
        own[-1], summed[-1] = max(own), max(summed)  # it sends nothing on, but sums as well

        def derived(one: SectionProfile) -> SectionProfile:
            known = facts.sections[one.index]
            left = 1 - known.divided_share * (self._size - 1) / self._size
            sum_s = gradient_s = self._sum_s(summed[one.index])
            if self._divide_sequence:
                sum_s = (sum_s + self._sum_s(own[one.index])) / 2
                gradient_s *= 1.5
            sums_s = known.divided_sums * sum_s
            if known.divided_gathers:
                gather_s = self._sum_s(known.divided_gathers * summed[one.index]) / 2
                sums_s += gather_s - sum_s
            return replace(
                one,
                forward_s=left * one.forward_s + sums_s,
                backward_s=left * one.backward_s + known.divided_sums * gradient_s,
                recompute_s=left * one.recompute_s + sums_s,
            )

        return tuple(map(derived, alone.sections))

    def gather_s(self, num_bytes: float) -> float:
        """Return how long it takes until each rank has all parts: half of a ring all-reduce.

        Ranks that divide the sequence go on with their parts.
        """
        return 0.0 if self._divide_sequence else self._sum_s(num_bytes) / 2

    def _sum_s(self, num_bytes: float) -> float:
        each_s = self._hop.latency_s + num_bytes / self._size * self._hop.s_per_byte
        return (self._size - 1) * each_s


def _of_first(plan: Plan) -> Plan:
    """Return a plan as one on groups, which go by their first slots."""
    firsts = [slot for rank, slot in enumerate(plan.slots) if rank == plan.tensor_ranks(rank)[0]]
    return replace(plan, slots=tuple(firsts), devices_per_stage_replica=1)


def _as_one(group: list[Device]) -> Device:
    """Return a group as a device: each of it has as little memory as the least of them."""
    size = len(group)
    return replace(
        group[0],
        speed=min(device.speed for device in group),
        memory_bytes=min(device.memory_bytes for device in group),
        host_memory_bytes=min(device.host_memory_bytes for device in group),
        locked_memory_bytes=min(device.locked_memory_bytes for device in group),
        usd_per_hour=sum(device.usd_per_hour for device in group),
        cores=-(-group[0].cores // size),
    )
