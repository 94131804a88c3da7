"""What ``spottrain plan`` shows: offers, their ranking, and the plan a launch begins with.

Nothing is rented. The fleet is the one that ``core.allocation.next_launch`` would come to
if everything on offer could be rented.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spottrain.errors import BudgetError, CapacityError
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.workload import Workload
from spottrain.pricing.billing.money import Rate, cost_usd, total_rate
from spottrain.pricing.prices.catalogue import CLOUDS, catalogue
from spottrain.pricing.prices.history import History
from spottrain.pricing.ranking import throughput
from spottrain.pricing.ranking.gpu_speed import gpu_of, gpu_speed
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.rank import (
    CAP,
    EXACT,
    Priced,
    RankedOffer,
    Ranking,
    RankingTerms,
    best_of_each,
    greedy_fleet,
    rank,
)
from spottrain.units import HOUR_S, counted
from spottrain.varuna_manager.config.clouds import DISK_GIB
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.core.planning import MORPH_COST_S, plan_inputs
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.profiles import known_profiles
from spottrain.varuna_manager.jobs.vm_history import ingest_journals, open_history
from spottrain.varuna_manager.launch.submit import check_budget, job_settings
from spottrain.varuna_manager.offers.estimates import (
    NO_END,
    NO_LIMITS,
    PlanLimits,
    doubts,
)
from spottrain.varuna_manager.offers.live import rank_live
from spottrain.varuna_manager.offers.market import (
    JobMarket,
    base_of,
    cloud_market,
    hazards_of,
    own_market,
)
from spottrain.varuna_manager.offers.plan_view import (
    choice_view,
    computes_on,
    gpu_of_machine,
    stale_view,
    vm_view,
)
from spottrain.varuna_manager.offers.ranker import ranking_terms
from spottrain.varuna_manager.offers.table import ranking_view, why_nothing
from spottrain.varuna_manager.reporting.documents import SCHEMA_VERSION
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import ModelFacts, Precision, Profile

SHOWN_EXAMPLES = 1e6
"""Examples that time and cost are shown for, of a job without an end."""
DEFAULT_GPUS = 64
"""Fleets of a workload as JSON have up to so many GPUs, unless more are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchScope:
    """Where to search for offers beside the job's own; empty: nowhere."""

    clouds: tuple[str, ...] = ()
    offline: bool = False
    """Do not ask clouds for the current prices of the best offers."""
    exact: int = EXACT
    """Offers whose plan is computed, see ``rank``."""
    gpus: int | None = None
    """Kinds of GPU whose best offer is planned, the most promising ones; None: all."""
    stale: bool = False
    """Also compare the plan with that of gradients that are stale by one mini-batch."""


def check_capacity(config: JobConfig) -> None:
    """Check that the job file's own machines are enough, before anything is measured.

    Raises:
        BudgetError: ``budget.max_usd_per_hour`` does not pay for
            ``resources.min_vms`` machines.
        CapacityError: There are fewer.
    """
    max_vms = config.resources.max_vms
    prices = [
        zone.spot_usd_per_hour for zone in config.zones for _ in range(min(zone.capacity, max_vms))
    ]
    if config.resources.allow_on_demand:
        for zone in config.zones:
            prices += [zone.on_demand_usd_per_hour] * max_vms
    prices = sorted(prices)[:max_vms]
    cap = config.budget.max_usd_per_hour
    costs = itertools.accumulate(map(Rate.of, prices))
    vms = sum(cap is None or cost <= Rate.allowed(cap) for cost in costs)
    _check_enough(config, vms, capped=len(prices) >= config.resources.min_vms)


def _check_enough(config: JobConfig, vms: int, *, capped: bool) -> None:
    """Check that a fleet is large enough.

    Args:
        vms: Its size.
        capped: Whether it would be without the hourly cap.
    """
    min_vms = config.resources.min_vms
    if vms >= min_vms:
        return
    shortage = f"resources.min_vms: {counted(min_vms, 'VM')} wanted, {vms} can be rented now"
    if capped:
        raise BudgetError(
            f"{shortage} within {CAP} {config.budget.max_usd_per_hour:g}; raise the cap or "
            "lower resources.min_vms"
        )
    raise CapacityError(f"{shortage}; lower it or wait for more")


