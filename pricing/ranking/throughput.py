"""What fleets of like machines make of a job, whatever they cost.

Prices and interruptions change by the minute, plans only with what the machines are. So
plans are made once for each kind of machine and size of fleet, and only where a bound
does not show that they cannot matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spottrain.morphing.adapt.traffic import sent_bytes
from spottrain.morphing.plan.choose import (
    Device,
    PlanInputs,
    choose_plan,
    least_steps_s,
)
from spottrain.morphing.plan.profiles import on_network
from spottrain.wire import Profile, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineShape:
    """What of a machine changes the plan."""

    gpus: int
    gpu_memory_bytes: int
    speed: float = 1.0
    """Of its GPUs, relative to the device of the profile."""
    network_bytes_per_s: float | None = None
    """Between machines; None: as in the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetThroughput:
    """What so many like machines do, by their best plan."""

    vms: int
    """That are paid for."""
    pipeline_depth: int = 1
    data_parallel_width: int = 1
    step_s: float = math.inf
    """Predicted time of a mini-batch."""
    examples_per_s: float = 0.0
    sent_bytes: float = 0.0
    """Between machines for one mini-batch, all of them together."""
    why_not: str = ""
    """One line: why there is no plan."""

    @property
    def shape(self) -> str:
        """``PxD`` for people."""
        return f"{self.pipeline_depth}x{self.data_parallel_width}"


class ThroughputCache:
    """The paces of all fleets that were asked for, worked out once each.

    Args:
        job: What plans are made from; its slots do not matter.
        min_vms: Machines that are held whatever the plan uses.
    """

    def __init__(self, job: PlanInputs, min_vms: int = 1) -> None:
        self.job = job
        self.min_vms = min_vms
        self._profiles: dict[float | None, Profile] = {None: job.profile}
        self._bounds: dict[tuple[MachineShape, int], FleetThroughput] = {}
        self._paces: dict[tuple[MachineShape, int], FleetThroughput] = {}
        self._least_s = _least_s(job)

    @property
    def saves(self) -> bool:
        """Whether machines that the plan leaves out are given back."""
        return self.job.objective == "examples_per_dollar"

    @property
    def made(self) -> int:
        """Plans that were made so far."""
        return len(self._paces)

    def of(self, machine: MachineShape, vms: int) -> FleetThroughput:
        """Return what ``vms`` machines do.

        Raises:
            PlanError: No plan can be made from the job, whatever the machines.
        """
        key = machine, vms
        if key not in self._paces:
            self._paces[key] = self._pace(machine, vms)
        return self._paces[key]

    def at_best(self, machine: MachineShape, vms: int) -> FleetThroughput:
        """Return a pace that no plan on ``vms`` machines can be worth more than.

        Costs nothing: all GPUs compute all the time, and losses hit nothing.
        """
        least_s = self._least_s / machine.speed / machine.gpus
        return self._bound(vms, least_s / vms, least_s)

    def nearly(self, machine: MachineShape, vms: int) -> FleetThroughput:
        """Return a pace as ``at_best``, but nearer to that of the plan.

        Takes a tenth of what a plan takes.

        Raises:
            PlanError: As ``of``.
        """
        key = machine, vms
        if key not in self._bounds:
            step_s, slot_s = least_steps_s(self._inputs(machine, vms))
            if math.isinf(step_s):
                return self.of(machine, vms)  # which says why there is no plan
            self._bounds[key] = self._bound(vms, step_s, slot_s / machine.gpus)
        return self._bounds[key]

    def _bound(self, vms: int, step_s: float, vm_s: float) -> FleetThroughput:
        """Return a bound made of two: a mini-batch takes ``step_s``, and ``vm_s`` in all.

        Where machines that are left out are given back, that much work of the fewest.
        """
        if self.saves:
            vms = min(vms, self.min_vms)
            step_s = vm_s / vms
        return FleetThroughput(
            vms=vms,
            data_parallel_width=3,  # hardly ever falls back to checkpoints
            step_s=step_s,
            examples_per_s=self.job.minibatch_size / step_s,
        )

    def _inputs(self, machine: MachineShape, vms: int) -> PlanInputs:
        profile = self._profile(machine.network_bytes_per_s)
        slots = like_devices(machine, vms, float(machine.gpus))  # prices do not matter
        return replace(self.job, profile=profile, slots=slots)

    def _pace(self, machine: MachineShape, vms: int) -> FleetThroughput:
        inputs = self._inputs(machine, vms)
        choice = choose_plan(inputs)
        plan = choice.plan
        if plan is None:
            return FleetThroughput(vms=vms, why_not=choice.why_not)
        used = len({slot.vm_id for slot in plan.slots})
        return FleetThroughput(
            vms=max(used, min(vms, self.min_vms)) if self.saves else vms,
            pipeline_depth=plan.pipeline_depth,
            data_parallel_width=plan.data_parallel_width,
            step_s=plan.predicted_step_s,
            examples_per_s=plan.minibatch_size / plan.predicted_step_s,
            sent_bytes=sent_bytes(
                plan, self.job.facts, {s.vm_id: s.vm_id for s in plan.slots}
            ).total(),
        )

    def _profile(self, network_bytes_per_s: float | None) -> Profile:
        """Return the job's profile on another network."""
        known = self._profiles.get(network_bytes_per_s)
        if known is None:
            assert network_bytes_per_s is not None
            known = on_network(self.job.profile, network_bytes_per_s)
            self._profiles[network_bytes_per_s] = known
        return known


def devices_of(
    vm_id: str, machine: MachineShape, usd_per_hour: float
) -> Iterator[Device]:
    """Yield the devices of a VM as the planner takes them, each with its share of the
    price."""
    for index in range(machine.gpus):
        yield Device(
            slot=Slot(vm_id=vm_id, index=index),
            memory_bytes=machine.gpu_memory_bytes,
            speed=machine.speed,
            usd_per_hour=usd_per_hour / machine.gpus,
        )


def like_devices(
    machine: MachineShape, vms: int, usd_per_hour: float
) -> tuple[Device, ...]:
    """Return the devices of so many VMs of one kind."""
    names = (f"vm-{number:05}" for number in range(vms))
    return tuple(d for name in names for d in devices_of(name, machine, usd_per_hour))


def _least_s(job: PlanInputs) -> float:
    """Return what a mini-batch takes one device of the profile at least.

    Its sections' forward and backward alone, at the best micro-batch size.
    """
    sizes = (job.microbatch_size,) if job.microbatch_size else ()
    each_s = [
        math.fsum(s.forward_s + s.backward_s for s in job.profile.sections_at(m)) / m
        for m in sizes or job.profile.microbatch_sizes
    ]
    return min(each_s) * job.minibatch_size
