"""The throughput of a job on homogeneous fleets, whatever they cost.

Prices and interruptions change by the minute, plans only with the machines. So a plan is
computed once for each kind of machine and size of fleet, and only where an upper bound
does not show that it cannot matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from spottrain.morphing.adapt.traffic import sent_bytes
from spottrain.morphing.plan.choose import choose_plan, min_steps_s
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.plan.profiles import assumes_links_within, on_links, on_network
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.wire.model import LinkProfile, Profile
from spottrain.wire.plan import Slot, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetThroughput:
    """The throughput of a homogeneous fleet with its best plan."""

    vms: int
    """VMs that are paid for."""
    pipeline_depth: int = 1
    data_parallel_width: int = 1
    tensor_parallel: int = 1
    copies: int = 1
    """How many VMs hold each stage, at least."""
    step_s: float = math.inf
    """Predicted time of a mini-batch."""
    examples_per_s: float = 0.0
    sent_bytes: float = 0.0
    """Traffic between machines for one mini-batch, all of them together."""
    why_not: str = ""
    """One line: why there is no plan."""

    @property
    def shape(self) -> str:
        """Of its plan, for people."""
        return shape_of(self.pipeline_depth, self.data_parallel_width, self.tensor_parallel)


class ThroughputCache:
    """The throughputs of all fleets that were asked for, each computed once.

    Args:
        job: What plans are made from; its slots do not matter.
        min_vms: Machines that are kept, whatever the plan uses.
    """

    def __init__(self, job: PlanInputs, min_vms: int = 1) -> None:
        self.job = job
        self.min_vms = min_vms
        self._profiles = dict[tuple[float | None, LinkProfile | None], Profile]()
        self._bounds: dict[tuple[MachineShape, int], FleetThroughput] = {}
        self._planned: dict[tuple[MachineShape, int], FleetThroughput] = {}
        self._min_step_s = _min_step_s(job)

    @property
    def returns_unused(self) -> bool:
        """True if machines that the plan does not use are returned."""
        return self.job.objective == "examples_per_dollar"

    def of(self, machine: MachineShape, vms: int) -> FleetThroughput:
        """Return the throughput of ``vms`` machines.

        Raises:
            PlanError: No plan can be made from the job, whatever the machines.
        """
        key = machine, vms
        if key not in self._planned:
            self._planned[key] = self._plan(machine, vms)
        return self._planned[key]

    def upper_bound(self, machine: MachineShape, vms: int) -> FleetThroughput:
        """Return a throughput that no plan on ``vms`` machines can exceed.

        Takes no time: as if all GPUs always computed, and interruptions cost nothing.
        """
        vm_s = self._min_step_s / machine.speed / machine.gpus
        return self._bound(vms, vm_s / vms, vm_s)

    def tighter_bound(self, machine: MachineShape, vms: int) -> FleetThroughput:
        """Return an upper bound that is tighter than ``upper_bound``.

        Takes a tenth of the time of a plan.

        Raises:
            PlanError: As ``of``.
        """
        key = machine, vms
        if key not in self._bounds:
            step_s, slot_s = min_steps_s(self._inputs(machine, vms))
            if math.isinf(step_s):
                return self.of(machine, vms)  # which says why there is no plan
            self._bounds[key] = self._bound(vms, step_s, slot_s / machine.gpus)
        return self._bounds[key]

    def _bound(self, vms: int, step_s: float, vm_s: float) -> FleetThroughput:
        """Return the throughput if a mini-batch takes ``step_s``, and ``vm_s`` of VM time.

        Where unused machines are returned, as if the fewest did all that work.
        """
        if self.returns_unused:
            vms = min(vms, self.min_vms)
            step_s = vm_s / vms
        return FleetThroughput(
            vms=vms,
            copies=min(vms, 3),  # hardly ever falls back to a checkpoint
            step_s=step_s,
            examples_per_s=self.job.minibatch_size / step_s,
        )

    def inputs_of(self, machine: MachineShape, vms: int, usd_per_hour: float) -> PlanInputs:
        """Return what the plan of ``vms`` machines at this price each is made from."""
        profile = self.profile_on([machine])
        slots = like_devices(machine, vms, usd_per_hour)
        return replace(self.job, profile=profile, slots=slots)

    def _inputs(self, machine: MachineShape, vms: int) -> PlanInputs:
        return self.inputs_of(machine, vms, float(machine.gpus))  # prices do not matter

    def _plan(self, machine: MachineShape, vms: int) -> FleetThroughput:
        inputs = self._inputs(machine, vms)
        choice = choose_plan(inputs)
        plan = choice.plan
        if plan is None:
            return FleetThroughput(vms=vms, why_not=choice.why_not)
        used = len({slot.vm_id for slot in plan.slots})
        return FleetThroughput(
            vms=max(used, min(vms, self.min_vms)) if self.returns_unused else vms,
            pipeline_depth=plan.pipeline_depth,
            data_parallel_width=plan.data_parallel_width,
            tensor_parallel=plan.devices_per_stage_replica,
            copies=plan.copies,
            step_s=plan.predicted_step_s,
            examples_per_s=plan.minibatch_size / plan.predicted_step_s,
            sent_bytes=sent_bytes(
                plan,
                self.job.facts,
                {slot.vm_id: slot.vm_id for slot in plan.slots},
                self.job.reduction,
                self.job.wire,
            ).total(),
        )

    def profile_on(self, machines: Iterable[MachineShape]) -> Profile:
        """Return the job's profile on the slowest network and links of some machines.

        Where machines do not say it, as measured. Links within VMs are replaced only if they
        were not measured, and never if the job sends through VMs' memory (gloo).
        """
        own = tuple(machines)
        networks = [m.network_bytes_per_s for m in own if m.network_bytes_per_s is not None]
        links = [m.gpu_link for m in own if m.gpu_link is not None]
        key = (
            min(networks, default=None),
            min(links, key=lambda link: link.bandwidth_bytes_per_s, default=None),
        )
        if key not in self._profiles:
            network_bytes_per_s, link = key
            profile = self.job.profile
            if link is not None and self.job.network != "gloo" and assumes_links_within(profile):
                profile = on_links(profile, link)
            if network_bytes_per_s is not None:
                profile = on_network(profile, network_bytes_per_s)
            self._profiles[key] = profile
        return self._profiles[key]


def devices_of(vm_id: str, machine: MachineShape, usd_per_hour: float) -> Iterator[Device]:
    """Yield the devices of a VM as the planner takes them, each with its share of the
    price."""
    for index in range(machine.gpus):
        yield Device(
            slot=Slot(vm_id=vm_id, index=index),
            memory_bytes=machine.gpu_memory_bytes,
            speed=machine.speed,
            usd_per_hour=usd_per_hour / machine.gpus,
            is_gpu=machine.is_gpu,
            host_memory_bytes=machine.memory_bytes // machine.gpus,
            locked_memory_bytes=machine.locked_memory_bytes,
            machine="" if machine.is_gpu else machine.computer or vm_id,
            cores=0 if machine.is_gpu else machine.cores,
        )


def like_devices(machine: MachineShape, vms: int, usd_per_hour: float) -> tuple[Device, ...]:
    """Return the devices of so many VMs of one kind."""
    names = (f"vm-{number:05}" for number in range(vms))
    return tuple(d for name in names for d in devices_of(name, machine, usd_per_hour))


def _min_step_s(job: PlanInputs) -> float:
    """Return the shortest time of a mini-batch on one device of the profile.

    Forward and backward of its sections alone, at the best micro-batch size.
    """
    sizes = (job.microbatch_size,) if job.microbatch_size else ()
    each_s = [
        math.fsum(s.forward_s + s.backward_s for s in job.profile.sections_at(m)) / m
        for m in sizes or job.profile.microbatch_sizes
    ]
    return min(each_s) * job.minibatch_size