def preview_job(
    config: JobConfig,
    facts: ModelFacts,
    profile: Profile,
    scope: SearchScope,
    data_bytes: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return what a launch would begin with, and all offers that were compared.

    Offers of other clouds are ranked with the rest, but the fleet is of the job's own.

    Args:
        facts: What the tracer found out about its model.
        profile: Measured of the model.
        scope: Which clouds to ask beside the job's own.
        data_bytes: Bytes that each VM fetches, by the cloud that holds them.

    Raises:
        BudgetError: The budget does not pay for a step.
        CapacityError: No fleet can be rented.
        ConfigError: A cloud or GPU that the catalogue does not know.
        PlanError: The profile does not fit the model.
    """
    now_s = time.time()
    job = job_settings(config, facts, job_dir(config.name), now_s, data_bytes)
    # Plans are compared as the job file says, whether or not there is a deadline.
    inputs = replace(plan_inputs(job, profile), objective=job.morphing.objective)
    terms = ranking_terms(job)
    throughputs = throughput.ThroughputCache(inputs, job.resources.min_vms)
    with open_history() as history:
        warnings = list(ingest_journals(history))
        own = _own(config, facts, profile, history, now_s, scope)
        check_budget(config, [p.offer for p in own.offers if not (p.is_stale or p.is_dated)])
        others = _others(inputs, history, now_s, scope, config.precision)
        everything = (*own.offers, *others.offers)
        ranking, more = _rank(everything, throughputs, terms, history, now_s, scope)
    warnings += [*own.warnings, *others.warnings, *more]
    clouds = config.resources.providers
    ours = [r.priced for r in ranking.rows if r.priced.offer.cloud in clouds]
    best = rank(ours, throughputs, terms, exact=scope.exact)
    document = _preview(config, throughputs, best, terms, scope)
    bests = _bests(ranking, throughputs, terms, scope)
    if best.best is not None and (known := gpu_of(best.best.priced.offer)) is not None:
        document |= doubts(profile, known.name, best.best, ranking, throughputs, terms)
    return document | ranking_view(ranking, now_s, warnings, bests, terms.examples)


def _preview(
    config: JobConfig,
    throughputs: throughput.ThroughputCache,
    ranking: Ranking,
    terms: RankingTerms,
    scope: SearchScope,
) -> dict[str, Any]:
    """Return the plan that a launch would begin with, its cost, and what it beat.

    Args:
        throughputs: With what its plans are made from.
        ranking: Of the job's own offers; the fleet is of its first rows.
        terms: What they were ranked by.
        scope: Whether to compare it with stale gradients.

    Raises:
        BudgetError: The hourly cap leaves too few VMs.
        CapacityError: No fleet can be rented.
        PlanError: The profile does not fit the model.
    """
    fleet = [row for row, count in greedy_fleet(ranking, terms) for _ in range(count)]
    capped = _is_capped(ranking, terms)
    if not fleet:
        kind = BudgetError if capped else CapacityError
        unknown = not any(row.priced.offer.spot for row in ranking.rows)
        hint = "; no spot price is known: 'spottrain prices' asks the clouds"
        raise kind(f"no offer can be used: {why_nothing(ranking)}{hint * unknown}")
    _check_enough(config, len(fleet), capped=capped)
    machines = [(row.priced.machine, row.priced.offer.usd_per_hour) for row in fleet]
    slots = (
        device
        for number, (machine, usd) in enumerate(machines)
        if machine is not None
        for device in throughput.devices_of(f"vm-{number}", machine, usd)
    )
    profile = throughputs.profile_on(machine for machine, _ in machines if machine is not None)
    inputs = replace(throughputs.job, profile=profile, slots=tuple(slots))
    choice = choose_plan(inputs)
    names = ((n, gpu_of_machine(config, row.priced.offer)) for n, row in enumerate(fleet))
    gpus = {f"vm-{number}": name for number, name in names if name is not None}
    usd_per_hour = total_rate(Rate.of(row.priced.offer.usd_per_hour) for row in fleet).usd_per_hour
    gpus_rented = sum(row.priced.offer.gpus for row in fleet)
    plan = choice.plan
    train_s = train_max_s = None
    if plan is not None:
        train_s = plan.predicted_step_s * config.steps
        train_max_s = plan.predicted_max_s and plan.predicted_max_s * config.steps
    return {
        "schema_version": SCHEMA_VERSION,
        "name": config.name,
        "computes_on": computes_on([r.priced.offer for r in fleet], config, inputs),
        "fleet": [vm_view(row.priced.offer) for row in fleet],
        **choice_view(inputs, choice, config.precision, gpus, config.checkpoint_every_steps),
        **(stale_view(inputs, choice) if scope.stale else {}),
        "usd_per_hour": usd_per_hour,
        "train_s": train_s,
        "train_max_s": train_max_s,
        "usd": None if train_s is None else cost_usd(usd_per_hour, train_s),
        "usd_max": None if train_max_s is None else cost_usd(usd_per_hour, train_max_s),
        "usd_budget": config.budget.max_usd,
        "gpu_hours": None if train_s is None else gpus_rented * train_s / HOUR_S,
        "gpu_hours_budget": config.budget.max_gpu_hours,
    }


def _is_capped(ranking: Ranking, terms: RankingTerms) -> bool:
    """Return whether only the hourly cap leaves too few VMs, or keeps an offer out."""
    wider = greedy_fleet(ranking, replace(terms, max_usd_per_hour=None))
    over_cap = any(why_not.startswith(CAP) for why_not in ranking.reasons())
    return over_cap or sum(count for _, count in wider) >= terms.min_vms


def _bests(
    ranking: Ranking,
    throughputs: throughput.ThroughputCache,
    terms: RankingTerms,
    scope: SearchScope,
) -> tuple[tuple[str, RankedOffer], ...]:
    """Return the best offer of each kind of GPU, if clouds are among the offers."""
    if not any(row.priced.offer.cloud in CLOUDS for row in ranking.rows):
        return ()
    return best_of_each(ranking, _gpu_name, throughputs, terms, scope.gpus)


def _gpu_name(priced: Priced) -> str:
    gpu = gpu_of(priced.offer)
    return priced.offer.instance_type if gpu is None else gpu.name


def workload_inputs(workload: Workload, gpus: int, gpus_per_vm: int = 1) -> PlanInputs:
    """Return what a plan for a workload on so many GPUs is made from.

    Args:
        workload: Its VMs have one GPU.
        gpus: In all; of a last VM that would not be full none are taken.
        gpus_per_vm: Of larger VMs, each with that much of everything.
    """
    machine = MachineShape(
        gpus=gpus_per_vm,
        gpu_memory_bytes=workload.gpu_memory_bytes,
        is_gpu=workload.is_gpu,
        memory_bytes=gpus_per_vm * workload.host_memory_bytes,
    )
    devices = throughput.like_devices(
        machine, gpus // gpus_per_vm, gpus_per_vm * workload.usd_per_hour
    )
    return workload.plan_inputs(devices)


def preview_workload(
    name: str,
    inputs: PlanInputs,
    sources: tuple[str, ...],
    scope: SearchScope,
    precision: Precision | None,
    steps: int | None = None,
    limits: PlanLimits = NO_LIMITS,
) -> dict[str, Any]:
    """Return the plan for a workload on hypothetical machines, and what it beat.

    With clouds in ``scope``: the ranking of all their offers on fleets of up to as many
    GPUs, and the plan of the best of these fleets that is within the limits, if one is.

    Args:
        name: Of the workload's file.
        inputs: See ``workload_inputs``.
        sources: Where its numbers are from.
        scope: Which clouds to ask.
        precision: Of its matrix multiplications; None: unknown.
        steps: Length of the job; None: it has no end.
        limits: Of a job that has an end.

    Raises:
        ConfigError: A cloud or GPU that the catalogue does not know.
        PlanError: No plan can be made from them.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "sources": list(sources),
    }
    if not scope.clouds:
        choice = choose_plan(inputs)
        document |= choice_view(inputs, choice, precision)
        return document | (stale_view(inputs, choice) if scope.stale else {})
    job, gpus = replace(inputs, slots=()), len(inputs.slots)
    examples = NO_END if steps is None else float(steps * inputs.minibatch_size)
    terms = RankingTerms(
        examples=examples, max_vms=gpus, max_gpus=gpus, morph_s=MORPH_COST_S, lag_steps=None
    )
    throughputs = throughput.ThroughputCache(job)
    now_s = time.time()
    with open_history() as history:
        warnings = list(ingest_journals(history))
        market = _others(job, history, now_s, scope, precision or "fp32")
        ranking, more = _rank(market.offers, throughputs, terms, history, now_s, scope)
    bests = _bests(ranking, throughputs, terms, scope)
    names: dict[str, str] = {}
    if bests:
        gpu, best = next((one for one in bests if _keeps(one[1], examples, limits)), bests[0])
        document |= doubts(inputs.profile, gpu, best, ranking, throughputs, terms)
        offer, machine = best.priced.offer, best.priced.machine
        assert machine is not None
        inputs = throughputs.inputs_of(machine, best.vms, offer.usd_per_hour)
        names = {device.slot.vm_id: gpu for device in inputs.slots}
        document["fleet"] = [vm_view(offer)] * best.vms
    lines = [*warnings, *market.warnings, *more]
    shown = examples if steps is not None else SHOWN_EXAMPLES
    choice = choose_plan(inputs)
    return (
        document
        | choice_view(inputs, choice, precision, names)
        | (stale_view(inputs, choice) if scope.stale else {})
        | ranking_view(ranking, now_s, lines, bests, shown)
    )


