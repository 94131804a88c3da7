"""What would be rented and how it would train, without renting anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spottrain.errors import CapacityError
from spottrain.morphing.choose import NOISE, Choice, Device, PlanInputs, choose_plan
from spottrain.morphing.policy import UNSEEN_SHARE
from spottrain.morphing.shapes import Workload
from spottrain.pricing.budget import cost_usd
from spottrain.varuna_manager.config import JobConfig
from spottrain.varuna_manager.config_local import ZoneConfig
from spottrain.varuna_manager.views import SCHEMA_VERSION, candidate_view
from spottrain.wire import ModelFacts, Profile, Slot


@dataclass(frozen=True, slots=True)
class Rented:
    """A machine that would be rented."""

    zone: ZoneConfig
    spot: bool

    @property
    def usd_per_hour(self) -> float:
        """Its price now."""
        zone = self.zone
        return zone.spot_usd_per_hour if self.spot else zone.on_demand_usd_per_hour


def fleet_for(config: JobConfig) -> list[Rented]:
    """Return the largest fleet that the job file allows, the cheapest machines first.

    Raises:
        CapacityError: Not even ``resources.min_vms`` machines can be had.
    """
    kinds = (True, False) if config.resources.allow_on_demand else (True,)
    offers = [Rented(zone, spot) for zone in config.zones for spot in kinds]
    offers.sort(key=lambda offer: offer.usd_per_hour)
    left = {zone.name: zone.capacity for zone in config.zones}
    bound = config.budget.max_usd_per_hour
    fleet: list[Rented] = []
    for offer in offers:
        while left[offer.zone.name] and len(fleet) < config.resources.max_vms:
            cost = sum(vm.usd_per_hour for vm in fleet) + offer.usd_per_hour
            if bound is not None and cost > bound:
                break
            left[offer.zone.name] -= 1
            fleet.append(offer)
    if len(fleet) < config.resources.min_vms:
        raise CapacityError(
            f"resources.min_vms: {config.resources.min_vms} VMs wanted, {len(fleet)} "
            "can be had now within the budget; lower it or raise the budget"
        )
    return fleet


def preview(config: JobConfig, facts: ModelFacts, profile: Profile) -> dict[str, Any]:
    """Return the plan that a launch would begin with, what it costs, and why.

    Args:
        config: The job.
        facts: What the tracer found out about its model.
        profile: What was measured of it.

    Raises:
        CapacityError: No fleet can be had.
        PlanError: The profile does not fit the model.
    """
    fleet = fleet_for(config)
    devices = tuple(
        Device(
            slot=Slot(vm_id=f"vm-{number}", index=index),
            memory_bytes=vm.zone.slot_memory_bytes,
            speed=vm.zone.slot_speed,
            usd_per_hour=vm.usd_per_hour / vm.zone.slots,
        )
        for number, vm in enumerate(fleet)
        for index in range(vm.zone.slots)
    )
    inputs = PlanInputs(
        facts=facts,
        profile=profile,
        slots=devices,
        minibatch_size=config.minibatch_size,
        microbatch_size=config.microbatch_size,
        reduction=config.reduction,
        schedule=config.morphing.asked_schedule,
        recompute=config.morphing.asked_recompute,
        objective=config.morphing.objective,
        lag_share=UNSEEN_SHARE,
    )
    choice = choose_plan(inputs)
    usd_per_hour = sum(vm.usd_per_hour for vm in fleet)
    plan = choice.plan
    train_s = None if plan is None else plan.predicted_step_s * config.steps
    return {
        "schema_version": SCHEMA_VERSION,
        "name": config.name,
        "fleet": [_vm(vm) for vm in fleet],
        **_weighed(inputs, choice),
        "usd_per_hour": usd_per_hour,
        "train_s": train_s,
        "usd": None if train_s is None else cost_usd(usd_per_hour, train_s),
        "usd_budget": config.budget.max_usd,
    }


def workload_inputs(workload: Workload, gpus: int) -> PlanInputs:
    """Return what a plan for a workload on so many of its VMs is made from.

    All is left to the planner: schedule, recompute, and the micro-batch size among those
    of the profile.
    """
    return PlanInputs(
        facts=workload.facts,
        profile=workload.profile,
        slots=tuple(
            Device(
                slot=Slot(vm_id=f"vm-{number:05}", index=0),
                memory_bytes=workload.gpu_memory_bytes,
                speed=1.0,
                usd_per_hour=workload.usd_per_hour,
            )
            for number in range(gpus)
        ),
        minibatch_size=workload.minibatch_size,
        microbatch_size=None,
        reduction="fast",
    )


def preview_workload(name: str, inputs: PlanInputs, sources: tuple[str, ...]) -> Any:
    """Return the plan for machines that one need not have, and why.

    Args:
        name: Of the workload's file.
        inputs: See ``workload_inputs``.
        sources: Where its numbers are from.

    Raises:
        PlanError: No plan can be made from them.
    """
    choice = choose_plan(inputs)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "sources": list(sources),
        **_weighed(inputs, choice),
    }


def _weighed(inputs: PlanInputs, choice: Choice) -> dict[str, Any]:
    """Return what was planned from, and all that was weighed, the best first."""
    plan, facts, profile = choice.plan, inputs.facts, inputs.profile
    size = inputs.microbatch_size
    if choice.candidates:
        size = choice.candidates[0].microbatch_size
    return {
        "parameters": facts.num_parameters,
        "sections": len(facts.sections),
        "minibatch_size": inputs.minibatch_size,
        "microbatch_size": size,
        "slots": len(inputs.slots),
        "device": profile.device,
        "profile_origin": profile.origin,
        "objective": inputs.objective,
        "equally_good_within": NOISE,
        "plan": None if plan is None else plan.shape,
        "stage_bounds": None if plan is None else list(plan.stage_bounds),
        "why_not": choice.why_not,
        "candidates": [candidate_view(one) for one in choice.candidates],
    }


def _vm(vm: Rented) -> dict[str, Any]:
    return {
        "zone": vm.zone.name,
        "instance_type": vm.zone.instance_type,
        "spot": vm.spot,
        "slots": vm.zone.slots,
        "usd_per_hour": vm.usd_per_hour,
    }
