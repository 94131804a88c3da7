"""The online bound: the lowest cost of a job if nobody knows which VMs are preempted.

The offline optimum knows every life. Here prices, the number of VMs there are, and when how
many are preempted are known too; but the preempted ones are drawn from all VMs, and VMs
that join were requested before. VMs are whole, each boot is paid, each change of the fleet
pauses training, a loss without notice takes work with it. No rule costs less on average
over the draws, since all else is in its favour:

- a boot is paid at the lowest price that it may have had, and takes no time;
- lives last part of a boot longer, and VMs that end within that part end together;
- of several VMs that end together it loses one;
- the work needs to be done on average only, and there is no budget.

For one zone, and for rules with no more spot VMs and no more on-demand VMs than the fleet's
maximum. Examples are given a price (a Lagrange multiplier); the value of a fleet follows
from the values of its successors, from the deadline backwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spottrain.units import HOUR_S
from spottrain_lab.markets.offline_optimum import SLOT_S, KnownSupply

CELLS_A_BOOT = 2
"""Moments per boot: with two, the replacement of a lost VM joins at a later moment, since it
is requested after the loss."""
PRICES_A_ROUND = 10
"""Prices of an example per round."""
ROUNDS = 3
"""Rounds of prices, each between the best ones of the last."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The work and its costs; on-demand VMs could do it in time."""

    examples_per_s: Sequence[float]
    """By number of VMs, from 0; never falling."""
    examples: float
    deadline_s: float
    on_demand_usd_per_hour: float
    boot_s: float
    morph_s: float
    lost_s: float
    """Training time lost with a VM; 0 where notice comes in time."""


def min_usd(zone: KnownSupply, job: Job) -> float:
    """Return a lower bound on the mean cost of any rule."""
    moments = _moments(zone, job)
    each_usd = job.on_demand_usd_per_hour / HOUR_S / max(job.examples_per_s)
    low, high = 0.05 * each_usd, 5 * len(job.examples_per_s) * each_usd
    best = 0.0
    for _ in range(ROUNDS):
        prices = np.geomspace(low, high, PRICES_A_ROUND)
        bounds = _bounds(moments, job, prices)
        at = int(np.argmax(bounds))
        best = max(best, float(bounds[at]))
        low, high = prices[max(0, at - 1)], prices[min(PRICES_A_ROUND - 1, at + 1)]
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """The market from one moment to the next."""

    seconds: float
    usd_per_hour: float
    boot_usd: float
    there: int
    """VMs to be had from now on."""
    no_loss: Array
    """By VMs held, the probability that none of them is lost."""


def _moments(zone: KnownSupply, job: Job) -> list[_Moment]:
    """Return the moments at which a change may pay, after a first boot."""
    cell_s = job.boot_s / CELLS_A_BOOT if job.boot_s > 0 else SLOT_S / 10
    span_s = job.deadline_s - job.boot_s
    cells = max(1, math.ceil(span_s / cell_s))
    there, ended = _counts(zone, job, cell_s, cells)
    at_s: Array = job.boot_s + cell_s * np.arange(cells, dtype=np.float64)
    prices = np.minimum(_price(zone, at_s), _price(zone, at_s + cell_s))
    boots = np.minimum(_price(zone, at_s - job.boot_s), prices)
    table = np.array([there, prices, boots])
    changes = np.ones(cells + 1, dtype=bool)
    changes[1:-1] = np.any(table[:, 1:] != table[:, :-1], axis=0) | (ended[1:] > 0)
    # A replacement may join a cell later; other changes gain nothing by waiting.
    changes[1:] |= changes[:-1].copy()
    kept = np.flatnonzero(changes)
    max_vms = len(job.examples_per_s) - 1
    return [
        _Moment(
            seconds=min(float(until * cell_s), span_s) - float(cell * cell_s),
            usd_per_hour=float(prices[cell]),
            boot_usd=float(boots[cell]) * job.boot_s / HOUR_S,
            there=int(there[cell]),
            no_loss=_no_loss(int(there[cell] + ended[cell]), int(ended[cell]), max_vms),
        )
        for cell, until in itertools.pairwise(kept)
    ]


