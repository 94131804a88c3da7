"""Moving to another offer for money while the job runs.

    begun --enough new VMs are ready--> left --the old ones are returned--> over
      --they are not in time, or cannot train--> given up: the new ones are returned

Asked at every new ranking, once the fleet is calm and does not grow. The new VMs are
rented beside the old ones, which train on until all of them are ready. The rules:

1. Old VMs do not count towards ``max_vms`` from the beginning of a move on
   (``VmRecord.counts``), so as many new ones may be rented; all of them count for the
   hourly cap and the budget, as ever.
2. Where they reach each other the new VMs take sections from the old ones. Elsewhere the
   old ones save a checkpoint, and the new ones load it (``Move.is_far``).
3. Plans use old VMs up to the end of the first phase, then new ones
   (``planning.usable_vms``).
4. Only one move at a time. In a pool's grant all that is billed counts, so VMs make room for
   new ones first: half of them where both halves can train, else all, and nothing is trained
   for a while. The pool is asked whether it may be (``FleetState.idle_asked_s``).
5. With a deadline the worst case is asked (``deadline.survives_move``): whatever comes of the
   move, on-demand VMs where the job was and where it went must still finish in time.
6. A place that was moved to twice in a day, and left again or never reached, is not tried again
   that day.
"""

from __future__ import annotations

import math
from collections import Counter

from spottrain.cloud.port.provider import Offer
from spottrain.eventlog.changed import replace
from spottrain.pricing.billing import egress
from spottrain.pricing.prices.place import Place, offer_key, place_of
from spottrain.pricing.ranking import cooldowns
from spottrain.pricing.ranking.quotas import quota_left
from spottrain.pricing.ranking.switching import (
    Frictions,
    Quote,
    SwitchingRule,
    SwitchingState,
    decide,
)
from spottrain.units import DAY_S, HOUR_S, counted
from spottrain.varuna_manager.core import allocation, deadline, limits
from spottrain.varuna_manager.core.fleet import return_vms
from spottrain.varuna_manager.core.model.records import (
    GenerationPhase,
    Move,
    VmPhase,
    VmRecord,
)
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    State,
    held_by_kind,
    kind_of,
    places_by_kind,
)
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.varuna_manager.core.planning import MORPH_COST_S
from spottrain.varuna_manager.core.stragglers import boot_s
from spottrain.varuna_manager.format import dollars, duration

RULE = SwitchingRule(hysteresis=0.05, horizon_s=7 * DAY_S)
"""As ``simulate prices`` assumes."""
RELOAD_S = 300.0
"""Training time that a move costs where VMs do not reach each other: a checkpoint is saved,
and loaded elsewhere. Oobleck's artifact (SOSP 2023) has 76 to 701 s for restarts."""
READY_BOUND_S = 1800.0
"""How long new VMs may take, refusals included."""
PAUSE_S = 3600.0
"""After a move that was given up, until the next may begin."""
MOST_A_DAY = 2
"""Moves to one place: another would be one more that is soon undone."""


def advance(transition: Transition) -> None:
    """Begin a move that pays, take one further, or give it up."""
    state = transition.state
    if state.phase is not JobPhase.ACTIVE:
        return
    if state.fleet.move is None:
        _begin(transition)
    elif state.fleet.move.is_cut_over:
        _end(transition, state.fleet.move)
    else:
        _wait(transition, state.fleet.move)


# --- Whether a move pays ------------------------------------------------------------------


