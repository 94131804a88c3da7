"""What the spot market may do next, from samples of what it did.

The future is taken to be a shuffle of the samples so far; the present one is weighted by how
long it may last. Prices are remembered as they were quoted, and valued by today's hazard
when they are used: else the first loss would make every offer of today look dearer than the
same offer of yesterday, and the job would wait for a price that it already has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.model import Fleet, Holdings, Supply


class SpotQuote(NamedTuple):
    """Spot VMs of one supply at one time."""

    name: str
    """Of the supply."""
    usd_per_hour: float
    """Of one VM, as quoted: what interruptions waste is not in it."""
    vms: int


Sample = tuple[SpotQuote, ...]
"""The spot market at one time: its VMs, held ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketOutlook:
    """Samples of the spot market, one every ``SAMPLE_S``, oldest first."""

    quotes: tuple[Sample, ...] = ()
    sampled_at_s: float | None = None


def observe(
    outlook: MarketOutlook,
    now_s: float,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Sequence[Holdings],
) -> MarketOutlook:
    """Return the outlook with a sample of the market now, if one is due.

    Args:
        outlook: Samples so far.
        now_s: On any clock, the same each time.
        fleet: What the VMs are for.
        supplies: What can be had now.
        holdings: What is rented; it counts as part of the market.
    """
    last_s = outlook.sampled_at_s
    if last_s is not None and now_s - last_s < tuning.SAMPLE_S:
        return outlook
    seen = sample(fleet, supplies, holdings)
    return replace(
        outlook,
        quotes=(*outlook.quotes, seen)[-tuning.MAX_SAMPLES :],
        sampled_at_s=now_s,
    )


def sample(fleet: Fleet, supplies: Sequence[Supply], holdings: Sequence[Holdings]) -> Sample:
    """Return the spot VMs there are, held ones included: ``MAX_QUOTES`` at most, those
    that are cheapest to train on today."""
    rented = {vms.name: vms.rented for vms in holdings}
    spot = [supply for supply in supplies if supply.spot]
    spot.sort(key=lambda supply: supply.effective_usd_per_hour(fleet))
    found = [
        SpotQuote(supply.name, supply.usd_per_hour, min(fleet.max_vms, count))
        for supply in spot
        if (count := supply.free(fleet) + rented.get(supply.name, 0)) > 0
    ]
    return tuple(found[: tuning.MAX_QUOTES])
