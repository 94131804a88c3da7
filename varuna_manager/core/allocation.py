"""What to rent next: what trains most for a dollar first, within every cap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.billing import egress
from spottrain.pricing.deadline.model import Holdings
from spottrain.pricing.ranking import cooldowns
from spottrain.pricing.ranking.order import in_order, offer_key
from spottrain.varuna_manager.core.model.commands import IntendLaunch
from spottrain.varuna_manager.core.model.records import VmRecord
from spottrain.varuna_manager.core.model.state import State, budget
from spottrain.varuna_manager.core.model.transition import Transition

OFFER_LAG_S = 10.0
"""How long an offer's count may lag behind the VMs that we took from it."""


def next_intent(state: State) -> str:
    """Return the name that the next launch intent will bear."""
    moved = f"{state.takeover_epoch}-" if state.takeover_epoch else ""
    return f"intent-{moved}{state.next_intent}"


CHEAPER = 0.1
"""How much cheaper an offer has to be than when there were VMs enough for more to pay."""


def cheapest_usd_per_hour(state: State) -> float:
    """Return the least price among the offers; infinite if there are none."""
    return min((offer.usd_per_hour for offer in state.offers), default=math.inf)


def room(state: State) -> int:
    """Return how many more VMs may be asked for; see ``VmRecord.counts``."""
    enough, most = state.enough, state.most_vms
    if enough is not None:
        limit_usd_per_hour = (1 - CHEAPER) * enough.usd_per_hour
        if cheapest_usd_per_hour(state) >= limit_usd_per_hour:
            most = min(most, enough.vms)
    return most - _count(state)


def _count(state: State) -> int:
    """Return how many VMs there are that count, those on their way included."""
    coming = sum(intent.count - intent.arrived for intent in state.intents.values())
    return coming + sum(vm.counts for vm in state.vms.values())


def launch_more(transition: Transition) -> None:
    """Wish for one launch: as many VMs of the best offer as every cap allows."""
    state = transition.state
    wanted = room(state)
    done = state.generation is not None and state.generation.done
    if wanted <= 0 or done or not state.reconciled or state.launch_pending:
        return
    offer, count = best_offer(transition, wanted)
    if offer is None:
        return
    intent = next_intent(state)
    transition.state = replace(state, launch_pending=True)
    transition.emit(
        IntendLaunch(
            intent=intent,
            token=f"{state.job.uid}-{intent}",
            offer=offer,
            count=count,
        )
    )


def best_offer(
    transition: Transition, wanted: int, instead_of: VmRecord | None = None
) -> tuple[Offer | None, int]:
    """Return what to rent next and how many of up to ``wanted``; None if nothing.

    Args:
        transition: The core's.
        wanted: VMs at the most.
        instead_of: A VM that is to go once there is another one.
    """
    state = transition.state
    borne, lacks = affordable(state), lacking(state, instead_of)
    free: dict[str, tuple[Offer, int]] = {}
    for offer in in_order(state.offers, state.worths):
        count = min(wanted, available(transition, offer), borne(offer), lacks(offer))
        if count > 0:
            free[offer_key(offer)] = offer, count
    near = _near(state, [offer for offer, _ in free.values()])
    if not near:
        return None, 0
    count = free[offer_key(near[0])][1]
    offer, count = cooldowns.spread(near[0], near, _held_by_zone(state), count)
    return offer, min(count, free[offer_key(offer)][1])


def held(state: State) -> tuple[Holdings, ...]:
    """Return what is rented, or asked for, by offer."""
    ready: Counter[str] = Counter()
    booting: Counter[str] = Counter()
    for vm in state.vms.values():
        if vm.counts:
            (ready if vm.is_usable else booting)[offer_key(vm.offer)] += 1
    for intent in state.intents.values():
        booting[offer_key(intent.offer)] += intent.count - intent.arrived
    return tuple(
        Holdings(name=name, ready=ready[name], booting=booting[name])
        for name in sorted({*ready, *booting})
    )


def lacking(state: State, instead_of: VmRecord | None = None) -> Callable[[Offer], int]:
    """Return what tells how many more VMs of an offer the job's promise wants.

    Before it is known what VMs do, none on demand but to begin with.
    """
    have = {one.name: one.ready + one.booting for one in held(state)}
    if instead_of is not None and instead_of.counts:
        have[offer_key(instead_of.offer)] -= 1
    decision = state.deadline.decision
    if decision is not None:
        wanted = dict(decision.wanted)
        return lambda offer: wanted.get(key := offer_key(offer), 0) - have.get(key, 0)
    first = state.job.min_vms - sum(have.values())
    has_slo, most = state.job.has_slo, state.job.max_vms
    return lambda offer: first if has_slo and not offer.spot else most


