"""The offline optimum: the lowest cost of a job, had everything been known beforehand.

It shares no code with the deadline policy or the replay, since it measures both. A linear
program over time slots, each with the mean number of VMs that train in each zone. It is a
lower bound, since every replay satisfies its constraints:

- no more VMs train on average than there are lives that have lasted for a boot;
- a slot's examples are at most the concave hull of the rates at its mean fleet;
- where the mean rises from one slot to the next, so many VMs were booted and paid;
- morphs, lost work, whole numbers of VMs and the price of idle VMs are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spottrain.units import HOUR_S

SLOT_S = 1800.0

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSupply:
    """A source of VMs whose whole future is known."""

    lives: Sequence[tuple[float, float]] | None
    """Times in which each VM can be had; None: no limit."""
    usd_per_hour: Sequence[float]
    """Of one VM, for each ``SLOT_S``; the last one holds on."""


def min_usd(
    supplies: Sequence[KnownSupply],
    examples_per_s: Sequence[float],
    boot_s: float,
    examples: float,
    deadline_s: float,
) -> float:
    """Return a lower bound on the cost of being in time; infinite if nothing is in time.

    Args:
        supplies: Where VMs come from.
        examples_per_s: By number of VMs, from 0.
        boot_s: From paying for a VM to training on it.
        examples: To be done by the deadline.
        deadline_s: From now.
    """
    edges = np.append(np.arange(0.0, deadline_s, SLOT_S), deadline_s)
    program = _Program(edges, len(supplies), examples_per_s)
    for kind, supply in enumerate(supplies):
        vms = _mean_vms(supply.lives, edges, boot_s, len(examples_per_s) - 1)
        program.add_supply(kind, vms, _prices(supply.usd_per_hour, len(vms)), boot_s)
    return program.min_usd(examples)


class _Program:
    """The linear program.

    Columns: VMs [supply][slot], boots [supply][slot], fleet by piece [piece][slot].

    Rows, none of them above its limit: rises [supply][slot], fleet [slot], work.
    """

    def __init__(self, edges: Array, kinds: int, rates: Sequence[float]) -> None:
        self.seconds = np.diff(edges)
        self.slots = len(self.seconds)
        self.slot = np.arange(self.slots)
        self.vms = kinds * self.slots
        widths, self.slopes = _pieces(rates)
        columns = 2 * self.vms + len(widths) * self.slots
        self.cost = np.zeros(columns)
        self.upper_bounds = np.full(columns, np.inf)
        self.upper_bounds[2 * self.vms :] = np.repeat(widths, self.slots)
        self.entries: list[tuple[Indices, Indices, Array]] = []

    def add_supply(self, kind: int, vms: Array, prices: Array, boot_s: float) -> None:
        """Add the VMs of one supply, their cost, and their boots."""
        here = kind * self.slots + self.slot
        self.upper_bounds[here] = vms
        self.cost[here] = prices * self.seconds / HOUR_S
        boots = _cheapest_before(prices, boot_s) * boot_s / HOUR_S
        self.cost[self.vms + here] = boots
        one = np.ones(self.slots)
        self.entries += [
            (here, here, one),
            (here[1:], here[:-1], -one[1:]),
            (here, self.vms + here, -one),
            (self.vms + self.slot, here, -one),
        ]

    def min_usd(self, examples: float) -> float:
        """Return the lowest cost of the work; infinite if it cannot be done."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        work = np.full(self.slots, self.vms + self.slots)
        for piece, slope in enumerate(self.slopes):
            column = 2 * self.vms + piece * self.slots + self.slot
            done = slope * self.seconds / examples
            self.entries.append((self.vms + self.slot, column, np.ones(self.slots)))
            self.entries.append((work, column, -done))
        rows, columns, values = map(np.concatenate, zip(*self.entries, strict=True))
        limits = np.zeros(self.vms + self.slots + 1)
        limits[-1] = -1.0
        solve: Any = linprog  # its stubs know no sparse matrices
        found = solve(
            self.cost,
            A_ub=csr_array((values, (rows, columns)), (len(limits), len(self.cost))),
            b_ub=limits,
            bounds=np.stack([np.zeros(len(self.cost)), self.upper_bounds], axis=1),
            method="highs",
        )
        return float(found.fun) if found.status == 0 else math.inf


def _mean_vms(
    lives: Sequence[tuple[float, float]] | None,
    edges: Array,
    boot_s: float,
    upper_bounds: int,
) -> Array:
    """Return the mean number of VMs that could train in each slot."""
    if lives is None:
        spans: Array = np.tile(np.array([[boot_s, math.inf]]), (upper_bounds, 1))
    else:
        spans = np.array([(a + boot_s, b) for a, b in lives if a + boot_s < b])
        spans = spans.reshape(-1, 2)
    # Surplus VMs are of no use: cut off the count over time before taking its mean.
    moments = np.unique(np.concatenate([spans.ravel(), edges]))
    moments = moments[(moments >= 0) & (moments <= edges[-1])]
    starts, ends = np.sort(spans[:, 0]), np.sort(spans[:, 1])
    began = np.searchsorted(starts, moments[:-1], side="right")
    ended = np.searchsorted(ends, moments[:-1], side="right")
    there = np.minimum(began - ended, upper_bounds) * np.diff(moments)
    owner = np.searchsorted(edges, moments[:-1], side="right") - 1
    sums = np.bincount(owner, weights=there, minlength=len(edges) - 1)
    return np.asarray(sums / np.diff(edges), dtype=np.float64)


def _prices(usd_per_hour: Sequence[float], slots: int) -> Array:
    known = np.array(usd_per_hour[:slots], dtype=float)
    return np.concatenate([known, np.full(slots - len(known), known[-1])])


def _cheapest_before(prices: Array, boot_s: float) -> Array:
    """Return the lowest price of each slot and of those in which its boot may fall."""
    back = math.ceil(boot_s / SLOT_S)
    padded = np.concatenate([np.full(back, prices[0]), prices])
    windows = [padded[k : k + len(prices)] for k in range(back + 1)]
    return np.asarray(np.min(windows, axis=0))


def _pieces(rates: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return widths and slopes of the smallest concave function above the rates."""
    corners = [(0, 0.0)]
    for size, rate in enumerate(rates):
        if rate <= corners[-1][1]:
            continue
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (size - x1) > (rate - y1) * (x1 - x0):
                break
            corners.pop()
        corners.append((size, rate))
    pairs = list(itertools.pairwise(corners))
    widths = [float(b[0] - a[0]) for a, b in pairs]
    return widths, [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs]
