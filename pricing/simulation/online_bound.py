"""What a job could cost at the least if nobody knew which of its VMs the market takes.

Beside ``promise_bound``, which knows every life. Here prices, how many VMs are to be had
and when the market takes how many of them are known too; but those it takes are drawn from
all that are there, and what joins was sent for before. VMs are whole, each boot is paid,
each change of the fleet holds training up, what goes without notice takes work along. No
rule costs less on the mean over the draws; for all else is in its favour:

- a boot is paid for at the least price that it may have had, and takes no time;
- lives last a part of a boot longer, and what goes within that part goes at once;
- of several that go at once it loses one;
- the work need be done on the mean only, and there is no budget.

For one zone, and for rules with no more spot VMs, and no more on-demand VMs, than the fleet's
most. Examples are given a price (a Lagrange multiplier); then the worth of a fleet follows
from that of those that it may become, from the deadline backwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spottrain.pricing.simulation.offline_optimum import SLOT_S, KnownSupply
from spottrain.units import HOUR_S

CELLS_A_BOOT = 2
"""Moments to tell apart in a boot's time: with two, what replaces a VM that went joins at
a later moment, since it is sent for afterwards."""
TRIED = 10
"""Prices of an example that are tried at once."""
ROUNDS = 3
"""Times that prices between the best ones are tried."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be done, and what it takes; on-demand VMs could do it in time."""

    examples_per_s: Sequence[float]
    """By number of VMs, from 0; never falling."""
    examples: float
    deadline_s: float
    on_demand_usd_per_hour: float
    boot_s: float
    morph_s: float
    lost_s: float
    """Training time that goes with a VM; 0 where notice is given in time."""


def least_usd(zone: KnownSupply, job: Job) -> float:
    """Return dollars that no rule goes below on the mean, however it decides."""
    moments = _moments(zone, job)
    each_usd = job.on_demand_usd_per_hour / HOUR_S / max(job.examples_per_s)
    low, high = 0.05 * each_usd, 5 * len(job.examples_per_s) * each_usd
    best = 0.0
    for _ in range(ROUNDS):
        tried = np.geomspace(low, high, TRIED)
        bounds = _bounds(moments, job, tried)
        at = int(np.argmax(bounds))
        best = max(best, float(bounds[at]))
        low, high = tried[max(0, at - 1)], tried[min(TRIED - 1, at + 1)]
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """What happens, and how it is until the next moment."""

    seconds: float
    usd_per_hour: float
    boot_usd: float
    there: int
    """VMs to be had from now on."""
    unhurt: Array
    """By VMs held, the chance that none of them goes."""


def _moments(zone: KnownSupply, job: Job) -> list[_Moment]:
    """Return the moments at which one may want to change something, after a first boot."""
    cell_s = job.boot_s / CELLS_A_BOOT if job.boot_s > 0 else SLOT_S / 10
    span_s = job.deadline_s - job.boot_s
    cells = max(1, math.ceil(span_s / cell_s))
    there, gone = _counts(zone, job, cell_s, cells)
    at_s: Array = job.boot_s + cell_s * np.arange(cells, dtype=np.float64)
    prices = np.minimum(_price(zone, at_s), _price(zone, at_s + cell_s))
    boots = np.minimum(_price(zone, at_s - job.boot_s), prices)
    table = np.array([there, prices, boots])
    changes = np.ones(cells + 1, dtype=bool)
    changes[1:-1] = np.any(table[:, 1:] != table[:, :-1], axis=0) | (gone[1:] > 0)
    # What replaces a VM that went may come a cell later; else nothing is gained by waiting.
    changes[1:] |= changes[:-1].copy()
    kept = np.flatnonzero(changes)
    most = len(job.examples_per_s) - 1
    return [
        _Moment(
            seconds=min(float(until * cell_s), span_s) - float(cell * cell_s),
            usd_per_hour=float(prices[cell]),
            boot_usd=float(boots[cell]) * job.boot_s / HOUR_S,
            there=int(there[cell]),
            unhurt=_unhurt(int(there[cell] + gone[cell]), int(gone[cell]), most),
        )
        for cell, until in itertools.pairwise(kept)
    ]


