"""What a job could have cost at the least, had everything been known beforehand.

Shares no code with the policy (``promise``) nor with the replay: it is the yardstick for
both. A linear program over slots of time, each with the mean number of VMs that train in
each zone. It is a bound from below, since whatever a replay does keeps these rules:

- no more VMs train on the mean than lives that have lasted for a boot are there;
- a slot's examples are at most the concave hull of the rates at its mean fleet;
- where the mean rises from one slot to the next, so many VMs were booted, and paid;
- morphs, lost work, whole numbers of VMs and what is paid for idle ones are left out.
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
    """One way to have VMs, all of its future known."""

    lives: Sequence[tuple[float, float]] | None
    """From when until when each VM can be had; None: as many as are wanted, always."""
    usd_per_hour: Sequence[float]
    """Of one VM, for each ``SLOT_S``; the last one stays."""


def least_usd(
    supplies: Sequence[KnownSupply],
    examples_per_s: Sequence[float],
    boot_s: float,
    examples: float,
    deadline_s: float,
) -> float:
    """Return dollars that no way of doing the work in time goes below; infinite if none.

    Args:
        supplies: Where VMs come from.
        examples_per_s: By number of VMs, from 0.
        boot_s: From paying for a VM to its training.
        examples: To be done by the deadline.
        deadline_s: From now.
    """
    edges = np.append(np.arange(0.0, deadline_s, SLOT_S), deadline_s)
    program = _Program(edges, len(supplies), examples_per_s)
    for kind, supply in enumerate(supplies):
        vms = _mean_vms(supply.lives, edges, boot_s, len(examples_per_s) - 1)
        program.add_supply(kind, vms, _prices(supply.usd_per_hour, len(vms)), boot_s)
    return program.least(examples)


class _Program:
    """Columns: VMs [supply][slot], boots [supply][slot], fleet by piece [piece][slot].

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
        self.most = np.full(columns, np.inf)
        self.most[2 * self.vms :] = np.repeat(widths, self.slots)
        self.entries: list[tuple[Indices, Indices, Array]] = []

    def add_supply(self, kind: int, vms: Array, prices: Array, boot_s: float) -> None:
        """Add the VMs of one supply, what they cost, and what their boots do."""
        here = kind * self.slots + self.slot
        self.most[here] = vms
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

    def least(self, examples: float) -> float:
        """Return the least cost of the work; infinite if it cannot be done."""
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
            bounds=np.stack([np.zeros(len(self.cost)), self.most], axis=1),
            method="highs",
        )
        return float(found.fun) if found.status == 0 else math.inf


def _mean_vms(
    lives: Sequence[tuple[float, float]] | None,
    edges: Array,
    boot_s: float,
    most: int,
) -> Array:
    """Return how many VMs could train, on the mean of each slot."""
    if lives is None:
        spans: Array = np.tile(np.array([[boot_s, math.inf]]), (most, 1))
    else:
        spans = np.array([(a + boot_s, b) for a, b in lives if a + boot_s < b])
        spans = spans.reshape(-1, 2)
    # Only so many at once are of use: the count over time, cut off, then its mean.
    moments = np.unique(np.concatenate([spans.ravel(), edges]))
    moments = moments[(moments >= 0) & (moments <= edges[-1])]
    starts, ends = np.sort(spans[:, 0]), np.sort(spans[:, 1])
    began = np.searchsorted(starts, moments[:-1], side="right")
    ended = np.searchsorted(ends, moments[:-1], side="right")
    there = np.minimum(began - ended, most) * np.diff(moments)
    owner = np.searchsorted(edges, moments[:-1], side="right") - 1
    sums = np.bincount(owner, weights=there, minlength=len(edges) - 1)
    return np.asarray(sums / np.diff(edges), dtype=np.float64)


def _prices(usd_per_hour: Sequence[float], slots: int) -> Array:
    known = np.array(usd_per_hour[:slots], dtype=float)
    return np.concatenate([known, np.full(slots - len(known), known[-1])])


def _cheapest_before(prices: Array, boot_s: float) -> Array:
    """Return the least price in each slot and in those in which a boot for it may be."""
    back = math.ceil(boot_s / SLOT_S)
    padded = np.concatenate([np.full(back, prices[0]), prices])
    windows = [padded[k : k + len(prices)] for k in range(back + 1)]
    return np.asarray(np.min(windows, axis=0))


def _pieces(rates: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return widths and slopes of the least concave function above the rates."""
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
