"""Machines called by what they are, so that a choice depends on nothing else.

Devices come in any order and VMs bear any names. While a plan is chosen VMs have numbers:
those with a part in the present plan come first in the order of its ranks, then large
before small, fast before slow, roomy before tight, cheap before dear. Only VMs that are
alike in all of that are told apart by their names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.wire import Plan, Slot


def by_what_they_are(inputs: PlanInputs) -> tuple[PlanInputs, dict[str, str]]:
    """Return the same inputs in an order and with names of VMs of our own.

    Returns:
        The inputs, and for each of our names theirs.
    """
    previous = inputs.previous
    slots = () if previous is None else previous.slots
    ranks = {slot: rank for rank, slot in enumerate(slots)}
    vms: defaultdict[str, list[Device]] = defaultdict(list)
    for device in inputs.slots:
        vms[device.slot.vm_id].append(device)

    def traits(vm_id: str) -> tuple[object, ...]:
        own = sorted(
            (
                ranks.get(device.slot, len(ranks)),
                device.slot.index,
                -device.speed,
                -device.memory_bytes,
                device.usd_per_hour,
            )
            for device in vms[vm_id]
        )
        return own[0][0], -len(own), own, vm_id

    ours = {vm_id: f"{i:06}" for i, vm_id in enumerate(sorted(vms, key=traits))}
    for slot in slots:
        ours.setdefault(slot.vm_id, f"gone {len(ours)}")
    devices = [
        replace(
            device, slot=Slot(vm_id=ours[device.slot.vm_id], index=device.slot.index)
        )
        for device in inputs.slots
    ]
    if previous is not None:
        previous = with_slots(previous, ours)
    return (
        replace(
            inputs,
            slots=tuple(sorted(devices, key=lambda device: device.slot)),
            previous=previous,
        ),
        {own: vm_id for vm_id, own in ours.items()},
    )


def with_slots(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return ``plan`` with other names of its VMs."""
    slots = (Slot(vm_id=names[slot.vm_id], index=slot.index) for slot in plan.slots)
    return replace(plan, slots=tuple(slots))
