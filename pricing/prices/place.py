"""Places: what an offer is and where, without its price."""

from __future__ import annotations

from typing import NamedTuple

from spottrain.cloud.port.provider import Offer


class Site(NamedTuple):
    """Where a machine is, as far as data transfer is concerned."""

    cloud: str
    region: str
    zone: str


class Place(NamedTuple):
    """Where a machine is and of which type; prices differ by it."""

    cloud: str
    region: str
    zone: str
    instance_type: str

    @property
    def site(self) -> Site:
        """Return where it is."""
        return Site(self.cloud, self.region, self.zone)


def place_of(offer: Offer) -> Place:
    """Return the place of an offer."""
    return Place(offer.cloud, offer.region, offer.zone, offer.instance_type)


def offer_key(offer: Offer) -> str:
    """Return what identifies an offer whatever its price: place and market."""
    market = "spot" if offer.spot else "on-demand"
    return f"{'/'.join(place_of(offer))}/{market}"
