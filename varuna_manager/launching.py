"""What to rent next: the cheapest offers first, within every cap."""

from __future__ import annotations

import math
from dataclasses import replace

from spottrain.cloud.provider import Offer
from spottrain.pricing.offers import offer_key, preference
from spottrain.varuna_manager.commands import IntendLaunch
from spottrain.varuna_manager.state import State, budget
from spottrain.varuna_manager.turn import Turn

LEASES_KEPT = 2
"""A VM is rented only if the budget bears the fleet for so many leases: one is kept back
for a manager that dies, the others are there to train."""
OFFER_LAG_S = 10.0
"""How long an offer's count may lag behind the VMs that we took from it."""


def next_intent(state: State) -> str:
    """Return the name that the next launch intent will bear."""
    return f"intent-{state.next_intent}"


CHEAPER = 0.1
"""How much cheaper an offer has to be than when there were VMs enough for more to pay."""


def cheapest_usd_per_hour(state: State) -> float:
    """Return the least price among the offers; infinite if there are none."""
    return min((offer.usd_per_hour for offer in state.offers), default=math.inf)


def room(state: State) -> int:
    """Return how many more VMs may be asked for; see ``VmRecord.counts``."""
    staying = sum(vm.counts for vm in state.vms.values())
    coming = sum(intent.count - intent.arrived for intent in state.intents.values())
    enough, most = state.enough, state.job.max_vms
    if enough is not None:
        limit_usd_per_hour = (1 - CHEAPER) * enough.usd_per_hour
        if cheapest_usd_per_hour(state) >= limit_usd_per_hour:
            most = min(most, enough.vms)
    return most - staying - coming


def launch_more(turn: Turn) -> None:
    """Wish for one launch: as many VMs of the best offer as every cap allows."""
    state = turn.state
    wanted = room(state)
    done = state.generation is not None and state.generation.done
    if wanted <= 0 or done or not state.reconciled or state.launch_wished:
        return
    offer, count = best_offer(turn, wanted)
    if offer is None:
        return
    intent = next_intent(state)
    turn.state = replace(state, launch_wished=True)
    turn.do(
        IntendLaunch(
            intent=intent,
            token=f"{state.job.uid}-{intent}",
            offer=offer,
            count=count,
        )
    )


def best_offer(turn: Turn, wanted: int) -> tuple[Offer | None, int]:
    """Return what to rent next and how many of up to ``wanted``; None if nothing."""
    for offer in sorted(turn.state.offers, key=preference):
        count = min(wanted, _available(turn, offer), affordable(turn.state, offer))
        if count > 0:
            return offer, count
    return None, 0


def _available(turn: Turn, offer: Offer) -> int:
    """How many machines the market may have for us."""
    state, key = turn.state, offer_key(offer)
    unwanted = not offer.spot and not state.job.allow_on_demand
    if unwanted or offer.gpus < 1 or offer.gpu_speed <= 0:
        return 0
    if not turn.due(state.cooldowns.get(key, 0.0)):
        return 0
    if offer.available is None:
        return state.job.max_vms
    asked = sum(
        intent.count
        for intent in state.intents.values()
        if offer_key(intent.offer) == key
    )
    taken = sum(
        not turn.due(vm.known_at_s + OFFER_LAG_S)
        for vm in state.vms.values()
        if offer_key(vm.offer) == key and vm.known_at_s > state.offers_seen_at_s
    )
    return offer.available - asked - taken


def affordable(state: State, offer: Offer) -> int:
    """Return how many VMs of ``offer`` the hourly cap and the budget still bear."""
    return budget(state).affords(offer.usd_per_hour, LEASES_KEPT, state.job.max_vms)
