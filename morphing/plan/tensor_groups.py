"""Plans whose stages are groups of devices that divide matrices: tensor parallelism.

A group is planned as one device, by a profile that was measured on single ones. Of the time of
a section, the share of its matrices that is divided is taken to shrink to one part; sums of
activations, each as large as what leaves the section, are added as measured within a VM. Of
activations each device of a group is taken to need what one alone would, as between blocks; what it
has of parameters and state, the memory model knows (``morphing.memory``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from spottrain.morphing.plan.candidates import Candidate
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.reducing import hop_of
from spottrain.wire.model import Profile, SectionProfile
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
    profile = _divided(inputs)
    return replace(inputs, slots=slots, previous=previous, profile=profile), members


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


def on_slots(candidate: Candidate, inputs: PlanInputs) -> Candidate:
    """Return a candidate on groups as one on their slots."""
    groups = candidate.pipeline_depth * candidate.data_parallel_width
    return replace(
        candidate,
        unused_slots=len(inputs.slots) - groups * inputs.group_size,
        tensor_parallel=inputs.group_size,
    )


def _divided(inputs: PlanInputs) -> Profile:
    """Return the profile of a group."""
    size, sections = inputs.group_size, inputs.facts.sections
    on_device = inputs.compute.on_gpu and inputs.network != "gloo"
    hop = hop_of(inputs.profile, size, between_vms=False, rings=1, on_device=on_device)
    sent = [one.activation_bytes_per_example for one in sections]
    sent[-1] = max(sent)  # it sends nothing on, but sums as well

    def divided(one: SectionProfile, examples: int) -> SectionProfile:
        facts = sections[one.index]
        left = 1 - facts.divided_share * (size - 1) / size
        each_s = hop.latency_s + examples * sent[one.index] / size * hop.s_per_byte
        sums_s = facts.divided_sums * (size - 1) * each_s
        return replace(
            one,
            forward_s=left * one.forward_s + sums_s,
            backward_s=left * one.backward_s + sums_s,
            recompute_s=left * one.recompute_s + sums_s,
        )

    microbatches = tuple(
        replace(
            measured,
            sections=tuple(divided(one, measured.microbatch_size) for one in measured.sections),
        )
        for measured in inputs.profile.microbatches
    )
    return replace(inputs.profile, microbatches=microbatches)


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
