"""Service levels: how many VMs of each offer a deadline or a minimum throughput asks for.

``pricing.deadline`` decides; here it is asked periodically, and at once when the market or
the fleet has changed. Missing VMs are rented by ``allocation.next_launch``, surplus ones are
returned here. Nothing of this concerns a job without a deadline or minimum throughput.
"""

from __future__ import annotations

import math
from collections import defaultdict

from spottrain.cloud.port.provider import Offer
from spottrain.eventlog.changed import replace
from spottrain.pricing.deadline.best_case import feasible_at_best
from spottrain.pricing.deadline.fallback import feasible
from spottrain.pricing.deadline.forecast import forecast
from spottrain.pricing.deadline.model import (
    Beginning,
    Feasibility,
    Holdings,
    JobStatus,
    Supply,
)
from spottrain.pricing.deadline.outlook import MarketOutlook, observe
from spottrain.pricing.deadline.policy import decide
from spottrain.pricing.deadline.rolling import is_due, note
from spottrain.pricing.deadline.worst_case import WorstCase
from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.ranking import cooldowns
from spottrain.varuna_manager.core import allocation, limits
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.core.model.deadline_state import DeadlineState, FleetTerms
from spottrain.varuna_manager.core.model.events import FleetRated
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.varuna_manager.core.model.state import JobPhase, State, budget
from spottrain.varuna_manager.core.model.transition import Transition

REVIEW_S = 60.0
"""The longest time between two decisions."""
MIN_REVIEW_S = 5.0
"""The shortest."""
END_S = 15.0
"""From the last mini-batch to the end: time reserved for evaluating and saving."""
REVIEWS_LEFT = 100
"""Decisions between now and the deadline, as far as the bounds allow."""


def fleet_rated(transition: Transition, event: FleetRated) -> None:
    """Note the throughput of fleets; forget what was decided without knowing it."""
    before, training = transition.state.deadline, transition.state.fleet.training
    if training and not any(event.terms.is_for(vm.offer) for vm in training):
        return  # asked before the job moved
    rates, known = event.terms.fleet.rates, before.terms
    same = known is not None and known.fleet.rates == rates
    trains = same or transition.state.history.progress.step > 0
    decision = before.decision if trains else None
    rated = replace(before, terms=event.terms, elsewhere=event.elsewhere)
    transition.put(replace(rated, seen=(), decision=decision))
    if event.elsewhere != before.elsewhere:  # what kept the job from moving there may be over
        transition.put(replace(transition.state.market, considered=-1))


def advance(transition: Transition) -> None:
    """Decide again if something has changed or it is time to, and return surplus VMs."""
    state = transition.state
    terms = state.deadline.terms
    known = state.fleet.reconciled and bool(state.market.offers)
    if state.phase is not JobPhase.ACTIVE or not known or terms is None:
        return
    if state.history.progress.step >= state.job.spec.steps:
        return  # the last checkpoint is still to be written
    if not state.job.has_slo:
        if state.deadline.decision is not None:
            transition.put(DeadlineState(terms=terms))
        return
    if (move := state.fleet.move) is not None and not move.is_cut_over:
        return  # the old VMs train until the new ones are there, see ``moves``
    transition.wake(allocation.changes_at_s(state, _in_reach(state, terms)))
    if _seen(state, terms) == state.deadline.seen and not transition.waited_until(
        state.deadline.review_at_s
    ):
        return
    if not _is_possible(transition, terms):
        return
    _decide(transition, terms)
    transition.wake(transition.state.deadline.review_at_s)


def _is_possible(transition: Transition, terms: FleetTerms) -> bool:
    """End the job if its limits cannot be met and nothing was trained yet.

    Checked once, and again if fleets turn out to be of another speed: not while VMs boot,
    whose boot time was counted.
    """
    state = transition.state
    if state.history.progress.step > 0 or state.deadline.decision is not None:
        return True
    found = feasibility(state, terms)
    if not found.possible:
        transition.end(Outcome(kind="deadline", exit_code=4, reason=found.reason))
    return found.possible


def is_cost_optimal(state: State) -> bool:
    """Return whether the job is cost-optimal: as cheap as possible; else time-optimal."""
    return state.job.morphing.objective == "examples_per_dollar"


def feasibility(state: State, terms: FleetTerms) -> Feasibility:
    """Return whether on-demand VMs alone would meet deadline, throughput and budget.

    Where the job may not rent on demand, or has only a budget: whether any VMs would if
    none were interrupted, which guarantees nothing. Offers that have no VMs at the moment
    count as if they had.
    """
    job = state.job
    allowed = job.resources.allow_on_demand
    market = [
        Supply(
            name=offer_key(offer),
            spot=offer.spot,
            usd_per_hour=offer.usd_per_hour,
            available=offer.available,
        )
        for offer in state.market.offers
        if terms.is_for(offer) and (offer.spot or allowed)
    ]
    now = job_status(state)
    if allowed and job.has_slo:
        return feasible(now, terms.fleet, market)
    return feasible_at_best(now, terms.fleet, market, allocation.held(state))


