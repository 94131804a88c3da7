"""What the spot market may do next, from samples of what it did.

The future is taken to be a shuffle of the markets sampled so far; the present one is
weighted by how long it may last.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.model import Fleet, Holdings, Supply
from spottrain.units import HOUR_S

Array = npt.NDArray[np.float64]

Market = tuple[tuple[float, int], ...]
"""Spot VMs by ascending effective price: (USD per hour, how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketOutlook:
    """Samples of the spot market, one every ``SAMPLE_S``, oldest first."""

    samples: tuple[Market, ...] = ()
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
    seen = market_of(fleet, supplies, holdings)
    return replace(
        outlook,
        samples=(*outlook.samples, seen)[-tuning.MAX_SAMPLES :],
        sampled_at_s=now_s,
    )


def market_of(
    fleet: Fleet, supplies: Sequence[Supply], holdings: Sequence[Holdings]
) -> Market:
    """Return the spot VMs there are, held ones included, as many as the fleet may have."""
    rented = {vms.name: vms.rented for vms in holdings}
    left, rows = fleet.max_vms, list[tuple[float, int]]()
    spot = [supply for supply in supplies if supply.spot]
    for supply in sorted(spot, key=lambda s: s.effective_usd_per_hour(fleet)):
        count = min(left, supply.free(fleet) + rented.get(supply.name, 0))
        if count > 0:
            rows.append((supply.effective_usd_per_hour(fleet), count))
            left -= count
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPath:
    """The cheapest schedule through the expected markets, were they known."""

    usd_per_example: float
    """Price of the most expensive example that is bought; infinite if all VMs together are
    not enough. Rent what is cheaper; what is more expensive can wait."""
    usd: float
    """Cost of the remaining work."""


def spot_path(
    outlook: MarketOutlook,
    present: Market,
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
        outlook: Samples of past markets.
        present: The market now.
        fleet: Throughput by size.
        on_demand: USD per hour of each on-demand VM, ascending; they are in every market.
        examples: Work that is left.
        left_s: Time that is left.
    """
    now_s = min(left_s, tuning.PERSISTENCE_S)
    each_s = (left_s - now_s) / (tuning.PRESENT_WEIGHT + len(outlook.samples))
    now_s += each_s * tuning.PRESENT_WEIGHT
    prices, rates, costs = _past(outlook.samples, fleet, tuple(on_demand))
    done = spent = 0.0  # in the present market alone

    def until(number: int, usd_per_example: float) -> SpotPath:
        past_usd = each_s * float(costs[number])
        rest = examples - done - each_s * float(rates[number])
        return SpotPath(
            usd_per_example=usd_per_example,
            usd=spent + past_usd + max(0.0, rest) * usd_per_example,
        )

    steps: list[list[float]] = _staircase(fleet, tuple(on_demand))(present).tolist()
    for usd, rate in steps:
        below = int(np.searchsorted(prices, usd))
        if done + each_s * rates[below] >= examples:
            break
        if done + each_s * rates[below] + rate * now_s >= examples:
            return until(below, usd)
        done += rate * now_s
        spent += usd * rate * now_s
    if each_s <= 0 or done + each_s * rates[-1] < examples:
        usd = spent + each_s * float(costs[-1])
        return SpotPath(usd_per_example=math.inf, usd=usd)
    number = int(np.searchsorted(rates, (examples - done) / each_s))
    return until(max(0, number - 1), float(prices[max(0, number - 1)]))


@functools.lru_cache(maxsize=8)
def _past(
    samples: tuple[Market, ...], fleet: Fleet, on_demand: tuple[float, ...]
) -> tuple[Array, Array, Array]:
    """Return the steps of all samples, cheapest first: their prices per example, and the
    cumulative sums of rates and of costs per second."""
    staircase = _staircase(fleet, on_demand)
    table = np.concatenate([np.empty((0, 2)), *map(staircase, samples)])
    usd, rate = table[np.argsort(table[:, 0], kind="stable")].T
    rates = np.concatenate([[0.0], np.cumsum(rate)])
    costs = np.concatenate([[0.0], np.cumsum(usd * rate)])
    return usd, rates, costs


@functools.lru_cache(maxsize=8)
def _staircase(fleet: Fleet, on_demand: tuple[float, ...]) -> Callable[[Market], Array]:
    """Return ``stairs`` of a fleet as a cached table."""

    @functools.lru_cache(maxsize=2 * tuning.MAX_SAMPLES)
    def table(seen: Market) -> Array:
        return np.array(stairs(seen, fleet, on_demand)).reshape(-1, 2)

    return table


def stairs(
    seen: Market, fleet: Fleet, on_demand: tuple[float, ...]
) -> tuple[tuple[float, float], ...]:
    """Return each step up in size: (USD per example, examples per second added)."""
    prices = [usd for usd, count in seen for _ in range(count)]
    prices = sorted([*prices, *on_demand])[: fleet.max_vms]
    steps: list[tuple[float, float]] = []
    for few, many in itertools.pairwise(fleet.sizes):
        if many > len(prices):
            break
        rate = fleet.rates[many] - fleet.rates[few]
        usd = sum(prices[few:many]) / HOUR_S / rate
        # Steps are bought in order: one that is cheaper than the one below comes with it.
        steps.append((max(usd, steps[-1][0]) if steps else usd, rate))
    return tuple(steps)
