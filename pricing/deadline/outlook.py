"""What the spot market may do next, from samples of what it did.

The future is taken to be a shuffle of the samples so far; the present one is weighted by how
long it may last. Prices are remembered as they were quoted, and valued by today's hazard
when they are used: else the first loss would make every offer of today look dearer than the
same offer of yesterday, and the job would wait for a price that it already has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.model import Fleet, Holdings, Supply
from spottrain.units import HOUR_S

Array = npt.NDArray[np.float64]


class SpotQuote(NamedTuple):
    """Spot VMs of one supply at one time."""

    name: str
    """Of the supply."""
    usd_per_hour: float
    """Of one VM, as quoted: what interruptions waste is not in it."""
    vms: int


Sample = tuple[SpotQuote, ...]
"""The spot market at one time: its VMs, held ones included."""

Markets = Array
"""Effective USD per hour of each VM of each sample, ascending; infinite where there is none."""


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


def sample(
    fleet: Fleet, supplies: Sequence[Supply], holdings: Sequence[Holdings]
) -> Sample:
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


def markets(
    samples: Sequence[Sample], fleet: Fleet, supplies: Sequence[Supply]
) -> Markets:
    """Return what VMs cost in each sample, valued by today's interruptions.

    A supply that is not listed today counts with the most interruptions of any that is.
    """
    wastes = {supply.name: supply.waste(fleet) for supply in supplies if supply.spot}
    most = max(wastes.values(), default=0.0)
    quotes = [quote for seen in samples for quote in seen]
    usd = [quote.usd_per_hour * (1 + wastes.get(quote.name, most)) for quote in quotes]
    vms = np.array([quote.vms for quote in quotes], dtype=int)
    rows = np.repeat(np.arange(len(samples)), [len(seen) for seen in samples])
    counts = np.bincount(rows, weights=vms, minlength=len(samples))
    there = np.arange(max(counts, default=0)) < counts[:, None]
    prices = np.full(there.shape, np.inf)
    prices[there] = np.repeat(usd, vms)
    prices.sort(axis=1)
    return prices[:, : fleet.max_vms]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPath:
    """The cheapest schedule through the expected markets, were they known."""

    usd_per_example: float
    """Price of the most expensive example that is bought; infinite if all VMs together are
    not enough. Rent what is cheaper; what is more expensive can wait."""
    usd: float
    """Cost of the remaining work."""


def spot_path(
    seen: Markets,
    fleet: Fleet,
    on_demand: Sequence[float],
    examples: float,
    left_s: float,
) -> SpotPath:
    """Return the cheapest way to train the examples in the time left, and their value.

    Every market is a staircase: each larger size of the fleet adds examples per second at
    a price. The steps of all markets are bought, cheapest first, until the work is done: a
    fractional knapsack, exact if markets come as expected and changes are free.

    Args:
        seen: Past markets, and the present one last.
        fleet: Throughput by size.
        on_demand: USD per hour of each on-demand VM, ascending; they are in every market.
        examples: Work that is left.
        left_s: Time that is left.
    """
    now_s = min(left_s, tuning.PERSISTENCE_S)
    each_s = (left_s - now_s) / (tuning.PRESENT_WEIGHT + len(seen) - 1)
    lasts_s = np.full((len(seen), 1), each_s)
    lasts_s[-1] = now_s + each_s * tuning.PRESENT_WEIGHT
    prices, rates = stairs(seen, fleet, on_demand)
    there = np.isfinite(prices)
    order = np.argsort(prices[there], kind="stable")
    usd, amounts = prices[there][order], (rates * lasts_s)[there][order]
    done, costs = np.cumsum(amounts), np.cumsum(usd * amounts)
    last = int(np.searchsorted(done, examples))
    if last == len(done):
        spent = float(costs[-1]) if len(costs) else 0.0
        return SpotPath(usd_per_example=math.inf, usd=spent)
    spare_usd = (done[last] - examples) * usd[last]
    return SpotPath(
        usd_per_example=float(usd[last]), usd=max(0.0, float(costs[last] - spare_usd))
    )


def stairs(
    seen: Markets, fleet: Fleet, on_demand: Sequence[float]
) -> tuple[Array, Array]:
    """Return each step up in size: USD per example, by market and step, and the examples
    per second that it adds, by step. It costs infinitely much where VMs are lacking."""
    always = np.tile(np.array(on_demand, dtype=float), (len(seen), 1))
    prices = np.sort(np.concatenate([seen, always], axis=1), axis=1)
    sizes = np.array([size for size in fleet.sizes if size <= prices.shape[1]])
    rates = np.diff(np.array(fleet.rates)[sizes])
    steps = np.add.reduceat(prices[:, : sizes[-1]], sizes[:-1], axis=1)
    # Steps are bought in order: one that is cheaper than the one below comes with it.
    usd = np.maximum.accumulate(steps / HOUR_S / rates, axis=1)
    return usd, rates