def _decide(transition: Transition, terms: FleetTerms) -> None:
    state = transition.state = _begun(transition.state)
    market, rented = supplies(state, terms), holdings(state, terms)
    outlook = observe(state.deadline.outlook, state.now_s, terms.fleet, market, rented)
    now = replace(job_status(state), paused_s=_paused_s(state, terms))
    cheap, fleet = is_cost_optimal(state), terms.fleet
    rolling, spent_usd = state.deadline.rolling, budget(state).spent.usd
    if is_due(rolling, now.examples_left):
        plain = forecast(now, fleet, market, rented, outlook, cost_optimal=cheap)
        rolling = note(rolling, plain, now.examples_left, state.now_s, spent_usd)
    decision = decide(now, fleet, market, rented, outlook, cost_optimal=cheap)
    before = state.deadline.decision
    if before is None or before.mode != decision.mode:
        transition.log(f"deadline policy: {decision.mode}: {decision.reason}")
    for one in rented:
        _return(transition, one, decision.count(one.name), decision.reason)
    transition.put(
        replace(
            transition.state.deadline,
            outlook=outlook,
            decision=decision,
            rolling=rolling,
            seen=_seen(transition.state, terms),
            review_at_s=state.now_s + now.review_s,
        )
    )


def _begun(state: State) -> State:
    """Note what was left and spent when the job's limits became what they are."""
    known, limits_now = state.deadline, _limits(state)
    if known.limits == limits_now:
        return state
    now = job_status(state)
    known = replace(
        known,
        limits=limits_now,
        rolling=None,
        limits_examples=now.examples_left - (now.examples_unsaved or 0.0),
        limits_usd=budget(state).spent.usd,
    )
    return replace(state, deadline=known)


def _paused_s(state: State, terms: FleetTerms) -> float:
    """Return how long training pauses from now on: as long as a morph unless it runs."""
    now = state.training.generation
    trains = now is not None and now.phase is GenerationPhase.RUNNING and now.committed
    return 0.0 if trains else terms.fleet.morph_s


def _return(transition: Transition, rented: Holdings, wanted: int, reason: str) -> None:
    """Return surplus VMs of one offer, by eviction cost."""
    state = transition.state
    counting = [vm for vm in state.fleet.vms.values() if vm.counts]
    own = [vm for vm in counting if offer_key(vm.offer) == rented.name]
    excess = len(own) - max(wanted, 0)
    spare = len(counting) - state.job.resources.min_vms
    for vm in limits.by_eviction_cost(state, own)[: max(0, min(excess, spare))]:
        limits.drain(transition, vm, f"deadline policy: {reason}")


# --- Moves --------------------------------------------------------------------------------


def survives_move(state: State, offer: Offer, late_s: float, usd: float) -> bool:
    """Return whether the limits are kept if the job moves to as many VMs of an offer.

    In the worst case nothing is trained until the new VMs are there, and then all VMs are lost:
    on-demand VMs alone must still be enough, where it went and, as the new ones may never come,
    where it was. Where nothing is guaranteed (there are none, neither here nor there) the new
    VMs must be in time if they are not lost.

    Args:
        late_s: When the new VMs train, at the latest, from now on.
        usd: What old and new ones cost until then.
    """
    here = state.deadline.terms
    known = (here, state.deadline.elsewhere)
    there = next((one for one in known if one is not None and one.is_for(offer)), None)
    if here is None or there is None:
        return False
    now = job_status(state)
    rate = there.fleet.rates[min(len(state.fleet.vms), there.fleet.max_vms)]
    if rate < (now.min_examples_per_s or 0.0):
        return False
    now = replace(
        now,
        deadline_s=None if now.deadline_s is None else now.deadline_s - late_s,
        usd_left=None if now.usd_left is None else now.usd_left - usd,
    )
    alone = replace(state, fleet=replace(state.fleet, vms={}))
    to = cooldowns.location_of(offer, state.job.resources.span)
    ends = [(here, allocation.home(state)), (there, to)]
    markets = [(terms.fleet, supplies(alone, terms, where)) for terms, where in ends]
    if all(supply.spot for _, market in markets for supply in market):
        return now.examples_left <= rate * now.left_s
    worst = [WorstCase(now, fleet, market, ()) for fleet, market in markets]
    return all(one.is_survived({}, one.attempts_usd) for one in worst)


