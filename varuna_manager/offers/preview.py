"""What ``spottrain plan`` shows: offers, their ranking, and the plan a launch begins with.

Nothing is rented. The fleet is the one that ``core.allocation.next_launch`` would come to
if all that is on offer were there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spottrain.cloud.port.provider import Offer
from spottrain.errors import BudgetError, CapacityError
from spottrain.morphing.plan.choose import NOISE, Choice, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.replay.shapes import Workload
from spottrain.pricing.billing.money import Rate, cost_usd, total_rate
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.history import History
from spottrain.pricing.ranking.rank import (
    CAP,
    EXACT,
    Priced,
    Ranking,
    RankingTerms,
    greedy_fleet,
    rank,
)
from spottrain.pricing.ranking.throughput import (
    MachineShape,
    ThroughputCache,
    devices_of,
    like_devices,
)
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.core.planning import plan_inputs
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.profiles import known_profiles
from spottrain.varuna_manager.jobs.vm_history import ingest_journals, open_history
from spottrain.varuna_manager.launch.submit import check_budget, job_settings
from spottrain.varuna_manager.offers.live import rank_live
from spottrain.varuna_manager.offers.market import (
    JobMarket,
    base_of,
    cloud_market,
    hazards_of,
    own_market,
)
from spottrain.varuna_manager.offers.ranker import ranking_terms
from spottrain.varuna_manager.offers.table import ranking_view, why_nothing
from spottrain.varuna_manager.reporting.documents import SCHEMA_VERSION, candidate_view
from spottrain.wire import ModelFacts, Profile

NO_END = 1e15
"""Examples of a job that is to run for ever: what is paid once does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchScope:
    """Where to look for offers beside what the job file names."""

    clouds: tuple[str, ...] = ()
    offline: bool = False
    """Ask no cloud for the best offers again."""
    measured_on: str | None = None
    """The GPU that the profile's device is like."""
    exact: int = EXACT
    """Offers that are worked out to the end."""


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


