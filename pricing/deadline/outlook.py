"""What the spot market may do next, from what it has done: pure, and small enough for state.

The future is taken for a shuffle of the markets seen so far, the present one weighed with
how long it may last.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from spottrain.pricing.deadline.model import (
    Fleet,
    Supply,
)
from spottrain.units import HOUR_S

SAMPLE_S = 900.0
"""Time between two looks that are kept."""
KEPT = 192
"""Looks that are kept: two days."""
PERSISTS_S = 3600.0
"""For so long the market is expected to stay as it is."""
PRIOR_LOOKS = 4
"""The present market counts for so many looks at those to come."""

Array = npt.NDArray[np.float64]

Market = tuple[tuple[float, int], ...]
"""Spot VMs by ascending effective price: (USD per hour, how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketOutlook:
    """Spot markets as they were, a look every ``SAMPLE_S``."""

    looks: tuple[Market, ...] = ()
    looked_at_s: float | None = None


def observe(
    outlook: MarketOutlook,
    now_s: float,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Mapping[str, int],
) -> MarketOutlook:
    """Return the outlook after another look at the market, if one is due.

    Args:
        outlook: As it was.
        now_s: On any clock that always is the same.
        fleet: What is rented for.
        supplies: What can be had now.
        holdings: VMs by supply that are rented and could be had too.
    """
    last_s = outlook.looked_at_s
    if last_s is not None and now_s - last_s < SAMPLE_S:
        return outlook
    seen = market_of(fleet, supplies, holdings)
    return replace(outlook, looks=(*outlook.looks, seen)[-KEPT:], looked_at_s=now_s)


def market_of(
    fleet: Fleet, supplies: Sequence[Supply], holdings: Mapping[str, int]
) -> Market:
    """Return the spot VMs that there are, by what an hour's training on them costs."""
    left, rows = fleet.most, list[tuple[float, int]]()
    spot = [supply for supply in supplies if supply.spot]
    for supply in sorted(spot, key=lambda s: s.effective_usd_per_hour(fleet)):
        free = fleet.most if supply.available is None else supply.available
        count = min(left, free + holdings.get(supply.name, 0))
        if count > 0:
            rows.append((supply.effective_usd_per_hour(fleet), count))
            left -= count
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPath:
    """The cheapest way through the markets expected, if they were known."""

    usd_per_example: float
    """The dearest example that still is bought; infinite if all that can be had is not
    enough. Whatever is cheaper is worth renting, what is dearer can wait."""
    usd: float
    """What the rest costs."""


def spot_path(
    outlook: MarketOutlook,
    present: Market,
    fleet: Fleet,
    on_demand: Sequence[float],
    examples: float,
    left_s: float,
) -> SpotPath:
    """Return what examples are worth, given the time that is left for them.

    Every market is a staircase: each further size of the fleet adds examples per second at
    a price. All steps of all markets, cheapest first, until the work is done: a fractional
    knapsack, exact if the markets come as expected and changes are free.

    Args:
        outlook: Markets that have been.
        present: The market now.
        fleet: Sizes and what they train.
        on_demand: USD per hour of each VM on demand, ascending; they are in every market.
        examples: Left to do.
        left_s: To do them in.
    """
    now_s = min(left_s, PERSISTS_S)
    each_s = (left_s - now_s) / (PRIOR_LOOKS + len(outlook.looks))
    now_s += each_s * PRIOR_LOOKS
    prices, rates, costs = _past(outlook.looks, fleet, tuple(on_demand))
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
    looks: tuple[Market, ...], fleet: Fleet, on_demand: tuple[float, ...]
) -> tuple[Array, Array, Array]:
    """Return all steps of all looks, cheapest first: their prices per example, and sums
    of rates and of costs per second over those before each, and over all."""
    staircase = _staircase(fleet, on_demand)
    table = np.concatenate([np.empty((0, 2)), *map(staircase, looks)])
    usd, rate = table[np.argsort(table[:, 0], kind="stable")].T
    rates = np.concatenate([[0.0], np.cumsum(rate)])
    costs = np.concatenate([[0.0], np.cumsum(usd * rate)])
    return usd, rates, costs


@functools.lru_cache(maxsize=8)
def _staircase(fleet: Fleet, on_demand: tuple[float, ...]) -> Callable[[Market], Array]:
    """Return ``stairs`` of a fleet as a table, each made once: looks are asked for often."""

    @functools.lru_cache(maxsize=2 * KEPT)
    def table(seen: Market) -> Array:
        return np.array(stairs(seen, fleet, on_demand)).reshape(-1, 2)

    return table


def stairs(
    seen: Market, fleet: Fleet, on_demand: tuple[float, ...]
) -> tuple[tuple[float, float], ...]:
    """Return each step up in size: (USD per example, examples per second that it adds)."""
    prices = [usd for usd, count in seen for _ in range(count)]
    prices = sorted([*prices, *on_demand])[: fleet.most]
    steps: list[tuple[float, float]] = []
    for few, many in itertools.pairwise(fleet.sizes):
        if many > len(prices):
            break
        rate = fleet.rates[many] - fleet.rates[few]
        usd = sum(prices[few:many]) / HOUR_S / rate
        # Prices only rise: a step that looks cheaper than the one below is taken with it.
        steps.append((max(usd, steps[-1][0]) if steps else usd, rate))
    return tuple(steps)
