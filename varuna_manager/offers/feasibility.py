"""Whether a promise can be kept, asked before anything is rented."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spottrain.cloud.port.provider import Offer
from spottrain.errors import BudgetError
from spottrain.morphing.errors import PlanError
from spottrain.pricing.prices.hazard import Hazards
from spottrain.varuna_manager.cli.console import say
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
from spottrain.wire import ModelFacts, Profile


@dataclass(frozen=True, slots=True)
class DeadlineCheck:
    """What can be promised of a job's deadline and budget."""

    reason: str
    """One line."""
    possible: bool | None
    """None: that is not known, or the job does not ask for it."""
    least_usd: float | None = None
    """The least budget with which the deadline can be kept."""
    earliest_finish_s: float | None = None
    """The nearest deadline that can be kept within the budget; since the epoch."""


UNASKED = DeadlineCheck(
    "the deadline is not promised, spot VMs may not come; to have it kept set "
    "resources.allow_on_demand",
    None,
)
UNKNOWN = DeadlineCheck(
    "nothing was measured of this model yet: whether deadline and budget can both be met "
    "is told once it is, before it trains",
    None,
)


def predict(
    config: JobConfig,
    facts: ModelFacts,
    *,
    offers: Sequence[Offer] | None = None,
    profile: Profile | None = None,
) -> DeadlineCheck | None:
    """Return whether on-demand VMs alone would be in time and within the budget.

    Where the job may not rent any: whether it would be if nobody took a VM away. So too
    where it only has a budget; one that is too small is told, but does not forbid it.

    Args:
        config: The job.
        facts: What the tracer found out about its model.
        offers: What a cloud rents, where the job takes its machines from one.
        profile: Of the model; by default the newest that is kept, or the job file's.

    Returns:
        None if there is nothing to tell: the job has no limits, a budget that is not
        known to be too small, or hosts of its own.
    """
    now_s = time.time()
    settings = job_settings(config, facts, job_dir(config.name), now_s)
    limited = settings.has_slo or settings.max_usd is not None
    if config.resources.provider == "ssh" or not limited:
        return None
    if offers is None:
        offers = own_offers(config, now_s)
    state = State(
        phase=JobPhase.ACTIVE,
        settings=settings,
        profile=settings.profile or profile,
        known_profiles=tuple(known_profiles(facts)),
        now_s=now_s,
        reconciled=True,
        offers=tuple(offers),
    )
    terms = _terms(state)
    if terms is None:
        return UNKNOWN if settings.has_slo else None
    found = deadline.feasibility(state, terms)
    promised = settings.has_slo and settings.allow_on_demand
    if found.reason:
        return DeadlineCheck(
            found.reason,
            found.possible if promised or not found.possible else None,
            found.min_usd,
            found.earliest_finish_s,
        )
    return None if settings.deadline_s is None else UNASKED


def _terms(state: State) -> FleetTerms | None:
    """Return what fleets do for the job; None if that is not known yet."""
    appraiser, hazards = OfferRanker(), Hazards((), {})
    try:
        appraiser.appraise(state, state.offers, hazards)
        return appraiser.fleet_terms(state, state.offers, hazards)
    except PlanError:
        return None  # the planner will say why


def check_deadline(
    config: JobConfig, facts: ModelFacts, offers: Sequence[Offer] | None = None
) -> str:
    """Check that a job's limits can all be met, as far as that is known.

    Where the machines to be rented are this one, it is measured if need be.

    Args:
        config: The job.
        facts: What the tracer found out about its model.
        offers: See ``predict``.

    Returns:
        One line: what can be promised; empty if there is nothing to tell.

    Raises:
        BudgetError: They cannot: which budget or which deadline would do.
    """
    promised = predict(config, facts, offers=offers)
    if promised is UNKNOWN and config.resources.provider == "local":
        # This machine is what will be rented: it can be asked.
        say(f"measuring {config.entrypoint} on this machine")
        promised = predict(config, facts, profile=inspect.calibrate(config))
    if promised is None:
        return ""
    if promised.possible is False:
        raise BudgetError(promised.reason)
    return promised.reason


def own_offers(config: JobConfig, now_s: float) -> tuple[Offer, ...]:
    """Return what the job file itself names."""
    market = own_market(config, Hazards((), {}), now_s)
    return tuple(
        replace(priced.offer, available=priced.most_vms) for priced in market.offers
    )
