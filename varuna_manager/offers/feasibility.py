"""Can deadline, throughput and budget be met? Answered before anything is rented."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spottrain.cloud.port.provider import Offer
from spottrain.errors import BudgetError, CapacityError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.memory.memory import WorkerTerms
from spottrain.morphing.memory.room import megabytes
from spottrain.morphing.memory.stage import MemoryModel
from spottrain.morphing.simulate.compute import Compute, trained_bytes
from spottrain.pricing.prices.hazard import Hazards
from spottrain.pricing.ranking.gpu_speed import machine_as_offered
from spottrain.units import counted
from spottrain.varuna_manager.config.clouds import OWN_MACHINES
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.core import deadline
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.launch import inspect
from spottrain.varuna_manager.launch.submit import state_as_launched
from spottrain.varuna_manager.offers.market import own_market
from spottrain.varuna_manager.offers.ranker import OfferRanker
from spottrain.wire.model import ModelFacts, Profile, SectionProfile


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
        facts: What the tracer found out about its model.
        offers: What a cloud rents, where the job takes its machines from one.
        profile: Of the model; by default the newest that is kept, or the job file's.

    Returns:
        None if there is nothing to report: the job has no limits, a budget that is not
        known to be too small, or hosts of its own.
    """
    if config.resources.provider in OWN_MACHINES:
        return None
    offers = own_offers(config, time.time()) if offers is None else offers
    state = state_as_launched(config, facts, offers, profile)
    job = state.job
    if not job.has_slo and job.budget.max_usd is None:
        return None
    terms = _terms(state)
    if terms is None:
        return UNKNOWN if job.has_slo else None
    found = deadline.feasibility(state, terms)
    guaranteed = job.has_slo and job.resources.allow_on_demand
    if found.reason:
        return DeadlineCheck(
            found.reason,
            found.possible if guaranteed or not found.possible else None,
            found.min_usd,
            found.earliest_finish_s,
        )
    return None if job.deadline_s is None else NOT_GUARANTEED


def _terms(state: State) -> FleetTerms | None:
    """Return what fleets do for the job; None if that is not known yet."""
    ranker, hazards = OfferRanker(), Hazards((), {})
    try:
        ranker.rank(state, state.market.offers, hazards)
        return ranker.fleet_terms(state, state.market.offers, hazards)
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


def check_memory(config: JobConfig, facts: ModelFacts, offers: Sequence[Offer] | None) -> None:
    """Refuse a job whose committed state alone fits on no fleet it could rent.

    A lower bound, for nothing is known of activations yet: what passes may still need
    more once the model is measured. Own hosts are not looked at, they cost nothing.

    Args:
        facts: What the tracer found out about its model.
        offers: A cloud's; ``None``: the job file names machines.

    Raises:
        CapacityError: It fits on none.
    """
    offers = own_offers(config, time.time()) if offers is None else offers
    if not offers or any(o.cloud in OWN_MACHINES or not o.gpu_memory_bytes for o in offers):
        return
    best, ways = "", list[tuple[int, str]]()
    for offer in sorted(offers, key=lambda o: o.gpus * o.gpu_memory_bytes):
        machine = machine_as_offered(offer, offer.gpus, 1.0)
        if not machine.is_gpu or config.runtime.asked_state == "device":
            room_bytes = machine.gpu_memory_bytes
        elif machine.memory_bytes:
            room_bytes = machine.gpu_memory_bytes + machine.memory_bytes // machine.gpus
        else:
            return
        section, total = _least_bytes(config, facts, on_gpu=machine.is_gpu)
        slots = config.resources.max_vms * machine.gpus
        if section <= room_bytes and total <= slots * room_bytes:
            return
        best = (
            f"{megabytes(total)} altogether and {megabytes(section)} for its largest "
            f"section: got {counted(slots, 'slot')} of {megabytes(room_bytes)} on {offer.instance_type}"
        )
        if section <= room_bytes:
            ways.append((math.ceil(total / (room_bytes * machine.gpus)), offer.instance_type))
    advice = "take machines with larger slots, or cut the model into smaller sections"
    if ways:
        vms, kind = min(ways)
        advice = f"resources.max_vms: {vms} with {kind} is the least, or larger machines"
    raise CapacityError(
        f"the model does not fit: its parameters, gradients and optimizer need at least {best}; "
        f"{advice}"
    )


def _least_bytes(config: JobConfig, facts: ModelFacts, *, on_gpu: bool) -> tuple[int, int]:
    """Return what a worker must hold of the largest section, and all workers of all."""
    if on_gpu:  # wherever committed state is: in one of two memories
        each = [s.param_bytes + s.optimizer_bytes + trained_bytes(s) for s in facts.sections]
        return max(each), sum(each)
    compute = Compute(semantics=config.semantics)
    terms = WorkerTerms(reduction=config.reduction, compute=compute)
    blank = [
        SectionProfile(
            index=index,
            forward_s=0.0,
            backward_s=0.0,
            recompute_s=0.0,
            saved_bytes=0,
            output_bytes=0,
        )
        for index in range(len(facts.sections))
    ]
    stages = [
        MemoryModel.of(facts, blank, [range(k, k + 1)], terms).idle
        for k in range(len(facts.sections))
    ]
    total = sum(stage.static_bytes - stage.undo_bytes for stage in stages)
    return max(stage.static_bytes for stage in stages), total


def own_offers(config: JobConfig, now_s: float) -> tuple[Offer, ...]:
    """Return the offers of the machines that the job file itself names."""
    market = own_market(config, Hazards((), {}), now_s)
    return tuple(replace(priced.offer, available=priced.max_vms) for priced in market.offers)
