"""The safety net: what on-demand VMs alone would take, in time and in money.

On-demand VMs are the only supply that a promise can be built on. How far the job is from
needing all of them is its slack, of time and of money.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.pricing.deadline.model import (
    Feasibility,
    Fleet,
    Holdings,
    JobStatus,
    Supply,
)
from spottrain.units import HOUR_S

TIE = 1e-9
"""Relative difference that is rounding."""
LEEWAY_S = 60.0
"""From being told of a deadline that would do to trying it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandFallback:
    """On-demand VMs for the rest of the job."""

    fleet: Fleet
    prices: tuple[float, ...]
    """USD per hour of each VM that may be had on demand, ascending."""
    ready: int
    """On-demand VMs that train already."""
    paid: int
    """On-demand VMs that are rented already, those that boot counted."""
    kept_s: float = 0.0
    """See ``JobStatus``."""

    @property
    def most(self) -> int:
        """The most VMs on demand."""
        return len(self.prices)

    def train_s(self, size: int, examples: float) -> float:
        """Return how long ``size`` VMs train; infinite if they cannot."""
        rate = self.fleet.rates[size]
        if examples <= 0:
            return 0.0
        return examples / rate if rate > 0 else math.inf

    def start_s(self) -> float:
        """Return how long it takes to have on-demand VMs train that are not there yet."""
        return self.fleet.boot_s + self.fleet.morph_s

    def usd(self, size: int, examples: float) -> float:
        """Return what must be left for the rest to be done by ``size`` VMs.

        New ones' boot and joining, and what is kept back, are in it.
        """
        joins_s = self.fleet.morph_s if size > self.ready else 0.0
        train_s = self.train_s(size, examples) + joins_s + self.kept_s
        boot = sum(self.prices[self.paid : size]) * self.fleet.boot_s
        return (sum(self.prices[:size]) * train_s + boot) / HOUR_S

    def fastest(self, examples: float, usd_left: float | None) -> int:
        """Return the size that is done first within the budget; 0 if none can be."""
        limit = math.inf if usd_left is None else usd_left * (1 + TIE)
        for size in range(self.most, 0, -1):
            grows = self.fleet.rates[size] > self.fleet.rates[size - 1]
            if grows and self.usd(size, examples) <= limit:
                return size
        return 0

    def cheapest(self, examples: float, train_within_s: float) -> int:
        """Return the size that costs least and trains no longer; 0 if none does."""
        limit = train_within_s * (1 + TIE)
        sizes = [
            size
            for size in range(1, self.most + 1)
            if self.train_s(size, examples) <= limit
        ]
        return min(sizes, key=lambda size: self.usd(size, examples), default=0)


def on_demand_fallback(
    status: JobStatus,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Sequence[Holdings],
) -> OnDemandFallback:
    """Return what may be had on demand, within the cap of an hour's price."""
    rented = {vm.name: vm for vm in holdings}
    prices: list[float] = []
    ready = paid = 0
    for supply in supplies:
        if supply.spot:
            continue
        mine = rented.get(supply.name)
        have = 0 if mine is None else mine.ready + mine.booting
        free = fleet.most if supply.available is None else supply.available
        prices += [supply.usd_per_hour] * min(fleet.most, free + have)
        ready += 0 if mine is None else mine.ready
        paid += have
    prices = sorted(prices)[: fleet.most]
    cap = status.usd_per_hour_cap
    while prices and cap is not None and sum(prices) > cap * (1 + TIE):
        prices.pop()
    return OnDemandFallback(
        fleet=fleet,
        prices=tuple(prices),
        ready=ready,
        paid=paid,
        kept_s=status.kept_s,
    )


