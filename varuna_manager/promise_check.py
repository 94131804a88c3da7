"""Whether a promise can be kept, asked before anything is rented."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from spottrain.cloud.provider import Offer
from spottrain.errors import BudgetError
from spottrain.morphing.errors import PlanError
from spottrain.pricing.hazard import Hazards
from spottrain.pricing.promise_terms import Feasibility
from spottrain.varuna_manager import core_promise
from spottrain.varuna_manager.appraisal import Appraiser
from spottrain.varuna_manager.config import JobConfig
from spottrain.varuna_manager.jobs import job_dir
from spottrain.varuna_manager.launch import settings_of
from spottrain.varuna_manager.market import own_market
from spottrain.varuna_manager.profiles import known_profiles
from spottrain.varuna_manager.state import JobPhase, State
from spottrain.varuna_manager.turn import Turn
from spottrain.wire import ModelFacts


def check_promise(
    config: JobConfig, facts: ModelFacts, offers: Sequence[Offer] | None = None
) -> str:
    """Check that deadline and budget can both be met, as far as that is known yet.

    Args:
        config: The job.
        facts: What the tracer found out about its model.
        offers: What a cloud rents, where the job takes its machines from one.

    Returns:
        One line: what can be promised; empty if nothing was asked for.

    Raises:
        BudgetError: They cannot: which budget or which deadline would do.
    """
    if config.slo.deadline is None and config.slo.max_hours is None:
        return ""
    if not config.resources.allow_on_demand:
        return (
            "the deadline cannot be promised: spot VMs may not come; to have it kept set "
            "resources.allow_on_demand"
        )
    now_s = time.time()
    if offers is None:
        offers = own_offers(config, now_s)
    settings = settings_of(config, facts, job_dir(config.name), now_s)
    state = State(
        phase=JobPhase.ACTIVE,
        settings=settings,
        profile=settings.profile,
        known_profiles=tuple(known_profiles(facts)),
        now_s=now_s,
        reconciled=True,
        offers=tuple(offers),
    )
    verdict = foretell(state, now_s)
    if verdict is None:
        return (
            "nothing was measured of this model yet: whether the deadline can be kept is "
            "told once it is"
        )
    if not verdict.possible:
        raise BudgetError(f"slo: {verdict.reason}")
    return verdict.reason


def foretell(state: State, now_s: float) -> Feasibility | None:
    """Return whether on-demand VMs alone would do; None: that is not known yet."""
    appraiser, hazards = Appraiser(), Hazards((), {})
    try:
        appraiser.appraise(state, state.offers, hazards)
        terms = appraiser.fleet_terms(state, state.offers, hazards)
    except PlanError:
        return None  # the planner will say why
    if terms is None:
        return None
    return core_promise.verdict(Turn(state, now_s), terms)


def own_offers(config: JobConfig, now_s: float) -> tuple[Offer, ...]:
    """Return what the job file itself names."""
    market = own_market(config, Hazards((), {}), now_s)
    return tuple(
        replace(priced.offer, available=priced.most_vms) for priced in market.offers
    )