def _begin(transition: Transition) -> None:
    state = transition.state
    if state.market.considered == state.market.rankings or not _is_calm(state):
        return
    if state.now_s < state.fleet.move_after_s:
        transition.wake(state.fleet.move_after_s)
        return
    transition.put(replace(state.market, considered=state.market.rankings))
    state = transition.state
    found = _better(state)
    if not _may_idle(transition, None if found is None else found[0]) or found is None:
        return
    offer, why, saves_usd = found
    going, new_vms = _making_room(state)
    where = cooldowns.location_of(offer, state.job.resources.span)
    held = _place(state)
    move = Move(
        vm_ids=tuple(state.fleet.vms),
        new_vms=new_vms,
        room_made=len(going),
        offer=offer_key(offer),
        to=f"{offer.instance_type} in {offer.zone}",
        source=f"{held.instance_type} in {held.zone}",
        why=why,
        saves_usd=saves_usd,
        since_s=state.now_s,
        is_far=where != allocation.home(state),
    )
    for vm in tuple(state.fleet.vms.values()):
        if vm in going:
            limits.drain(transition, vm, f"makes room for one in {offer.zone}")
        else:
            transition.put_vm(replace(vm, successor="expected"))
    made = (*_of_day(state), (state.now_s, move.offer))
    transition.put(replace(transition.state.fleet, move=move, moves_of_day=made))
    transition.log(f"moving from {move.source} to {move.to}: {why}")


def _is_calm(state: State) -> bool:
    """Return whether a move may begin: the whole fleet trains, and nothing is under way."""
    generation = state.training.generation
    if not deadline.is_cost_optimal(state):
        return False
    if generation is None or generation.phase is not GenerationPhase.RUNNING:
        return False
    if generation.done or generation.save_only or not state.fleet.reconciled:
        return False
    if state.launches.intents:
        return False
    vms = state.fleet.vms.values()
    train = all(vm.is_usable and vm.slow is None and generation.trains_on(vm.vm_id) for vm in vms)
    return train and allocation.next_launch(state).offer is None


def _making_room(state: State) -> tuple[tuple[VmRecord, ...], int]:
    """Return the VMs that are given up before new ones come, and how many then come at once.

    None, and as many as there are, but where a pool's grant has no room for both.
    """
    vms, grant = state.fleet.vms, state.job.grant
    if grant is None:
        return (), len(vms)
    half, enough = len(vms) // 2, state.job.resources.min_vms
    going = half if min(half, len(vms) - half) >= enough else len(vms)
    room = grant.total - len(vms) - places_by_kind(state).total()
    if room >= len(vms):
        return (), len(vms)
    return tuple(limits.by_eviction_cost(state, vms.values())[:going]), going


def _may_idle(transition: Transition, offer: Offer | None) -> bool:
    """Return whether nothing may be trained for as long as a move to an offer may take.

    In the worst case the new VMs never come, and others boot where the job was. A pool knows
    which deadlines it has promised, and is asked; None: there is nothing to ask for any more.
    """
    state = transition.state
    if state.job.grant is None:
        return True
    idle_s = 0.0
    if offer is not None:
        idle_s = READY_BOUND_S + boot_s(state) + _move_s(state, place_of(offer))
    # Not anew for a second more.
    asked_s = max(idle_s, state.fleet.idle_asked_s) if idle_s else 0.0
    if asked_s != state.fleet.idle_asked_s:
        transition.put(replace(state.fleet, idle_asked_s=asked_s))
    return 0.0 < idle_s <= state.job.grant.idle_s


def _of_day(state: State) -> tuple[tuple[float, str], ...]:
    """Return the moves of the last day."""
    since_s = state.now_s - DAY_S
    return tuple(made for made in state.fleet.moves_of_day if made[0] > since_s)