def _keeps(row: RankedOffer, examples: float, limits: PlanLimits) -> bool:
    assert row.worth is not None
    hours = examples / row.worth.net_examples_per_s / HOUR_S
    return not limits.exceeded(examples / row.worth.examples_per_usd, hours, 1)


def profile_on_known_device(facts: ModelFacts, spec: JobSpec, on_cpus: bool) -> Profile | None:
    """Return the newest kept profile of a model that was measured on a known GPU or CPU.

    It predicts a cloud's machines better than a profile of this machine would.
    """
    known = (one.profile for one in known_profiles(facts, spec))
    found = ((one, catalogue().gpu_of(one.device)) for one in known)
    return next(
        (
            profile
            for profile, device in found
            if device is not None and bool(device.compute_capability) != on_cpus
        ),
        None,
    )


def _own(
    config: JobConfig,
    facts: ModelFacts,
    profile: Profile,
    history: History,
    now_s: float,
    scope: SearchScope,
) -> JobMarket:
    """Return the offers of the job's own providers."""
    if not config.clouds:
        return own_market(
            config,
            hazards_of(history, now_s),
            now_s,
            is_measured=profile.origin == "measured",
            on_gpus=profile.upload_bytes_per_s > 0,
            speed_of=lambda offer: gpu_speed(offer, profile, facts, config.precision),
        )
    base = base_of(
        profile,
        facts,
        config.precision,
        on_cpus=config.device == "cpu",
        others=_measured(facts, config.job_spec("")),
    )
    markets = [
        cloud_market(
            history,
            base,
            now_s,
            clouds=(cloud.cloud,),
            regions=cloud.regions,
            zones=cloud.zones,
            instance_types=cloud.kinds(),
            attached={cloud.cloud: cloud.attached_usd_per_hour()},
            dated=True,
        )
        for cloud in config.clouds
    ]
    return JobMarket(
        offers=tuple(offer for market in markets for offer in market.offers),
        warnings=tuple(line for market in markets for line in market.warnings),
    )


def _measured(facts: ModelFacts, like: Profile | JobSpec) -> tuple[Profile, ...]:
    return tuple(known.profile for known in known_profiles(facts, like))


def _others(
    inputs: PlanInputs,
    history: History,
    now_s: float,
    scope: SearchScope,
    precision: Precision,
) -> JobMarket:
    if not scope.clouds:
        return JobMarket(offers=())
    base = base_of(
        inputs.profile,
        inputs.facts,
        precision,
        others=_measured(inputs.facts, replace(inputs.profile, precision=precision)),
    )
    attached = {
        cloud: catalogue().attached_usd_per_hour(cloud, DISK_GIB, public_address=True)
        for cloud in scope.clouds
    }
    return cloud_market(history, base, now_s, clouds=scope.clouds, attached=attached, dated=True)


def _rank(
    offers: Sequence[Priced],
    throughputs: throughput.ThroughputCache,
    terms: RankingTerms,
    history: History,
    now_s: float,
    scope: SearchScope,
) -> tuple[Ranking, tuple[str, ...]]:
    if scope.offline:
        return rank(offers, throughputs, terms, exact=scope.exact), ()
    return rank_live(offers, throughputs, terms, history, now_s, exact=scope.exact)
