"""What ``spottrain plan`` shows, as plain data: a plan, its candidates and machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spottrain.cloud.port.provider import Offer
from spottrain.machine import is_cpu
from spottrain.morphing.adapt.checkpointing import expected_lag_s
from spottrain.morphing.adapt.policy import capped_slowdown
from spottrain.morphing.plan.choose import NOISE, Choice, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.modes import ENDLESS
from spottrain.morphing.plan.profiles import is_noisy, spread_of
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.format import duration, number
from spottrain.varuna_manager.offers.estimates import money_ends
from spottrain.varuna_manager.reporting.devices import Computing, describe
from spottrain.varuna_manager.reporting.documents import candidate_view, survives_any_worker
from spottrain.varuna_manager.reporting.utilisation import minibatch_use, use_view
from spottrain.wire.model import Precision, Profile
from spottrain.wire.plan import Plan


def exceeded(config: JobConfig, document: Mapping[str, Any], now_s: float) -> list[str]:
    """Return which limits of a job its plan would not keep, each in one line.

    Args:
        document: From ``preview_job``.
        now_s: When it would begin, in seconds since the epoch.
    """
    if document["plan"] is None:
        return []
    usd, train_s = document["usd"], document["train_s"]
    found = []
    if config.budget.max_usd is not None and usd > config.budget.max_usd:
        ends = money_ends(config.budget.max_usd, usd, config.steps)
        found.append(f"budget.max_usd: {ends}; raise it or train fewer steps")
    max_hours, hours = config.budget.max_gpu_hours, document["gpu_hours"]
    if max_hours is not None and hours > max_hours:
        last = int(config.steps * max_hours / hours)
        found.append(
            f"budget.max_gpu_hours: they end at step {last:,} of {config.steps:,}: the plan takes "
            f"{number(hours, 2)} GPU-hours, more than {max_hours:g}; raise it or train fewer steps"
        )
    deadline_s = config.slo.deadline_s(now_s)
    if deadline_s is not None and now_s + train_s > deadline_s:
        key = "slo.deadline" if config.slo.max_hours is None else "slo.max_hours"
        found.append(
            f"{key}: the plan takes {duration(train_s)}, longer than the "
            f"{duration(max(0.0, deadline_s - now_s))} that are left; give it more time, "
            "faster machines or fewer steps"
        )
    speed, least = config.steps * config.minibatch_size, config.slo.min_examples_per_s
    if least is not None and speed < least * train_s:
        found.append(
            f"slo.min_examples_per_s: the plan trains {number(speed / train_s, 1)} "
            f"examples/s, fewer than {least:g}; lower it or take faster machines"
        )
    return found


def computes_on(offers: Sequence[Offer], config: JobConfig, inputs: PlanInputs) -> str:
    """Return what the workers of a fleet compute on.

    A cloud's machines by the catalogue; the user's own by what was measured here.
    """
    workers: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for offer in offers:
        kind = catalogue().find(offer.cloud, offer.instance_type)
        named = offer.gpu or inputs.profile.device
        name = named if kind is None else kind.gpu.name
        on_gpu = not is_cpu(name) if kind is None else kind.device == "gpu"
        workers[name] = workers.get(name, 0) + offer.gpus
        gpus[name] = gpus.get(name, 0) + offer.gpus * on_gpu
    found = {name: Computing(workers=count, gpus=gpus[name]) for name, count in workers.items()}
    return describe(found, config.precision)


def choice_view(
    inputs: PlanInputs,
    choice: Choice,
    precision: Precision | None,
    gpus: Mapping[str, str] | None = None,
    checkpoint_every_steps: int = 0,
) -> dict[str, Any]:
    """Return what a plan was made from, and all candidates, the best first.

    ``vm_loss`` is what a VM that vanishes without a notice costs where it holds the only copy of
    a stage: seconds of training since the newest checkpoint, on average, and the share of speed
    as which that counted in the choice, and whether a killed worker takes as much; None: every
    stage is on several VMs.

    Args:
        inputs: What it was made from.
        precision: Of the matrix multiplications; None: unknown.
        gpus: By VM; of others, the device of the profile.
        checkpoint_every_steps: 0: as often as costs least.
    """
    plan, facts, profile = choice.plan, inputs.facts, inputs.profile
    slots = () if plan is None else plan.slots
    use = minibatch_use(
        facts,
        precision,
        inputs.minibatch_size,
        None if plan is None else plan.predicted_step_s,
        [(gpus or {}).get(slot.vm_id, profile.device) for slot in slots],
    )
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
        "profile_spread": _busy_spread(profile),
        "objective": inputs.objective,
        "equally_good_within": NOISE,
        "plan": None if plan is None else plan.shape,
        **use_view(use),
        "stage_bounds": None if plan is None else list(plan.stage_bounds),
        "why_not": choice.why_not,
        "candidates": [candidate_view(one) for one in choice.candidates],
        "vm_loss": None
        if plan is None
        else _vm_loss(plan, inputs.lag_share, checkpoint_every_steps),
    }


def _vm_loss(plan: Plan, lag_share: float, checkpoint_every_steps: int) -> dict[str, float] | None:
    if plan.copies > 1:
        return None
    lag_s = checkpoint_every_steps * plan.predicted_step_s / 2
    return {
        "lost_s": lag_s or expected_lag_s(len({slot.vm_id for slot in plan.slots})),
        "counted": capped_slowdown(plan.pipeline_depth, 1, lag_share) - 1,
        "by_worker": not survives_any_worker(plan),
    }


def _busy_spread(profile: Profile) -> float | None:
    """Return by which share times varied if a busy machine measured them."""
    is_busy = profile.origin == "measured" and is_noisy(profile)
    return spread_of(profile) if is_busy else None


def stale_view(inputs: PlanInputs, choice: Choice) -> dict[str, Any]:
    """Return the best plan with ``semantics: stale_by_one`` (PipeDream-2BW).

    ``shape`` is empty if none fits; ``gain``, by how much it is faster, is None if the job
    has these semantics already; ``held_twice_bytes`` are the parameters and gradients that
    its largest stage holds a second time.
    """
    plan = choice.plan
    if plan is None:
        return {}
    other, gain = plan, None
    if inputs.semantics != "stale_by_one":
        stale = replace(
            inputs,
            facts=inputs.facts.with_delayed(),
            schedule=inputs.schedule if inputs.schedule in ENDLESS else None,
            semantics="stale_by_one",
        )
        if (found := choose_plan(stale).plan) is None:
            return {"stale_by_one": {"shape": "", "gain": 0.0, "held_twice_bytes": 0}}
        other, gain = found, plan.predicted_step_s / found.predicted_step_s - 1
    sections = inputs.facts.sections
    stages = (other.sections_of(p) for p in range(other.pipeline_depth))
    held = max(2 * sum(sections[k].trained_bytes for k in own) for own in stages)
    return {"stale_by_one": {"shape": other.shape, "gain": gain, "held_twice_bytes": held}}


def gpu_of_machine(config: JobConfig, offer: Offer) -> str | None:
    """Return the GPU of a cloud's machine; None if it has none that workers use."""
    kind = catalogue().find(offer.cloud, offer.instance_type)
    if kind is None or config.resources.device == "cpu":
        return None
    return kind.gpu.name


def vm_view(offer: Offer) -> dict[str, Any]:
    """Return an offer as one VM of a fleet."""
    return {
        "cloud": offer.cloud,
        "region": offer.region,
        "zone": offer.zone,
        "instance_type": offer.instance_type,
        "spot": offer.spot,
        "slots": offer.gpus,
        "usd_per_hour": offer.usd_per_hour,
    }
