"""What would be rented and how it would train, without renting anything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from spottrain.cloud.port.provider import Offer
from spottrain.errors import BudgetError, CapacityError
from spottrain.morphing.adapt.policy import UNSEEN_SHARE
from spottrain.morphing.plan.choose import NOISE, Choice, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.replay.shapes import Workload
from spottrain.pricing.billing.money import Rate, cost_usd, total_rate
from spottrain.pricing.ranking.rank import (
    CAP,
    RankedOffer,
    Ranking,
    RankingTerms,
    greedy_fleet,
)
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.core.planning import MORPH_COST_S
from spottrain.varuna_manager.offers.table import why_nothing
from spottrain.varuna_manager.reporting.documents import SCHEMA_VERSION, candidate_view
from spottrain.wire import ModelFacts, Profile, Slot


def check_capacity(config: JobConfig) -> None:
    """Check that the job file's own machines are enough, before anything is measured.

    Raises:
        BudgetError: ``budget.max_usd_per_hour`` does not pay for
            ``resources.min_vms`` machines.
        CapacityError: There are fewer.
    """
    most = config.resources.max_vms
    prices = [
        zone.spot_usd_per_hour
        for zone in config.zones
        for _ in range(min(zone.capacity, most))
    ]
    if config.resources.allow_on_demand:
        prices += [z.on_demand_usd_per_hour for z in config.zones for _ in range(most)]
    prices = sorted(prices)[:most]
    cap = config.budget.max_usd_per_hour
    costs = itertools.accumulate(map(Rate.of, prices))
    vms = sum(cap is None or cost <= Rate.allowed(cap) for cost in costs)
    _check_enough(config, vms, capped=len(prices) >= config.resources.min_vms)


def _check_enough(config: JobConfig, vms: int, *, capped: bool) -> None:
    """Check that a fleet is large enough.

    Args:
        config: The job.
        vms: Of the fleet.
        capped: Whether there would be enough without the hourly cap.
    """
    least = config.resources.min_vms
    if vms >= least:
        return
    told = f"resources.min_vms: {least} VMs wanted, {vms} can be had now"
    if capped:
        raise BudgetError(
            f"{told} within {CAP} {config.budget.max_usd_per_hour:g}; raise the cap or "
            "lower resources.min_vms"
        )
    raise CapacityError(f"{told}; lower it or wait for more")


def job_inputs(config: JobConfig, facts: ModelFacts, profile: Profile) -> PlanInputs:
    """Return what the plans of a job are made from, without machines."""
    return PlanInputs(
        facts=facts,
        profile=profile,
        slots=(),
        minibatch_size=config.minibatch_size,
        microbatch_size=config.microbatch_size,
        reduction=config.reduction,
        schedule=config.morphing.asked_schedule,
        recompute=config.morphing.asked_recompute,
        objective=config.morphing.objective,
        lag_share=UNSEEN_SHARE,
    )


def terms_of(config: JobConfig, facts: ModelFacts) -> RankingTerms:
    """Return what the job file says of money, for a job that is yet to begin."""
    return RankingTerms(
        examples=float(config.steps * config.minibatch_size),
        max_vms=config.resources.max_vms,
        min_vms=config.resources.min_vms,
        max_usd_per_hour=config.budget.max_usd_per_hour,
        allow_on_demand=config.resources.allow_on_demand,
        morph_s=MORPH_COST_S,
        lag_steps=config.checkpoint.every_steps / 2,
        stored_bytes=float(config.checkpoint.keep * checkpoint_bytes(facts)),
        storage_usd_per_gb_month=config.budget.storage_usd_per_gb_month,
        zone_usd_per_gb=config.budget.zone_usd_per_gb,
    )


def checkpoint_bytes(facts: ModelFacts) -> int:
    """Return what a checkpoint of a model takes."""
    return sum(s.param_bytes + s.optimizer_bytes for s in facts.sections)


def preview(
    config: JobConfig, inputs: PlanInputs, ranking: Ranking, terms: RankingTerms
) -> dict[str, Any]:
    """Return the plan that a launch would begin with, what it costs, and why.

    Args:
        config: The job.
        inputs: See ``job_inputs``.
        ranking: Of what the job's provider has; the fleet is of its first rows.
        terms: What it was ranked by.

    Raises:
        BudgetError: The hourly cap leaves too few VMs.
        CapacityError: No fleet can be had.
        PlanError: The profile does not fit the model.
    """
    fleet = [row for row, count in greedy_fleet(ranking, terms) for _ in range(count)]
    capped = _is_capped(ranking, terms)
    if not fleet:
        kind = BudgetError if capped else CapacityError
        raise kind(f"no offer can be used: {why_nothing(ranking)}")
    _check_enough(config, len(fleet), capped=capped)
    inputs = replace(inputs, slots=tuple(_devices(fleet)))
    choice = choose_plan(inputs)
    usd_per_hour = total_rate(
        Rate.of(row.priced.offer.usd_per_hour) for row in fleet
    ).usd_per_hour
    plan = choice.plan
    train_s = None if plan is None else plan.predicted_step_s * config.steps
    return {
        "schema_version": SCHEMA_VERSION,
        "name": config.name,
        "fleet": [_vm(row.priced.offer) for row in fleet],
        **_weighed(inputs, choice),
        "usd_per_hour": usd_per_hour,
        "train_s": train_s,
        "usd": None if train_s is None else cost_usd(usd_per_hour, train_s),
        "usd_budget": config.budget.max_usd,
    }


def _is_capped(ranking: Ranking, terms: RankingTerms) -> bool:
    """Whether there could be VMs enough, or at least more, without the hourly cap."""
    wider = greedy_fleet(ranking, replace(terms, max_usd_per_hour=None))
    dear = any(why_not.startswith(CAP) for why_not in ranking.reasons())
    return dear or sum(count for _, count in wider) >= terms.min_vms


def _devices(fleet: Sequence[RankedOffer]) -> Iterator[Device]:
    for number, row in enumerate(fleet):
        machine, price = row.priced.machine, row.priced.offer.usd_per_hour
        assert machine is not None  # else it would not be ranked
        for index in range(machine.gpus):
            yield Device(
                slot=Slot(vm_id=f"vm-{number}", index=index),
                memory_bytes=machine.gpu_memory_bytes,
                speed=machine.speed,
                usd_per_hour=price / machine.gpus,
            )


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


def _vm(offer: Offer) -> dict[str, Any]:
    return {
        "cloud": offer.cloud,
        "region": offer.region,
        "zone": offer.zone,
        "instance_type": offer.instance_type,
        "spot": offer.spot,
        "slots": offer.gpus,
        "usd_per_hour": offer.usd_per_hour,
    }
