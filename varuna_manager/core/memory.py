"""Memory of slots: what plans may take of it, and what to do when it was not enough.

A worker whose device has no memory left shows that its plan's prediction was too low on
that kind of machine. From then on plans may take less there than was predicted, so that
another one is chosen; with every further time the distance grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from spottrain.eventlog.changed import replace
from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.memory.room import megabytes
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.plan.tensor_groups import group_profile
from spottrain.morphing.simulate.compute import Compute
from spottrain.pricing.ranking.gpu_speed import example_s, gpu_speed, machine_as_offered
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.throughput import devices_of
from spottrain.varuna_manager.core import generation as generations
from spottrain.varuna_manager.core import rounds
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model.state import State, kind_of
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire.messages import OutOfMemory
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan, Slot

MARGIN = 0.05
"""Share of a prediction that proved too low by which the next plans stay below it; twice
as much each time, up to half."""
MAX_MARGIN = 0.5


def devices(state: State, vms: Sequence[records.VmRecord], profile: Profile) -> Iterator[Device]:
    """Yield the slots of ``vms`` as the planner takes them.

    With times of their own where those were measured; else with the speed that their offer
    declares, or that is estimated.
    """
    for vm in vms:
        own = _measured_on(state, vm, profile)
        if own is None:
            speed = gpu_speed(vm.offer, profile, state.job.facts, state.job.spec.precision)
        else:
            speed = example_s(profile) / example_s(own)
        for device in devices_of(vm.vm_id, _machine(state, vm, speed), vm.offer.usd_per_hour):
            yield device if own is None else replace(device, kind=own.device)


def measured(
    state: State, vms: Sequence[records.VmRecord], profile: Profile
) -> tuple[Profile, ...]:
    """Return what was measured on the types of devices of ``vms`` beside ``profile``."""
    found = (_measured_on(state, vm, profile) for vm in vms)
    return tuple({one.device: one for one in found if one is not None}.values())


def rank_profiles(state: State, plan: Plan, profile: Profile) -> list[Profile]:
    """Return the profile of the device of each rank; ``profile`` where none was measured."""
    vms = (state.fleet.vms.get(slot.vm_id) for slot in plan.slots)
    own = (None if vm is None else _measured_on(state, vm, profile) for vm in vms)
    return [one or profile for one in own]


def _measured_on(state: State, vm: records.VmRecord, profile: Profile) -> Profile | None:
    return None if vm.device == profile.device else rounds.measured_on(state, vm)


def _machine(state: State, vm: records.VmRecord, speed: float = 1.0) -> MachineShape:
    """Return a VM as the planner takes it: with GPUs and memory as its agent found them.

    VMs of the local provider share the memory of one computer.
    """
    machine = machine_as_offered(vm.offer, vm.num_slots, speed)
    is_gpu = bool(vm.gpus) if vm.device else machine.is_gpu
    sharing = sum(other.machine == vm.machine != "" for other in state.fleet.vms.values())
    return replace(
        machine,
        gpu_memory_bytes=room_bytes(state, vm),
        is_gpu=is_gpu,
        memory_bytes=vm.memory_bytes // max(1, sharing) or machine.memory_bytes,
        locked_memory_bytes=vm.locked_memory_bytes,
        computer=vm.machine or machine.computer,
        cores=vm.cores or machine.cores,
    )


def room_bytes(state: State, vm: records.VmRecord) -> int:
    """Return the memory of a slot's device that plans may take."""
    have = vm.slot_memory_bytes
    shortage = state.fleet.shortages.get(kind_of(vm.offer))
    return have if shortage is None else min(have, shortage.room_bytes)


def compute_of(state: State, vms: Iterable[records.VmRecord]) -> Compute:
    """Return what workers on ``vms`` compute on."""
    on_gpu = all(_machine(state, vm).is_gpu for vm in vms)
    spec = state.job.spec
    return Compute(
        on_gpu=on_gpu,
        precision=spec.precision,
        wire=spec.wire,
        network=spec.network,
        semantics=spec.semantics,
    )


def out_of_memory(transition: Transition, slot: Slot, report: OutOfMemory) -> None:
    """A rank's device had no memory left: break the generation, and plan below that."""
    state, generation = transition.state, transition.generation
    assert state.preparation.profile is not None
    vm = state.fleet.vms[slot.vm_id]
    predicted = _predicted_bytes(state, generation.plan, slot, state.preparation.profile)
    machine = kind_of(vm.offer)
    before = state.fleet.shortages.get(machine)
    times = before.times if before else 0
    if before is None or before.generation != generation.number:
        times += 1
    margin = min(MAX_MARGIN, MARGIN * 2.0 ** (times - 1))
    room = min(room_bytes(state, vm), int(predicted * (1 - margin)))
    reason = _reason(slot, report)
    shortage = records.Shortage(
        machine=machine,
        room_bytes=max(1, room),
        times=times,
        generation=generation.number,
        reason=reason,
    )
    transition.put(replace(state.fleet, shortages={**state.fleet.shortages, machine: shortage}))
    transition.log(
        f"{reason}; {megabytes(predicted)} were predicted, plans may take "
        f"{megabytes(room)} of a slot of {machine} from now on"
    )
    generations.break_generation(transition, reason)
    transition.put_generation(replace(transition.generation, out_of_memory=True))


def _predicted_bytes(state: State, plan: Plan, slot: Slot, profile: Profile) -> int:
    """Return what was predicted for the device of a rank."""
    job, size = state.job, plan.devices_per_stage_replica
    vms = [state.fleet.vms[s.vm_id] for s in plan.slots if s.vm_id in state.fleet.vms]
    compute = compute_of(state, vms)
    own, *profiles = (
        group_profile(one, job.facts, size, compute)
        for one in (profile, *rank_profiles(state, plan, profile))
    )
    ranks = rank_bytes(job.facts, own, plan, job.spec.reduction, compute, profiles)
    return ranks[plan.slots.index(slot)].total_bytes


def _reason(slot: Slot, report: OutOfMemory) -> str:
    """Return one line: where memory was lacking, how much, and what to change."""
    where = f"during the {report.during}"
    if report.section is not None:
        where += f" of section {report.section}"
    change = "lower microbatch_size or set morphing.recompute: true"
    if report.during in ("update", "handover"):
        change = "set runtime.state: host, or take larger devices"
    return (
        f"{slot.vm_id}[{slot.index}]: out of memory {where} with micro-batches of "
        f"{report.microbatch_size}: {megabytes(report.requested_bytes)} more asked of a "
        f"device of {megabytes(report.device_bytes)}; to avoid it, {change}"
    )
