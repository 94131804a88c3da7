"""Compares offers: the most training for a dollar first."""

from __future__ import annotations

from spottrain.cloud.provider import Offer


def offer_key(offer: Offer) -> str:
    """Return what makes two sightings the same offer at different prices."""
    market = "spot" if offer.spot else "on-demand"
    place = f"{offer.cloud}/{offer.region}/{offer.zone}"
    return f"{place}/{offer.instance_type}/{market}"


def preference(offer: Offer) -> tuple[bool, float, str]:
    """Return a key that sorts the best offer first.

    Spot before on demand, then by the price of a unit of work: dollars per hour over
    GPUs times their speed.
    """
    work = max(offer.gpus * offer.gpu_speed, 1e-9)
    return not offer.spot, offer.usd_per_hour / work, offer_key(offer)
