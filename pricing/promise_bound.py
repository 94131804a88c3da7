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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SLOT_S = 1800.0
_HOUR_S = 3600.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """One way to have VMs, all of its future known."""

    lives: Sequence[tuple[float, float]] | None
    """From when until when each VM can be had; None: as many as are wanted, always."""
    usd_per_hour: Sequence[float]
    """Of one VM, for each ``SLOT_S``; the last one stays."""


def least_usd(
    supplies: Sequence[Supply],
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
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    edges = np.append(np.arange(0.0, deadline_s, SLOT_S), deadline_s)
    seconds = np.diff(edges)
    slots, most = len(seconds), len(examples_per_s) - 1
    caps = [_mean_vms(s.lives, edges, boot_s, most) for s in supplies]
    prices = [_prices(s.usd_per_hour, slots) for s in supplies]
    widths, slopes = _pieces(examples_per_s)
    kinds, pieces = len(supplies), len(widths)

    # Columns: VMs [kind][slot], boots [kind][slot], fleet by piece [piece][slot].
    vms = slots * kinds
    columns = 2 * vms + slots * pieces
    cost, upper = np.zeros(columns), np.full(columns, np.inf)
    for kind in range(kinds):
        here = slice(kind * slots, (kind + 1) * slots)
        cost[here] = prices[kind] * seconds / _HOUR_S
        upper[here] = caps[kind]
        cost[vms + kind * slots : vms + (kind + 1) * slots] = (
            _cheapest_before(prices[kind], boot_s) * boot_s / _HOUR_S
        )
    for piece in range(pieces):
        start = 2 * vms + piece * slots
        upper[start : start + slots] = widths[piece]

    rows, cols, values = [], [], []

    def put(row: Array, column: Array, value: float | Array) -> None:
        rows.append(row)
        cols.append(column)
        values.append(np.broadcast_to(value, row.shape))

    slot = np.arange(slots)
    for kind in range(kinds):  # vms[t] - vms[t-1] - boots[t] <= 0
        row = kind * slots + slot
        put(row, kind * slots + slot, 1.0)
        put(row[1:], kind * slots + slot[:-1], -1.0)
        put(row, vms + kind * slots + slot, -1.0)
        put(vms + slot, kind * slots + slot, -1.0)  # fleet <= all VMs
    last = np.full(slots, vms + slots)
    for piece in range(pieces):
        column = 2 * vms + piece * slots + slot
        put(vms + slot, column, 1.0)
        put(last, column, -slopes[piece] * seconds)  # the work
    limits = np.zeros(vms + slots + 1)
    scale = examples
    limits[-1] = -1.0
    data = np.concatenate(values)
    row = np.concatenate(rows)
    data = np.where(row == vms + slots, data / scale, data)
    matrix = csr_array((data, (row, np.concatenate(cols))), (len(limits), columns))
    found = linprog(
        cost,
        A_ub=matrix,
        b_ub=limits,
        bounds=np.stack([np.zeros(columns), upper], axis=1),
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
    sums: Array = np.bincount(owner, weights=there, minlength=len(edges) - 1)
    return sums / np.diff(edges)


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
    pairs = list(zip(corners, corners[1:], strict=False))
    widths = [float(b[0] - a[0]) for a, b in pairs]
    return widths, [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs]
