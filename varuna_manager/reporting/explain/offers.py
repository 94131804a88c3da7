"""Why an offer was rented and others were not, from what the journal knows of the market.

What was decided is in the journal, and so are the prices, the ranking and the refusals by
which it was; nothing is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.ranking.order import in_order
from spottrain.varuna_manager.core import allocation
from spottrain.varuna_manager.core.model.state import State, budget
from spottrain.varuna_manager.format import clock

SHOWN = 5
"""Offers that are named beside the one that was rented."""


def offer_name(offer: Offer) -> str:
    """Return an offer for people."""
    market = "spot" if offer.spot else "on demand"
    return (
        f"{offer.instance_type} in {offer.zone}, {market}, ${offer.usd_per_hour:g}/hour"
    )


def why_rented(state: State, offer: Offer, count: int) -> Iterator[str]:
    """Yield why an offer was rented, and what others would have cost.

    Args:
        state: In which it was asked for.
        offer: As it was asked for.
        count: Number of VMs.
    """
    yield f"rent {count} x {offer_name(offer)}{_worth(state, offer)}"
    ranked = any(state.worths[key].examples_per_usd for key in state.worths)
    rule = (
        "most examples per dollar first, interruptions counted"
        if ranked
        else "nothing is known of their worth yet: spot first, then by price of a slot"
    )
    yield f"rule: {rule}; evenly over zones whose prices differ little"
    order = in_order(state.offers, state.worths)
    key = offer_key(offer)
    place = next((at for at, one in enumerate(order) if offer_key(one) == key), 0)
    others = [one for one in order if offer_key(one) != key]
    for one in others[:SHOWN]:
        ahead = order.index(one) < place
        why = _why_not(state, one)
        if not why:
            why = "chosen by spread, location or caps" if ahead else "ranked lower"
        yield f"not {offer_name(one)}{_worth(state, one)}: {why}"
    if len(others) > SHOWN:
        yield f"and {len(others) - SHOWN} more offers"


def why_not_renting(state: State) -> Iterator[str]:
    """Yield why no more VMs are rented now."""
    room = allocation.room(state)
    if room <= 0:
        if state.enough is not None:
            yield (
                f"rents no more: {state.enough.vms} VMs are enough for the plan until "
                f"prices fall {allocation.CHEAPER:.0%} below ${state.enough.usd_per_hour:g}"
            )
        return
    yield f"room for {room} more VMs of {state.most_vms}"
    for one in in_order(state.offers, state.worths)[:SHOWN]:
        if why := _why_not(state, one):
            yield f"not {offer_name(one)}: {why}"


def _worth(state: State, offer: Offer) -> str:
    worth = state.worths.get(offer_key(offer))
    if worth is None:
        return ""
    return f", {worth.at(offer.usd_per_hour):,.0f} examples per dollar"


def _why_not(state: State, offer: Offer) -> str:
    """Return what keeps the job from renting an offer; empty: nothing is known of it."""
    opens_s = allocation.opens_at_s(state, offer)
    if not offer.spot and not state.job.allow_on_demand:
        return "on-demand VMs are not allowed"
    if math.isinf(opens_s) and opens_s > 0:
        return "its VMs cannot run the job"
    if opens_s > state.now_s:
        return f"refused lately, asked again from {clock(opens_s)}"
    if (found := allocation.available(state, offer)) <= 0:
        return f"the cloud has none left ({max(found, 0)} available)"
    if allocation.affordable(state)(offer) <= 0:
        return _cap(state)
    if allocation.wanted_by_deadline(state)(offer) <= 0:
        return "not wanted by the deadline policy"
    if not allocation.is_at(state, allocation.home(state), offer):
        return "too far from the VMs that train"
    return ""


def _cap(state: State) -> str:
    """Return which cap an offer exceeds."""
    money, job = budget(state), state.job
    left = f"${money.spent.usd:.2f} spent at ${money.rate.usd_per_hour:g}/hour"
    caps = []
    if job.max_usd is not None:
        caps.append(f"${job.max_usd:g}")
    if job.max_usd_per_hour is not None:
        caps.append(f"${job.max_usd_per_hour:g}/hour")
    return f"over the cap of {' and '.join(caps) or 'the budget'} ({left})"