def _better(state: State) -> tuple[Offer, str, float] | None:
    """Return the offer to move to, why, and the dollars that it saves; None: to stay is
    better."""
    held = _held_quote(state)
    if held is None:
        return None
    count = len(state.fleet.vms)
    affords = allocation.affordable(state)
    left = quota_left(state.market.offers, allocation.rented(state))
    made = Counter(key for _, key in _of_day(state))
    offers: dict[Place, Offer] = {}
    quotes = [held]
    for offer in state.market.offers:
        worth = state.market.worths.get(offer_key(offer))
        if worth is None or worth.examples_per_usd <= 0:
            continue
        if made[offer_key(offer)] >= MOST_A_DAY:
            continue
        # First what costs little to ask: most offers are no better.
        if worth.at(offer.usd_per_hour) * held.usd_per_hour <= _per_hour(held):
            continue
        if state.job.grant is not None and kind_of(offer) not in held_by_kind(state):
            continue  # kinds are the pool's to choose
        place = place_of(offer)
        rooms = allocation.available(state, offer), affords(offer), left(offer)
        if min(rooms) < count or not (offer.spot or state.job.resources.allow_on_demand):
            continue
        rate = count * worth.examples_per_usd * worth.usd_per_hour / HOUR_S
        usd = count * offer.usd_per_hour
        quotes.append(Quote(place=place, usd_per_hour=usd, examples_per_s=rate))
        known = offers.get(place)
        if known is None or offer.usd_per_hour < known.usd_per_hour:
            offers[place] = offer
    if len(quotes) == 1:
        return None
    step_left = state.job.spec.steps - state.history.progress.step
    examples = float(step_left * state.job.spec.minibatch_size)
    at = SwitchingState(
        # Until the new VMs have booted the old ones train on.
        examples=max(0.0, examples - held.examples_per_s * boot_s(state)),
        held=held.place,
        checkpoint=_place(state),
    )
    decisions = [
        decide([held, quote], at, _frictions(state, quote.place), RULE) for quote in quotes[1:]
    ]
    moves = [one for one in decisions if one.moves]
    moves.sort(key=lambda one: (-one.saves_usd, one.quote.place))
    best = next((one for one in moves if _keeps_limits(state, offers[one.quote.place])), None)
    if best is None:
        return None
    gain = _usd_each(held) / _usd_each(best.quote)
    why = (
        f"{gain - 1:.0%} more examples per dollar save {dollars(best.saves_usd)} over "
        f"{duration(min(RULE.horizon_s or math.inf, at.examples / held.examples_per_s))}"
    )
    return offers[best.quote.place], why, best.saves_usd


def _keeps_limits(state: State, offer: Offer) -> bool:
    """Return whether a job with a deadline or a minimum throughput may move to an offer."""
    if not state.job.has_slo:
        return True
    late_s = READY_BOUND_S + _move_s(state, place_of(offer))
    each_usd = [state.history.ledger.rate_of(vm_id).usd_per_hour for vm_id in state.fleet.vms]
    usd_per_hour = math.fsum(each_usd) + len(each_usd) * offer.usd_per_hour
    return deadline.survives_move(state, offer, late_s, usd_per_hour * late_s / HOUR_S)


def _usd_each(quote: Quote) -> float:
    return quote.usd_per_hour / quote.examples_per_s


def _per_hour(quote: Quote) -> float:
    return quote.examples_per_s * HOUR_S


def _held_quote(state: State) -> Quote | None:
    """Return what the fleet trains and costs now; None if one of its VMs is unranked.

    Its place is no offer's: at another price the same machine may be worth renting anew.
    """
    usd = examples = 0.0
    for vm in state.fleet.vms.values():
        worth = state.market.worths.get(offer_key(vm.offer))
        if worth is None:
            return None
        usd += state.history.ledger.rate_of(vm.vm_id).usd_per_hour
        examples += worth.examples_per_usd * worth.usd_per_hour / HOUR_S
    if not (usd > 0 and examples > 0):
        return None
    return Quote(
        place=_place(state)._replace(zone="held"),
        usd_per_hour=usd,
        examples_per_s=examples,
    )


def _place(state: State) -> Place:
    """Return the place of most VMs."""
    places = Counter(place_of(vm.offer) for vm in state.fleet.vms.values())
    return max(places, key=lambda place: (places[place], place))


def _frictions(state: State, to: Place) -> Frictions:
    """Return what a move to a place costs."""
    job = state.job
    fetched = egress.fetched(job.data_bytes, to.cloud).usd * len(state.fleet.vms)
    base = Frictions()
    zone = job.budget.zone_usd_per_gb
    return replace(
        base,
        boot_s=boot_s(state),
        move_s=_move_s(state, to),
        checkpoint_bytes=float(job.facts.stored_bytes(1)),
        zone_usd_per_gb=base.zone_usd_per_gb if zone is None else zone,
        dataset_bytes=fetched / base.cloud_usd_per_gb * 1e9,
    )


