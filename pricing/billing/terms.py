"""How clouds bill VMs and data that leaves them: list terms. Sources: docs/budget.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from spottrain.units import HOUR_S

_S = 1_000_000
CLOUD_USD_PER_GB = 0.09
"""List price of a gigabyte from one cloud to another: AWS to the internet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BillingTerms:
    """How a cloud bills."""

    unit_us: int = 1
    """Billed time is rounded up to a multiple of it."""
    min_us: int = 0
    """Shortest time that is billed."""
    follows_market: bool = False
    """Spot VMs are billed at the market price of each moment, as far as it was seen; else at
    the price of their launch."""
    zone_usd_per_gb: float = 0.0
    """List price of a gigabyte from one zone to another, both ends together."""
    region_usd_per_gb: float = 0.0
    """The same from one region to another."""

    def next_end_s(self, from_s: float, now_s: float, *, is_whole: bool) -> float:
        """Return the first moment from now on at which a bill in two parts is as one.

        The first part is paid in full until then, and the second needs no shortest time.

        Args:
            from_s: When the first part began. Seconds since the epoch.
            is_whole: That is when the machine was rented, so its shortest time counts.
        """
        lived_us = max(0, round((now_s - from_s) * _S))
        if is_whole:
            lived_us = max(lived_us, self.min_us)
        return from_s + -(-lived_us // self.unit_us) * self.unit_us / _S

    def unused_s(self, ends_per_hour: float) -> float:
        """Return the seconds that are billed beyond a VM's life, on the average.

        Lives end at a constant rate; half a unit is rounded up.
        """
        least_s, ends_per_s = self.min_us / _S, ends_per_hour / HOUR_S
        if ends_per_s <= 0:
            return self.unit_us / _S / 2
        short_s = least_s + math.expm1(-ends_per_s * least_s) / ends_per_s
        return self.unit_us / _S / 2 + short_s

    def billed_s(self, seconds: float) -> float:
        """Return what is billed of a life, rounding aside."""
        return max(seconds, self.min_us / _S)


EXACT = BillingTerms()
"""By the microsecond, at the price of the launch, as the local cloud bills."""
TERMS: Mapping[str, BillingTerms] = {
    "aws": BillingTerms(
        unit_us=_S,
        min_us=60 * _S,
        follows_market=True,
        zone_usd_per_gb=0.02,
        region_usd_per_gb=0.02,
    ),
    "gcp": BillingTerms(
        unit_us=_S,
        min_us=60 * _S,
        follows_market=True,
        zone_usd_per_gb=0.01,
        region_usd_per_gb=0.02,
    ),
    "azure": BillingTerms(
        unit_us=60 * _S, min_us=60 * _S, follows_market=True, region_usd_per_gb=0.02
    ),
}
"""By cloud; any other bills exactly."""