def preview_job(
    config: JobConfig,
    facts: ModelFacts,
    profile: Profile,
    scope: SearchScope,
    data_bytes: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return what a launch would begin with and all offers that were weighed.

    What other clouds rent is ranked with the rest, but the fleet is the provider's.

    Args:
        config: The job.
        facts: What the tracer found out about its model.
        profile: What was measured of it.
        scope: Which clouds to ask beside the job's own.
        data_bytes: What each VM fetches, by the cloud that holds it.

    Raises:
        BudgetError: The budget does not pay for a step.
        CapacityError: No fleet can be had.
        ConfigError: A cloud or GPU that the catalogue does not know.
        PlanError: The profile does not fit the model.
    """
    now_s = time.time()
    job = job_settings(config, facts, job_dir(config.name), now_s, data_bytes)
    # Plans are compared as the job file says, whether or not there is a deadline.
    inputs = replace(plan_inputs(job, profile), objective=job.objective)
    terms = ranking_terms(job)
    throughputs = ThroughputCache(inputs, job.min_vms)
    with open_history() as history:
        warnings = list(ingest_journals(history))
        own = _own(config, facts, profile, history, now_s, scope)
        check_budget(config, [p.offer for p in own.offers if not p.is_stale])
        others = _others(inputs, history, now_s, scope)
        everything = (*own.offers, *others.offers)
        ranking, more = _rank(everything, throughputs, terms, history, now_s, scope)
    warnings += [*own.warnings, *others.warnings, *more]
    clouds = config.resources.providers
    ours = [r.priced for r in ranking.rows if r.priced.offer.cloud in clouds]
    best = rank(ours, throughputs, terms, exact=scope.exact)
    document = _preview(config, inputs, best, terms)
    return document | ranking_view(ranking, now_s, warnings)


def _preview(
    config: JobConfig, inputs: PlanInputs, ranking: Ranking, terms: RankingTerms
) -> dict[str, Any]:
    """Return the plan that a launch would begin with, what it costs, and why.

    Args:
        config: The job.
        inputs: What its plans are made from, without slots.
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
    slots = (
        device
        for number, row in enumerate(fleet)
        if row.priced.machine is not None
        for device in devices_of(
            f"vm-{number}", row.priced.machine, row.priced.offer.usd_per_hour
        )
    )
    inputs = replace(inputs, slots=tuple(slots))
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
        **_choice_view(inputs, choice),
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


def workload_inputs(workload: Workload, gpus: int) -> PlanInputs:
    """Return what a plan for a workload on so many of its VMs is made from.

    All is left to the planner: schedule, recompute, and the micro-batch size among those
    of the profile.
    """
    machine = MachineShape(gpus=1, gpu_memory_bytes=workload.gpu_memory_bytes)
    return PlanInputs(
        facts=workload.facts,
        profile=workload.profile,
        slots=like_devices(machine, gpus, workload.usd_per_hour),
        minibatch_size=workload.minibatch_size,
        microbatch_size=None,
        reduction="fast",
    )


def preview_workload(
    name: str, inputs: PlanInputs, sources: tuple[str, ...], scope: SearchScope
) -> dict[str, Any]:
    """Return the plan for machines that one need not have, and why.

    With all offers of the clouds of ``scope``, if it names any, on fleets of up to as
    many GPUs.

    Args:
        name: Of the workload's file.
        inputs: See ``workload_inputs``.
        sources: Where its numbers are from.
        scope: Which clouds to ask.

    Raises:
        ConfigError: A cloud or GPU that the catalogue does not know.
        PlanError: No plan can be made from them.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "sources": list(sources),
        **_choice_view(inputs, choose_plan(inputs)),
    }
    if not scope.clouds:
        return document
    job, gpus = replace(inputs, slots=()), len(inputs.slots)
    terms = RankingTerms(examples=NO_END, max_vms=gpus, max_gpus=gpus)
    now_s = time.time()
    with open_history() as history:
        warnings = list(ingest_journals(history))
        market = _others(job, history, now_s, scope)
        ranking, more = _rank(
            market.offers, ThroughputCache(job), terms, history, now_s, scope
        )
    return document | ranking_view(ranking, now_s, [*warnings, *market.warnings, *more])


def _choice_view(inputs: PlanInputs, choice: Choice) -> dict[str, Any]:
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


def profile_on_known_gpu(facts: ModelFacts) -> Profile | None:
    """Return the newest kept profile of a model that was measured on a known GPU.

    What a cloud's machines will do is told better from that than from this machine.
    """
    known = (one.profile for one in known_profiles(facts))
    return next((p for p in known if catalogue().gpu_of(p.device) is not None), None)


def _own(
    config: JobConfig,
    facts: ModelFacts,
    profile: Profile,
    history: History,
    now_s: float,
    scope: SearchScope,
) -> JobMarket:
    """Return what the job's own providers rent."""
    if not config.clouds:
        return own_market(
            config,
            hazards_of(history, now_s),
            now_s,
            is_measured=profile.origin == "measured",
        )
    base = base_of(profile, facts, scope.measured_on)
    markets = [
        cloud_market(
            history,
            base,
            now_s,
            clouds=(cloud.cloud,),
            regions=cloud.regions,
            zones=cloud.zones,
            instance_types=cloud.kinds(),
        )
        for cloud in config.clouds
    ]
    return JobMarket(
        offers=tuple(offer for market in markets for offer in market.offers),
        warnings=tuple(line for market in markets for line in market.warnings),
    )


def _others(
    inputs: PlanInputs, history: History, now_s: float, scope: SearchScope
) -> JobMarket:
    if not scope.clouds:
        return JobMarket(offers=())
    base = base_of(inputs.profile, inputs.facts, scope.measured_on)
    return cloud_market(history, base, now_s, clouds=scope.clouds)


def _rank(
    offers: Sequence[Priced],
    throughputs: ThroughputCache,
    terms: RankingTerms,
    history: History,
    now_s: float,
    scope: SearchScope,
) -> tuple[Ranking, tuple[str, ...]]:
    if scope.offline:
        return rank(offers, throughputs, terms, exact=scope.exact), ()
    return rank_live(offers, throughputs, terms, history, now_s, exact=scope.exact)
