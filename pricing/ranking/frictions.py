"""Frictions: what moves and interruptions cost, and throughput with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spottrain.pricing.billing.money import is_amount
from spottrain.pricing.billing.terms import CLOUD_USD_PER_GB
from spottrain.pricing.prices.place import Place
from spottrain.units import GB_BYTES, HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """Price and throughput of training in one place now."""

    place: Place
    usd_per_hour: float
    """Of all machines that ``examples_per_s`` needs."""
    examples_per_s: float
    """Without interruptions; more than 0."""
    losses_per_hour: float = 0.0
    """Expected interruptions."""

    @property
    def is_sound(self) -> bool:
        """Return whether its numbers are finite, so that it can be compared."""
        numbers = self.usd_per_hour, self.examples_per_s, self.losses_per_hour
        return all(map(is_amount, numbers)) and self.examples_per_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frictions:
    """Costs of moves and interruptions; all zero in Narayanan's dissertation."""

    boot_s: float = 0.0
    """From paying for new machines to training on them."""
    lost_s: float = 0.0
    """Training time repeated after an interruption."""
    move_s: float = 0.0
    """Training time done again, or paused, in a planned move."""
    checkpoint_bytes: float = 0.0
    dataset_bytes: float = 0.0
    """Fetched once into each cloud that has no copy yet."""
    zone_usd_per_gb: float = 0.01
    region_usd_per_gb: float = 0.02
    cloud_usd_per_gb: float = CLOUD_USD_PER_GB
    """Egress out of a zone, a region, a cloud; coming in is free."""

    def checkpoint_usd(self, here: Place, there: Place) -> float:
        """Return the cost of moving the newest checkpoint."""
        if here.cloud != there.cloud:
            usd_per_gb = self.cloud_usd_per_gb
        elif here.region != there.region:
            usd_per_gb = self.region_usd_per_gb
        else:
            usd_per_gb = self.zone_usd_per_gb * (here.zone != there.zone)
        return self.checkpoint_bytes / GB_BYTES * usd_per_gb

    def dataset_usd(self, cloud: str, copies: Collection[str]) -> float:
        """Return the cost of fetching the dataset, 0 where there is a copy.

        Args:
            cloud: Where it is needed.
            copies: Clouds that hold it.
        """
        if cloud in copies:
            return 0.0
        return self.dataset_bytes / GB_BYTES * self.cloud_usd_per_gb

    def throughput(self, quote: Quote) -> float:
        """Return the expected examples per hour, interruptions included.

        They waste the work done again and the boot of replacements.
        """
        wasted = quote.losses_per_hour * (self.boot_s + self.lost_s) / HOUR_S
        return quote.examples_per_s * HOUR_S / (1.0 + wasted)

    def usd_per_example(self, quote: Quote) -> float:
        """Return the cost of an example, interruptions included, moves not."""
        return quote.usd_per_hour / self.throughput(quote)


NO_FRICTIONS = Frictions()
"""As in the dissertation."""
