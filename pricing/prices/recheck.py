"""The last check of prices before money is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spottrain.cloud.port.facts import with_attached
from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.catalogue import Catalogue, InstanceType
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.prices.price import Price, fresh
from spottrain.pricing.prices.refresh import (
    PriceRequest,
    PriceSource,
    answered_s,
    known,
    refresh,
)

LIVE_S = 60.0
"""A price that was queried so recently counts as checked."""


def check_live(
    wanted: Sequence[Offer],
    sources: Sequence[PriceSource],
    history: History,
    facts: Catalogue,
    now_s: float,
) -> tuple[list[Offer], tuple[str, ...]]:
    """Query the prices of the few offers that are about to be rented again.

    Where a cloud does not answer, its last known prices are used until they are too old.

    Args:
        wanted: Few: each cloud is queried for their types and regions alone.
        sources: Price APIs; those of other clouds are not queried.
        history: Known prices, to which the answers are added.
        facts: The catalogue of machines.
        now_s: Seconds since the epoch.

    Returns:
        The offers at today's prices, in the given order, without those that the cloud no
        longer lists, without a discount, or with too old a price; and a line of warning
        for each offer left out.
    """
    kinds = {
        (offer.cloud, offer.instance_type): kind
        for offer in wanted
        if (kind := facts.find(offer.cloud, offer.instance_type)) is not None
    }
    warnings = _ask(wanted, list(kinds.values()), sources, history, facts, now_s)
    believed = known(history, facts, PriceRequest(kinds=kinds.values()), now_s)
    prices = fresh(believed.prices, now_s).prices
    listed = {
        (price.cloud, price.zone, price.instance_type, price.spot): price
        for price in prices
        if not _withdrawn(price, sources, history, facts, now_s)
    }
    checked = []
    for offer in wanted:
        zones = (offer.zone, offer.region)
        keys = [(offer.cloud, z, offer.instance_type, offer.spot) for z in zones]
        price = listed.get(keys[0]) or listed.get(keys[1])
        if price is None:
            warnings.append(f"{offer_key(offer)}: no price to rent by; left out")
            continue
        machine = replace(offer, usd_per_hour=price.usd_per_hour, observed_at_s=price.seen_s)
        checked.append(with_attached(machine, offer.attached_usd_per_hour))
    return checked, tuple(warnings)


def _ask(
    wanted: Sequence[Offer],
    kinds: Sequence[InstanceType],
    sources: Sequence[PriceSource],
    history: History,
    facts: Catalogue,
    now_s: float,
) -> list[str]:
    """Query each cloud for the types and regions that are wanted there."""
    warnings: list[str] = []
    for cloud in dict.fromkeys(offer.cloud for offer in wanted):
        request = PriceRequest(
            kinds=[kind for kind in kinds if kind.cloud == cloud],
            regions=sorted({o.region for o in wanted if o.cloud == cloud}),
        )
        answers = refresh(sources, history, facts, request, now_s, ttl_s=LIVE_S)
        warnings += answers.warnings
        warnings += [f"{c}: not refreshed: {why}" for c, why in answers.failures.items()]
    return warnings


def _withdrawn(
    price: Price,
    sources: Sequence[PriceSource],
    history: History,
    facts: Catalogue,
    now_s: float,
) -> bool:
    """Return whether the cloud answered just now without this price."""
    kind = facts.find(price.cloud, price.instance_type)
    if kind is None or price.seen_s >= now_s - LIVE_S:
        return False
    answers = (
        answered_s(source, history, kind, price.region)
        for source in sources
        if source.cloud == price.cloud and price.spot in source.markets
    )
    return any(at_s is not None and at_s >= now_s - LIVE_S for at_s in answers)
