"""Can deadline, throughput and budget be met? Answered before anything is rented."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spottrain.cloud.port.provider import Offer
from spottrain.errors import BudgetError
from spottrain.morphing.errors import PlanError
from spottrain.pricing.prices.hazard import Hazards
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.core import deadline
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.profiles import known_profiles
from spottrain.varuna_manager.launch import inspect
from spottrain.varuna_manager.launch.submit import job_settings
from spottrain.varuna_manager.offers.market import own_market
from spottrain.varuna_manager.offers.ranker import OfferRanker
from spottrain.wire.model import ModelFacts, Profile


@dataclass(frozen=True, slots=True)
class DeadlineCheck:
    """What is known of a job's limits, as ``spottrain plan`` shows it."""

    reason: str
    """One line."""
    possible: bool | None
    """None: not known, or nothing that the job asks to be guaranteed."""
    least_usd: float | None = None
    """The smallest budget with which the deadline can be met."""
    earliest_finish_s: float | None = None
    """The earliest deadline that can be met within the budget; since the epoch."""


NOT_GUARANTEED = DeadlineCheck(
    "the deadline is not guaranteed: there may be no spot VMs; to guarantee it set "
    "resources.allow_on_demand",
    None,
)
UNKNOWN = DeadlineCheck(
    "this model was not measured yet: the job checks whether deadline and budget can both "
    "be met once it is, before it trains",
    None,
)


def predict(
    config: JobConfig,
    facts: ModelFacts,
    *,
    offers: Sequence[Offer] | None = None,
    profile: Profile | None = None,
) -> DeadlineCheck | None:
    """Return whether on-demand VMs alone would meet the deadline within the budget.

    A job that may not rent any, or has no more than a budget, is asked about as if no VM
    were interrupted; a budget that is too small for that is reported, but allowed.

    Args:
        config: The job.
        facts: What the tracer found out about its model.
        offers: What a cloud rents, where the job takes its machines from one.
        profile: Of the model; by default the newest that is kept, or the job file's.

    Returns:
        None if there is nothing to report: the job has no limits, a budget that is not
        known to be too small, or hosts of its own.
    """
    now_s = time.time()
    settings = job_settings(config, facts, job_dir(config.name), now_s)
    limited = settings.has_slo or settings.max_usd is not None
    if config.resources.provider == "ssh" or not limited:
        return None
    state = State(
        phase=JobPhase.ACTIVE,
        settings=settings,
        profile=settings.profile or profile,
        known_profiles=tuple(known_profiles(facts)),
        now_s=now_s,
        reconciled=True,
        offers=own_offers(config, now_s) if offers is None else tuple(offers),
    )
    terms = _terms(state)
    if terms is None:
        return UNKNOWN if settings.has_slo else None
    found = deadline.feasibility(state, terms)
    guaranteed = settings.has_slo and settings.allow_on_demand
    if found.reason:
        return DeadlineCheck(
            found.reason,
            found.possible if guaranteed or not found.possible else None,
            found.min_usd,
            found.earliest_finish_s,
        )
    return None if settings.deadline_s is None else NOT_GUARANTEED


def _terms(state: State) -> FleetTerms | None:
    """Return what fleets do for the job; None if that is not known yet."""
    ranker, hazards = OfferRanker(), Hazards((), {})
    try:
        ranker.rank(state, state.offers, hazards)
        return ranker.fleet_terms(state, state.offers, hazards)
    except PlanError:
        return None  # the planner will say why


def check_deadline(
    config: JobConfig,
    facts: ModelFacts,
    offers: Sequence[Offer] | None,
    say: Callable[[str], None],
) -> str:
    """Check that a job's limits can all be met, as far as that is known.

    Where the job runs on this machine, it is measured if it never was.

    Args:
        config: The job.
        facts: What the tracer found out about its model.
        offers: See ``predict``.
        say: Called with a line for people before anything that takes long.

    Returns:
        One line: what can be met; empty if there is nothing to report.

    Raises:
        BudgetError: They cannot be met: says which budget or deadline would do.
    """
    found = predict(config, facts, offers=offers)
    if found is UNKNOWN and config.resources.provider == "local":
        say(f"measuring {config.entrypoint} on this machine")
        found = predict(config, facts, profile=inspect.calibrate(config))
    if found is None:
        return ""
    if found.possible is False:
        raise BudgetError(found.reason)
    return found.reason


def own_offers(config: JobConfig, now_s: float) -> tuple[Offer, ...]:
    """Return the offers of the machines that the job file itself names."""
    market = own_market(config, Hazards((), {}), now_s)
    return tuple(
        replace(priced.offer, available=priced.max_vms) for priced in market.offers
    )