def is_open(transition: Transition, offer: Offer) -> bool:
    """Return whether the job may ask for an offer now."""
    unwanted = not offer.spot and not transition.state.job.allow_on_demand
    return not unwanted and transition.is_due(
        cooldowns.open_at_s(transition.state.cooldowns, offer)
    )


def may_elsewhere(transition: Transition, cloud: str) -> bool:
    """Return whether the job may ask another cloud than ``cloud`` now."""
    return any(
        o.cloud != cloud and is_open(transition, o) for o in transition.state.offers
    )


def home(state: State) -> tuple[str, ...] | None:
    """Return the place where VMs train together (``place_of``); None if there is none."""
    staying = [vm.offer for vm in state.vms.values() if vm.counts]
    coming = [intent.offer for intent in state.intents.values()]
    return cooldowns.home_of([*staying, *coming], state.job.span)


def is_at(state: State, where: tuple[str, ...] | None, offer: Offer) -> bool:
    """Return whether VMs of an offer can train with those at ``where``."""
    return where is None or cooldowns.place_of(offer, state.job.span) == where


def at_home(state: State) -> tuple[VmRecord, ...]:
    """Return the VMs that can train together."""
    where = home(state)
    return tuple(vm for vm in state.vms.values() if is_at(state, where, vm.offer))


def stranded_vms(transition: Transition) -> tuple[VmRecord, ...]:
    """Return VMs that cannot train with the others, once those are enough.

    Where they are too few in each place and there is room for no more, only those stay
    that are where more can be had.
    """
    state, where = transition.state, home(transition.state)
    here = at_home(state)
    if sum(vm.is_usable for vm in here) < state.job.min_vms:
        enough = sum(vm.counts for vm in here) >= state.job.min_vms
        if enough or state.intents or room(state) > 0:
            return ()
        best = in_order(state.offers, state.worths)
        giving = (offer for offer in best if available(transition, offer) > 0)
        if (offer := next(giving, None)) is None:
            return ()
        where = cooldowns.place_of(offer, state.job.span)
    return tuple(
        vm
        for vm in state.vms.values()
        if vm.counts and not is_at(state, where, vm.offer)
    )


def _near(state: State, offers: list[Offer]) -> list[Offer]:
    """Return the offers where the other VMs are. Where there are none, and too few VMs
    to train, all others: the job moves."""
    where = home(state)
    near = [offer for offer in offers if is_at(state, where, offer)]
    here = sum(vm.counts for vm in at_home(state)) + sum(
        intent.count - intent.arrived
        for intent in state.intents.values()
        if is_at(state, where, intent.offer)
    )
    return near if near or here >= state.job.min_vms else offers


def _held_by_zone(state: State) -> Counter[str]:
    held = Counter(vm.offer.zone for vm in state.vms.values() if vm.counts)
    for intent in state.intents.values():
        held[intent.offer.zone] += intent.count - intent.arrived
    return held


def available(transition: Transition, offer: Offer) -> int:
    """How many machines the market may have for us."""
    state, key = transition.state, offer_key(offer)
    if offer.gpus < 1 or offer.gpu_speed <= 0 or not is_open(transition, offer):
        return 0
    if offer.available is None:
        return state.job.max_vms
    asked = sum(
        intent.count
        for intent in state.intents.values()
        if offer_key(intent.offer) == key
    )
    taken = sum(
        not transition.is_due(vm.known_at_s + OFFER_LAG_S)
        for vm in state.vms.values()
        if offer_key(vm.offer) == key and vm.known_at_s > state.offers_seen_at_s
    )
    return offer.available - asked - taken


def affordable(state: State) -> Callable[[Offer], int]:
    """Return what tells how many more VMs of an offer the hourly cap and the budget bear.

    None where they would be too few to train with what there is: they would only cost.
    """
    money, job = budget(state), state.job
    lack = job.min_vms - _count(state)

    def borne(offer: Offer) -> int:
        fetched = egress.fetched(job.data_bytes, offer.cloud)
        vms = money.affords(offer.usd_per_hour, job.max_vms, fetched)
        return vms if vms >= lack else 0

    return borne