def _counts(
    zone: KnownSupply, job: Job, cell_s: float, cells: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return how many VMs there are in each cell, and how many go as it begins."""
    rises = np.zeros(cells + 1, dtype=np.int64)
    gone = np.zeros(cells + 1, dtype=np.int64)
    for from_s, until_s in zone.lives or ():
        until_s = min(until_s, job.deadline_s + cell_s)
        if from_s + job.boot_s < min(until_s, job.deadline_s):
            rises[int(from_s / cell_s)] += 1
            last = min(cells, math.ceil((until_s - job.boot_s) / cell_s))
            rises[last] -= 1
            gone[last] += 1
    return np.cumsum(rises)[:cells], gone[:cells]


def _price(zone: KnownSupply, at_s: Array) -> Array:
    known: Array = np.asarray(zone.usd_per_hour, dtype=np.float64)
    return np.asarray(known[np.minimum((at_s / SLOT_S).astype(int), len(known) - 1)])


def _unhurt(there: int, gone: int, most: int) -> Array:
    """Return the chance that none of those held goes, by their number."""
    chances = [
        math.comb(there - gone, held) / math.comb(there, held) if held <= there else 0.0
        for held in range(most + 1)
    ]
    return np.array(chances)


def _bounds(moments: Sequence[_Moment], job: Job, prices: Array) -> Array:
    """Return the bound that each price of an example gives.

    Axes: price of an example, spot VMs held, on-demand VMs held.
    """
    rates = np.asarray(job.examples_per_s)
    vms = np.arange(len(rates))
    together = rates[np.minimum(vms[:, None] + vms, len(rates) - 1)]
    worth = prices[:, None, None] * together
    boot_usd = job.on_demand_usd_per_hour * job.boot_s / HOUR_S
    value = np.zeros_like(worth)
    for moment in reversed(moments):
        spot = np.where(vms <= moment.there, moment.usd_per_hour * vms, math.inf)
        usd_per_hour = spot[:, None] + job.on_demand_usd_per_hour * vms
        kept = value + moment.seconds * (worth - usd_per_hour / HOUR_S)
        paused = kept - worth * min(job.morph_s, moment.seconds)
        fewer = _fewer(paused)
        lost = (1 - moment.unhurt)[:, None] * worth * job.lost_s
        value = np.maximum(
            _mean(moment.unhurt[:, None], np.maximum(kept, fewer), fewer) - lost,
            _fewer(_joined(fewer, moment, boot_usd) - lost),
        )
    return np.asarray(prices * job.examples - value[:, 0, 0])


def _joined(fewer: Array, moment: _Moment, boot_usd: float) -> Array:
    """Return the best value when VMs join that were sent for whatever goes."""
    vms = np.arange(fewer.shape[1])
    if moment.unhurt.min() >= 1:
        landed = _with_boots(fewer, boot_usd)
        found = landed[:, None] - _boots(moment, vms)
    else:
        # Axes: price, held before, held after if none goes, on demand.
        chances = moment.unhurt[:, None, None]
        landed = _with_boots(_mean(chances, fewer[:, None], fewer[:, None]), boot_usd)
        found = landed - _boots(moment, vms)
    return np.asarray(found.max(axis=2))


def _mean(unhurt: Array, whole: Array, hurt: Array) -> Array:
    """Return the mean of what is if none goes, and if one does (second axis from last)."""
    vms = np.arange(hurt.shape[-2])
    return np.asarray(
        unhurt * whole + (1 - unhurt) * hurt[..., np.maximum(vms - 1, 0), :]
    )


def _boots(moment: _Moment, vms: npt.NDArray[np.int64]) -> Array:
    """Return what it costs to grow, by VMs before and after; infinite to shrink."""
    more = vms - vms[:, None]
    return np.where(more >= 0, moment.boot_usd * more, math.inf)[:, :, None]


def _with_boots(value: Array, usd: float) -> Array:
    """Return the best value when on-demand VMs may be booted; the last axis is theirs."""
    paid = usd * np.arange(value.shape[-1])
    more = np.maximum.accumulate((value - paid)[..., ::-1], axis=-1)[..., ::-1]
    return np.asarray(more + paid)


def _fewer(value: Array) -> Array:
    """Return the best value when VMs may be given back."""
    spot = np.maximum.accumulate(value, axis=1)
    return np.maximum.accumulate(spot, axis=2)
