"""The cheapest way through the markets that an outlook expects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.model import Fleet, Supply
from spottrain.pricing.deadline.outlook import Sample
from spottrain.units import HOUR_S

Array = npt.NDArray[np.float64]

Markets = Array
"""Effective USD per hour of each VM of each sample, ascending; infinite where there is none."""


def markets(samples: Sequence[Sample], fleet: Fleet, supplies: Sequence[Supply]) -> Markets:
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
    share: float | None = None,
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
        share: Of a full fleet's throughput, what spot VMs will train if all are rented; None: as
            much as in the markets that were seen. Where it is less there are none for part of
            the time, where it is more those that a market lacks are there for part of it.
    """
    now_s = min(left_s, tuning.PERSISTENCE_S)
    each_s = (left_s - now_s) / (tuning.PRESENT_WEIGHT + len(seen) - 1)
    lasts_s = np.full(len(seen), each_s)
    lasts_s[-1] = now_s + each_s * tuning.PRESENT_WEIGHT
    if share is not None:
        seen, lasts_s = _with_share(seen, lasts_s, fleet, share)
    prices, rates = stairs(seen, fleet, on_demand)
    there = np.isfinite(prices)
    order = np.argsort(prices[there], kind="stable")
    usd, amounts = prices[there][order], (rates * lasts_s[:, None])[there][order]
    done, costs = np.cumsum(amounts), np.cumsum(usd * amounts)
    last = int(np.searchsorted(done, examples))
    if last == len(done):
        spent = float(costs[-1]) if len(costs) else 0.0
        return SpotPath(usd_per_example=math.inf, usd=spent)
    spare_usd = (done[last] - examples) * usd[last]
    return SpotPath(usd_per_example=float(usd[last]), usd=max(0.0, float(costs[last] - spare_usd)))


def highest_step(fleet: Fleet, on_demand: Sequence[float]) -> float:
    """Return what an example costs of the most expensive step of on-demand VMs alone."""
    usd, _ = stairs(np.empty((1, 0)), fleet, on_demand)
    return float(usd.max(initial=0.0))


def shares(seen: Markets, fleet: Fleet) -> Array:
    """Return what the spot VMs of each market train, as a share of a full fleet."""
    rates = np.array(fleet.rates) / fleet.rates[-1]
    found: Array = rates[np.isfinite(seen).sum(axis=1)]
    return found


def _with_share(seen: Markets, lasts_s: Array, fleet: Fleet, share: float) -> tuple[Markets, Array]:
    """Return the markets, and how long each lasts, with this mean share of a full fleet."""
    mean = float(np.average(shares(seen, fleet), weights=lasts_s)) if lasts_s.sum() > 0 else 0.0
    if share < mean:
        part, other = share / mean, np.full((1, seen.shape[1]), np.inf)
    else:
        part = (1 - share) / (1 - mean) if mean < 1 else 1.0
        lacking = np.full((len(seen), fleet.max_vms - seen.shape[1]), np.inf)
        seen = np.concatenate([seen, lacking], axis=1)
        there = np.isfinite(seen)
        sums, counts = np.where(there, seen, 0.0).sum(axis=1), there.sum(axis=1)
        own = np.where(counts > 0, sums / np.maximum(counts, 1), math.inf)
        other = np.where(there, seen, own[:, None])
    rest_s = lasts_s * (1 - part)
    both = np.concatenate([seen, other])
    return both, np.concatenate([lasts_s * part, rest_s if len(other) > 1 else [rest_s.sum()]])


def stairs(seen: Markets, fleet: Fleet, on_demand: Sequence[float]) -> tuple[Array, Array]:
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
