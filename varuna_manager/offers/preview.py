"""Puts together what ``spottrain plan`` shows: offers, their ranking, the plan to begin with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.history import History
from spottrain.pricing.ranking.rank import EXACT, Priced, Ranking, RankingTerms, rank
from spottrain.pricing.ranking.throughput import ThroughputCache
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.jobs.profiles import known_profiles
from spottrain.varuna_manager.jobs.vm_history import ingest_journals, open_history
from spottrain.varuna_manager.launch.submit import check_budget
from spottrain.varuna_manager.offers import plan_inputs
from spottrain.varuna_manager.offers.live import rank_live
from spottrain.varuna_manager.offers.market import (
    JobMarket,
    base_of,
    cloud_market,
    hazards_of,
    own_market,
)
from spottrain.varuna_manager.offers.table import ranking_view
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


NOWHERE = SearchScope()


def preview_job(
    config: JobConfig,
    facts: ModelFacts,
    profile: Profile,
    elsewhere: SearchScope,
    data_bytes: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return what a launch would begin with and all offers that were weighed.

    What other clouds rent is ranked with the rest, but the fleet is the provider's.

    Args:
        config: The job.
        facts: What the tracer found out about its model.
        profile: What was measured of it.
        elsewhere: Which clouds to look at too.
        data_bytes: What each VM fetches, by the cloud that holds it.

    Raises:
        BudgetError: The budget does not pay for a step.
        CapacityError: No fleet can be had.
        ConfigError: A cloud or GPU that the catalogue does not know.
        PlanError: The profile does not fit the model.
    """
    inputs = plan_inputs.job_inputs(config, facts, profile)
    terms = replace(plan_inputs.terms_of(config, facts), data_bytes=data_bytes or {})
    throughputs = ThroughputCache(inputs, config.resources.min_vms)
    now_s = time.time()
    with open_history() as history:
        warnings = list(ingest_journals(history))
        own = _own(config, facts, profile, history, now_s, elsewhere)
        check_budget(config, [p.offer for p in own.offers if not p.is_stale])
        others = _others(inputs, history, now_s, elsewhere)
        everything = (*own.offers, *others.offers)
        ranking, more = _rank(everything, throughputs, terms, history, now_s, elsewhere)
    warnings += [*own.warnings, *others.warnings, *more]
    clouds = config.resources.providers
    ours = [r.priced for r in ranking.rows if r.priced.offer.cloud in clouds]
    best = rank(ours, throughputs, terms, exact=elsewhere.exact)
    document = plan_inputs.preview(config, inputs, best, terms)
    return document | ranking_view(ranking, now_s, warnings)


def profiled_elsewhere(facts: ModelFacts) -> Profile | None:
    """Return the newest kept profile of a model that was measured on a known GPU.

    What a cloud's machines will do is told better from that than from this machine.
    """
    known = (one.profile for one in known_profiles(facts))
    return next((p for p in known if catalogue().gpu_of(p.device) is not None), None)


def preview_workload(
    inputs: PlanInputs, gpus: int, elsewhere: SearchScope
) -> dict[str, Any]:
    """Return all offers for a model and profile as JSON, on fleets of up to ``gpus``.

    Raises:
        ConfigError: A cloud or GPU that the catalogue does not know.
        PlanError: No plan can be made from the profile.
    """
    job = replace(inputs, slots=())
    terms = RankingTerms(examples=NO_END, max_vms=gpus, max_gpus=gpus)
    now_s = time.time()
    with open_history() as history:
        warnings = list(ingest_journals(history))
        market = _others(job, history, now_s, elsewhere)
        ranking, more = _rank(
            market.offers, ThroughputCache(job), terms, history, now_s, elsewhere
        )
    return ranking_view(ranking, now_s, [*warnings, *market.warnings, *more])


def _own(
    config: JobConfig,
    facts: ModelFacts,
    profile: Profile,
    history: History,
    now_s: float,
    elsewhere: SearchScope,
) -> JobMarket:
    """Return what the job's own providers rent."""
    if not config.clouds:
        return own_market(
            config,
            hazards_of(history, now_s),
            now_s,
            is_measured=profile.origin == "measured",
        )
    base = base_of(profile, facts, elsewhere.measured_on)
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
    inputs: PlanInputs, history: History, now_s: float, elsewhere: SearchScope
) -> JobMarket:
    if not elsewhere.clouds:
        return JobMarket(offers=())
    base = base_of(inputs.profile, inputs.facts, elsewhere.measured_on)
    return cloud_market(history, base, now_s, clouds=elsewhere.clouds)


def _rank(
    offers: Sequence[Priced],
    throughputs: ThroughputCache,
    terms: RankingTerms,
    history: History,
    now_s: float,
    elsewhere: SearchScope,
) -> tuple[Ranking, tuple[str, ...]]:
    if elsewhere.offline:
        return rank(offers, throughputs, terms, exact=elsewhere.exact), ()
    return rank_live(offers, throughputs, terms, history, now_s, exact=elsewhere.exact)