def feasible(
    status: JobStatus, fleet: Fleet, supplies: Sequence[Supply]
) -> Feasibility:
    """Return whether on-demand VMs alone would be in time and within the budget.

    So fast, that is, as is asked of them. Spot VMs may make it cheaper; nobody can promise
    them. A least rate without a deadline is kept for as long as the budget lasts. To be
    asked before anything is rented, and whenever a limit is changed.
    """
    base = on_demand_fallback(status, fleet, supplies, ())
    examples = status.examples_left
    within_s = min(status.left_s - base.start_s(), _paced_s(status))
    size = base.cheapest(examples, within_s)
    least_usd = base.usd(size, examples) if size else None
    fastest = base.fastest(examples, status.usd_left)
    train_s = base.train_s(fastest, examples)
    if train_s > _paced_s(status) * (1 + TIE):
        fastest = 0
    needs_s = base.start_s() + train_s + status.ending_s
    earliest_s = status.now_s + needs_s if fastest else None
    affords = least_usd is not None and (
        status.usd_left is None or least_usd <= status.usd_left * (1 + TIE)
    )
    lasts = status.deadline_s is None and status.min_examples_per_s is not None
    return Feasibility(
        possible=affords or (lasts and size > 0),
        reason=_why(status, base, size, least_usd, earliest_s, affords),
        least_usd=least_usd,
        earliest_finish_s=earliest_s,
    )


def _paced_s(status: JobStatus) -> float:
    """Return what the rest takes at the least rate; infinite if there is none."""
    least = status.min_examples_per_s
    return status.examples_left / least if least else math.inf


def _why(
    status: JobStatus,
    base: OnDemandFallback,
    size: int,
    least_usd: float | None,
    earliest_s: float | None,
    affords: bool,
) -> str:
    """Return one line: what can be promised, or what would do."""
    if not base.prices or base.fleet.rates[base.most] == 0:
        capped = "" if base.prices else " (or usd_per_hour_cap forbids them)"
        return (
            f"no on-demand VMs that could train the job{capped}: no promise can be "
            "made, spot VMs may not come; allow on-demand"
        )
    rate, least = base.fleet.rates[base.most], status.min_examples_per_s
    if least is not None and rate < least * (1 - TIE):
        return (
            f"slo.min_examples_per_s: {least:g} cannot be promised: {_vms(base.most)} "
            f"train {rate:.3g} examples/s; lower it"
        )
    budget = "no limit" if status.usd_left is None else f"${status.usd_left:,.2f}"
    if status.deadline_s is None and least is not None and least_usd is not None:
        vms = f"{_vms(size)} alone would keep up {least:g} examples/s"
        ends = "" if affords else ", where the job ends"
        return f"{vms} to the end for ${least_usd:,.2f}; to be spent: {budget}{ends}"
    if affords:
        vms = f"{_vms(size)} alone would do it in time"
        return f"{vms} for ${least_usd:,.2f}; to be spent: {budget}"
    if least_usd is None:
        train_s = base.train_s(base.most, status.examples_left)
        problem = (
            f"{_vms(base.most)} and the end of the job take "
            f"{(base.start_s() + train_s + status.ending_s) / HOUR_S:.3f} h, the "
            f"deadline is in {(status.left_s + status.ending_s) / HOUR_S:.3f} h"
        )
    else:
        problem = f"on-demand VMs in time cost ${least_usd:,.2f}, to be spent: {budget}"
    cures = _cures(status, base, least_usd, earliest_s)
    return f"deadline and budget cannot both be promised: {problem}; {cures}"


def _cures(
    status: JobStatus,
    base: OnDemandFallback,
    least_usd: float | None,
    earliest_s: float | None,
) -> str:
    """Return what would do instead."""
    cures = []
    if least_usd is not None:
        cures.append(f"raise the budget to ${round_up(least_usd):,.2f}")
    if earliest_s is not None:
        after_h = round_up((earliest_s - status.now_s + LEEWAY_S) / HOUR_S)
        cures.append(f"move the deadline to {after_h:.2f} h from now")
    else:
        cheapest = base.cheapest(status.examples_left, _paced_s(status))
        usd = base.usd(cheapest, status.examples_left)
        cures.append(f"with any deadline it costs ${round_up(usd):,.2f}")
    return ", or ".join(cures)


def _vms(size: int) -> str:
    return f"{size} on-demand VM{'s' * (size != 1)}"


def round_up(amount: float) -> float:
    """Return what is enough when it is shown with two digits."""
    return math.ceil(100 * amount) / 100