def _move_s(state: State, to: Place) -> float:
    """Return the training time that a move to a place costs."""
    here = _place(state)
    if to.site == here.site or allocation.reach_each_other(state, here, to):
        return state.history.progress.morph_cost_s or MORPH_COST_S
    return RELOAD_S


# --- A move under way ---------------------------------------------------------------------


def _wait(transition: Transition, move: Move) -> None:
    """Leave the old VMs once there are as many new ones, or give up."""
    state = transition.state
    old = [vm for vm in state.fleet.vms.values() if vm.successor]
    new = [vm for vm in state.fleet.vms.values() if vm.counts]
    ready = [vm for vm in new if vm.is_usable]
    if not old and not move.is_standstill:  # there is nothing to wait for
        transition.put(replace(state.fleet, move=None, idle_asked_s=0.0))
        deadline.moved(transition)
        return
    enough = move.new_vms
    if (grant := state.job.grant) is not None:  # which may have become smaller
        enough = min(enough, grant.total - len(old))
    if enough <= 0:
        _give_up(transition, "the pool has no room for new VMs any more")
        return
    if len(ready) >= enough:
        for vm in old:
            transition.put_vm(replace(vm, successor="arrived"))
        transition.put(replace(transition.state.fleet, move=replace(move, is_cut_over=True)))
        deadline.moved(transition)
        transition.note_fleet_change()
        return
    # Launches that nobody has answered yet may still bring VMs.
    if state.launches.intents:
        return
    refused = move.is_standstill and len(new) == len(ready) == len(state.fleet.vms)
    refused = refused and allocation.next_launch(state).offer is None
    if refused or transition.waited_until(move.since_s + READY_BOUND_S):
        _give_up(transition, f"{len(ready)} of {counted(move.new_vms, 'new VM')} ready")


def _end(transition: Transition, move: Move) -> None:
    """End the move once no old VM is left; undo it if the new ones cannot train."""
    state = transition.state
    old = [vm for vm in state.fleet.vms.values() if vm.successor]
    if not old:
        transition.put(replace(state.fleet, move=None, idle_asked_s=0.0))
        return
    generation, answer = state.training.generation, state.training.answer
    saved = state.newest_checkpoint.step if state.newest_checkpoint else 0
    if generation is None and move.is_far and state.history.progress.step > saved:
        _give_up(transition, "the old VMs could not save what they hold")
        return
    if generation is None or generation.phase is not GenerationPhase.RUNNING:
        return
    stays = any(generation.trains_on(vm.vm_id) for vm in old)
    if stays and answer is not None and answer.plan is None:
        _give_up(transition, answer.why_not)


def _give_up(transition: Transition, reason: str) -> None:
    """Keep the old VMs, and as many new ones as take the places of lost ones near by."""
    state, move = transition.state, transition.state.fleet.move
    assert move is not None
    old = [vm for vm in state.fleet.vms.values() if vm.successor]
    new = [vm for vm in state.fleet.vms.values() if vm.counts]
    new.sort(key=lambda vm: (not vm.is_usable, vm.vm_id))
    staying = [vm for vm in old if vm.phase is not VmPhase.RETURNING]
    kept = 0 if move.is_far and staying else len(move.vm_ids) - len(staying)
    for vm in old:
        transition.put_vm(replace(vm, successor=""))
    over = replace(transition.state.fleet, move=None, idle_asked_s=0.0)
    transition.put(replace(over, move_after_s=state.now_s + PAUSE_S))
    transition.note_fleet_change()
    transition.log(f"not moving to {move.to}: {reason}")
    return_vms(transition, new[max(0, kept) :], "the move was given up")
    deadline.moved(transition)