def _counts(
    zone: KnownSupply, job: Job, cell_s: float, cells: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return how many VMs there are in each cell, and how many end as it begins."""
    rises = np.zeros(cells + 1, dtype=np.int64)
    ended = np.zeros(cells + 1, dtype=np.int64)
    for from_s, until_s in zone.lives or ():
        until_s = min(until_s, job.deadline_s + cell_s)
        if from_s + job.boot_s < min(until_s, job.deadline_s):
            rises[int(from_s / cell_s)] += 1
            last = min(cells, math.ceil((until_s - job.boot_s) / cell_s))
            rises[last] -= 1
            ended[last] += 1
    return np.cumsum(rises)[:cells], ended[:cells]


def _price(zone: KnownSupply, at_s: Array) -> Array:
    known: Array = np.asarray(zone.usd_per_hour, dtype=np.float64)
    return np.asarray(known[np.minimum((at_s / SLOT_S).astype(int), len(known) - 1)])


def _no_loss(there: int, ended: int, max_vms: int) -> Array:
    """Return the probability that none of the held VMs is lost, by their number."""
    chances = [
        math.comb(there - ended, held) / math.comb(there, held) if held <= there else 0.0
        for held in range(max_vms + 1)
    ]
    return np.array(chances)


def _bounds(moments: Sequence[_Moment], job: Job, prices: Array) -> Array:
    """Return the bound for each price of an example.

    Axes: price of an example, spot VMs held, on-demand VMs held.
    """
    rates = np.asarray(job.examples_per_s)
    vms = np.arange(len(rates))
    together = rates[np.minimum(vms[:, None] + vms, len(rates) - 1)]
    value_per_s = prices[:, None, None] * together
    boot_usd = job.on_demand_usd_per_hour * job.boot_s / HOUR_S
    value = np.zeros_like(value_per_s)
    for moment in reversed(moments):
        spot = np.where(vms <= moment.there, moment.usd_per_hour * vms, math.inf)
        usd_per_hour = spot[:, None] + job.on_demand_usd_per_hour * vms
        kept = value + moment.seconds * (value_per_s - usd_per_hour / HOUR_S)
        paused = kept - value_per_s * min(job.morph_s, moment.seconds)
        fewer = _fewer(paused)
        lost = (1 - moment.no_loss)[:, None] * value_per_s * job.lost_s
        value = np.maximum(
            _mean(moment.no_loss[:, None], np.maximum(kept, fewer), fewer) - lost,
            _fewer(_joined(fewer, moment, boot_usd) - lost),
        )
    return np.asarray(prices * job.examples - value[:, 0, 0])


def _joined(fewer: Array, moment: _Moment, boot_usd: float) -> Array:
    """Return the best value when VMs join that were requested whatever is lost."""
    vms = np.arange(fewer.shape[1])
    if moment.no_loss.min() >= 1:
        landed = _with_boots(fewer, boot_usd)
        found = landed[:, None] - _boots(moment, vms)
    else:
        # Axes: price, held before, held after without loss, on demand.
        chances = moment.no_loss[:, None, None]
        landed = _with_boots(_mean(chances, fewer[:, None], fewer[:, None]), boot_usd)
        found = landed - _boots(moment, vms)
    return np.asarray(found.max(axis=2))


def _mean(no_loss: Array, whole: Array, hurt: Array) -> Array:
    """Return the mean of the values with no loss and with one (second axis from last)."""
    vms = np.arange(hurt.shape[-2])
    return np.asarray(no_loss * whole + (1 - no_loss) * hurt[..., np.maximum(vms - 1, 0), :])


def _boots(moment: _Moment, vms: npt.NDArray[np.int64]) -> Array:
    """Return the cost of growing, by VMs before and after; infinite to shrink."""
    more = vms - vms[:, None]
    return np.where(more >= 0, moment.boot_usd * more, math.inf)[:, :, None]


def _with_boots(value: Array, usd: float) -> Array:
    """Return the best value if on-demand VMs may be booted; the last axis is theirs."""
    paid = usd * np.arange(value.shape[-1])
    more = np.maximum.accumulate((value - paid)[..., ::-1], axis=-1)[..., ::-1]
    return np.asarray(more + paid)


def _fewer(value: Array) -> Array:
    """Return the best value if VMs may be returned."""
    spot = np.maximum.accumulate(value, axis=1)
    return np.maximum.accumulate(spot, axis=2)
