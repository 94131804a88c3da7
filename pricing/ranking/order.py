"""The order in which to rent offers: by examples per dollar, as far as that is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.place import offer_key

FREE_USD = 1e-9
"""What an hour of a free machine is taken to cost, so that the faster of two comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferWorth:
    """Examples per dollar of an offer, as ``ranking.rank`` found."""

    offer: str
    """See ``offer_key``."""
    examples_per_usd: float
    """Interruptions counted; 0 where the job cannot run on it."""
    usd_per_hour: float
    """The price of one machine at which that holds; at least ``FREE_USD``."""

    def at(self, usd_per_hour: float) -> float:
        """Return examples per dollar at another price, to which they are inverse."""
        return self.examples_per_usd * self.usd_per_hour / max(usd_per_hour, FREE_USD)


def in_order(offers: Iterable[Offer], worths: Mapping[str, OfferWorth]) -> tuple[Offer, ...]:
    """Return offers in the order in which to rent them, at the prices of now.

    By examples per dollar. Where no offer is known to train anything: spot before on
    demand, then by the price of a unit of work. Offers that the job cannot run on are left
    out unless there is nothing else: trying them then shows why.

    Args:
        offers: What can be rented.
        worths: By ``offer_key``, as far as known.
    """
    value = {
        key: worths[key].at(offer.usd_per_hour)
        for offer in offers
        if (key := offer_key(offer)) in worths
    }
    if not any(value.values()):
        return tuple(sorted(offers, key=preference))
    usable = [o for o in offers if value.get(offer_key(o), math.nan) != 0]
    return tuple(
        sorted(
            usable,
            key=lambda o: (
                offer_key(o) not in value,
                -value.get(offer_key(o), 0.0),
                preference(o),
            ),
        )
    )


def preference(offer: Offer) -> tuple[bool, float, str]:
    """Return a key that sorts offers of which nothing is known, the best first.

    Spot before on demand, then by the price of a unit of work: dollars per hour over
    GPUs times their speed.
    """
    work = max(offer.gpus * offer.gpu_speed, 1e-9)
    return not offer.spot, offer.usd_per_hour / work, offer_key(offer)