def moved(transition: Transition) -> None:
    """Decide anew, by what fleets of the kind of machine do that the job has moved to."""
    before, training = transition.state.deadline, transition.state.fleet.training
    if before.terms is None or not training:
        return
    known = [one for one in (before.terms, before.elsewhere) if one is not None]
    known.sort(key=lambda one: not any(one.is_for(vm.offer) for vm in training))
    transition.put(
        replace(
            before,
            terms=known[0],
            elsewhere=known[-1] if len(known) > 1 else None,
            outlook=MarketOutlook(),
            decision=None,
            seen=(),
        )
    )


# --- What is decided over -------------------------------------------------------------


def job_status(state: State) -> JobStatus:
    """Return what the deadline policy must know of the job."""
    job, generation, spec = state.job, state.training.generation, state.job.spec
    # All VMs may be lost at once; only the work in the checkpoint is left then.
    newest = state.newest_checkpoint
    saved = newest.step if newest else 0
    recent = generation.measured_step_s if generation else None
    money, known = budget(state), state.deadline
    begun = Beginning(
        examples=known.limits_examples,
        usd_spent=money.spent.usd - known.limits_usd,
    )
    left_s = math.inf if job.deadline_s is None else job.deadline_s - state.now_s
    return JobStatus(
        now_s=state.now_s,
        deadline_s=job.deadline_s,
        ending_s=END_S,
        examples_left=float((spec.steps - saved) * spec.minibatch_size),
        examples_unsaved=float(max(0, state.history.progress.step - saved) * spec.minibatch_size),
        examples_per_checkpoint=float(
            min(spec.checkpoint_every_steps, spec.steps) * spec.minibatch_size
        ),
        begun=begun if known.limits else None,
        usd_left=None if money.cap is None else (money.cap - money.spent).usd,
        reserve_s=money.reserve_s,
        usd_per_hour_cap=job.budget.max_usd_per_hour,
        min_examples_per_s=job.min_examples_per_s,
        recent_examples_per_s=spec.minibatch_size / recent if recent else None,
        review_s=min(REVIEW_S, max(MIN_REVIEW_S, left_s / REVIEWS_LEFT)),
    )


def holdings(state: State, terms: FleetTerms) -> tuple[Holdings, ...]:
    """Return the VMs that are rented or asked for, and how long they still boot."""
    boots_s = defaultdict[str, list[float]](list)
    for vm in state.fleet.vms.values():
        if vm.counts and not vm.is_usable:
            left_s = vm.launched_at_s + terms.fleet.boot_s - state.now_s
            boots_s[offer_key(vm.offer)].append(max(0.0, left_s))
    return tuple(
        replace(one, boots_s=tuple(sorted(boots_s[one.name]))) for one in allocation.held(state)
    )


def _in_reach(state: State, terms: FleetTerms, where: tuple[str, ...] | None = None) -> list[Offer]:
    """Return the offers of the kind that the terms are about at a location, or where the job's
    VMs are."""
    where = where or allocation.home(state)
    return [
        offer
        for offer in state.market.offers
        if terms.is_for(offer) and allocation.is_at(state, where, offer)
    ]


def supplies(
    state: State, terms: FleetTerms, where: tuple[str, ...] | None = None
) -> tuple[Supply, ...]:
    """Return what is on offer of the kind of machine that the terms are about.

    Only at a location, or where the job's VMs are, if they have to be near each other. Spot offers that cool
    down, or cost as much as on-demand VMs of their zone, count as sold out.
    """
    here = {one.name for one in allocation.held(state)}
    kind = _in_reach(state, terms, where)
    open_keys = {offer_key(o) for o in kind if allocation.is_open(state, o)}
    on_demand_usd = {
        (o.region, o.zone): o.usd_per_hour for o in kind if not o.spot and offer_key(o) in open_keys
    }
    found = []
    for offer in kind:
        key = offer_key(offer)
        limit_usd = on_demand_usd.get((offer.region, offer.zone), math.inf)
        overpriced = offer.spot and offer.usd_per_hour >= limit_usd
        if offer.spot or key in here or key in open_keys:
            losses = terms.losses_per_hour.get(key, 0.0) if offer.spot else 0.0
            found.append(
                Supply(
                    name=key,
                    spot=offer.spot,
                    usd_per_hour=offer.usd_per_hour,
                    available=0 if overpriced else max(0, allocation.available(state, offer)),
                    losses_per_hour=losses,
                )
            )
    return tuple(found)


def _limits(state: State) -> tuple[float | None, ...]:
    job = state.job
    return (job.deadline_s, job.min_examples_per_s, job.budget.max_usd, job.budget.max_usd_per_hour)


def _seen(state: State, terms: FleetTerms) -> tuple[object, ...]:
    """Return what a decision depends on, time and progress apart."""
    return (supplies(state, terms), allocation.held(state), *_limits(state))
