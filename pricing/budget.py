"""Arithmetic of a budget. What a fleet may still spend unwatched counts as spent."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0


def cost_usd(usd_per_hour: float, seconds: float) -> float:
    """Return what a rate costs over a time."""
    return usd_per_hour * seconds / HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The caps of a job, and where it stands under them."""

    max_usd: float | None
    max_usd_per_hour: float | None
    spent_usd: float
    rate_usd_per_hour: float
    """Of the fleet, machines that are on their way included."""
    reserve_s: float
    """How long a fleet may run on before anybody stops it."""

    def affords(self, usd_per_hour: float, reserves: int, most: int) -> int:
        """Return how many more machines of this price the caps bear.

        Args:
            usd_per_hour: Price of one.
            reserves: How many times the reserve the budget must bear for the whole
                fleet: more than one leaves something to train with.
            most: The answer is never more.
        """
        if usd_per_hour <= 0:
            return most
        counts = [most]
        if self.max_usd_per_hour is not None:
            left_per_hour = self.max_usd_per_hour - self.rate_usd_per_hour
            counts.append(int(left_per_hour / usd_per_hour + 1e-9))
        if self.max_usd is not None:
            kept = reserves * cost_usd(self.rate_usd_per_hour, self.reserve_s)
            left_usd = self.max_usd - self.spent_usd - kept
            each_usd = reserves * cost_usd(usd_per_hour, self.reserve_s)
            counts.append(int(left_usd / each_usd) if each_usd > 0 else most)
        return max(0, min(counts))
