"""The on-demand fallback: time and money that on-demand VMs alone would take.

Only on-demand VMs can guarantee a deadline. How far the job is from needing all of them is
its slack, in time and in money.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.pricing.deadline import model, tuning
from spottrain.units import HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDemandFallback:
    """On-demand VMs for the remaining work."""

    fleet: model.Fleet
    prices: tuple[float, ...]
    """USD per hour of each on-demand VM that can be had, ascending."""
    ready: int
    """On-demand VMs that already train."""
    paid: int
    """On-demand VMs that are already rented, booting ones included."""
    reserve_s: float = 0.0
    """See ``JobStatus``."""

    @property
    def max_vms(self) -> int:
        """The most on-demand VMs."""
        return len(self.prices)

    def train_s(self, size: int, examples: float) -> float:
        """Return how long ``size`` VMs train; infinite if the job does not fit them."""
        rate = self.fleet.rates[size]
        if examples <= 0:
            return 0.0
        return examples / rate if rate > 0 else math.inf

    def start_s(self) -> float:
        """Return the time until newly requested on-demand VMs train."""
        return self.fleet.boot_s + self.fleet.morph_s

    def usd(self, size: int, examples: float) -> float:
        """Return the money that ``size`` VMs need for the rest of the job.

        It includes boot and joining of new VMs, and the reserve.
        """
        joins_s = self.fleet.morph_s if size > self.ready else 0.0
        train_s = self.train_s(size, examples) + joins_s + self.reserve_s
        boot = sum(self.prices[self.paid : size]) * self.fleet.boot_s
        return (sum(self.prices[:size]) * train_s + boot) / HOUR_S

    def fastest(self, examples: float, usd_limit: float) -> int:
        """Return the size that finishes first within the budget; 0 if none does."""
        for size in range(self.max_vms, 0, -1):
            grows = self.fleet.rates[size] > self.fleet.rates[size - 1]
            if grows and self.usd(size, examples) <= usd_limit:
                return size
        return 0

    def cheapest(self, examples: float, train_within_s: float) -> int:
        """Return the cheapest size that trains no longer than that; 0 if none does."""
        limit = train_within_s * (1 + tuning.ROUNDING)
        sizes = [
            size for size in range(1, self.max_vms + 1) if self.train_s(size, examples) <= limit
        ]
        return min(sizes, key=lambda size: self.usd(size, examples), default=0)


def on_demand_fallback(
    status: model.JobStatus,
    fleet: model.Fleet,
    supplies: Sequence[model.Supply],
    holdings: Sequence[model.Holdings],
) -> OnDemandFallback:
    """Return the on-demand VMs that can be had within the hourly cap."""
    rented = {vm.name: vm for vm in holdings}
    prices: list[float] = []
    ready = paid = 0
    for supply in supplies:
        if supply.spot:
            continue
        mine = rented.get(supply.name)
        have = 0 if mine is None else mine.rented
        count = min(fleet.max_vms, supply.free(fleet) + have)
        prices += [supply.usd_per_hour] * count
        ready += 0 if mine is None else mine.ready
        paid += have
    prices = sorted(prices)[: fleet.max_vms]
    while prices and sum(prices) > status.usd_per_hour_limit:
        prices.pop()
    return OnDemandFallback(
        fleet=fleet,
        prices=tuple(prices),
        ready=ready,
        paid=paid,
        reserve_s=status.reserve_s,
    )


def feasible(
    status: model.JobStatus, fleet: model.Fleet, supplies: Sequence[model.Supply]
) -> model.Feasibility:
    """Return whether on-demand VMs alone would be in time, fast enough and in budget.

    Spot VMs may make it cheaper, but nobody can guarantee them. A ``min_examples_per_s``
    without a deadline holds for as long as the budget lasts. Call it before anything is
    rented, and whenever a limit changes.
    """
    base = on_demand_fallback(status, fleet, supplies, ())
    examples = status.examples_left
    within_s = min(status.left_s - base.start_s(), _paced_s(status))
    size = base.cheapest(examples, within_s)
    min_usd = base.usd(size, examples) if size else None
    fastest = base.fastest(examples, status.usd_limit)
    train_s = base.train_s(fastest, examples)
    if train_s > _paced_s(status) * (1 + tuning.ROUNDING):
        fastest = 0
    needs_s = base.start_s() + train_s + status.ending_s
    earliest_s = status.now_s + needs_s if fastest else None
    is_affordable = min_usd is not None and min_usd <= status.usd_limit
    lasts = status.deadline_s is None and status.min_examples_per_s is not None
    return model.Feasibility(
        possible=is_affordable or (lasts and size > 0),
        reason=_why(status, base, size, min_usd, earliest_s, is_affordable),
        min_usd=min_usd,
        earliest_finish_s=earliest_s,
    )


def _paced_s(status: model.JobStatus) -> float:
    """Return what the rest takes at ``min_examples_per_s``; infinite without one."""
    minimum = status.min_examples_per_s
    return status.examples_left / minimum if minimum else math.inf


def _why(
    status: model.JobStatus,
    base: OnDemandFallback,
    size: int,
    min_usd: float | None,
    earliest_s: float | None,
    is_affordable: bool,
) -> str:
    """Return one line: what can be guaranteed, or which limits could be."""
    if not base.prices or base.fleet.rates[base.max_vms] == 0:
        capped = "" if base.prices else " (or usd_per_hour_cap forbids them)"
        return (
            f"no on-demand VMs that could train the job{capped}: nothing can be "
            "guaranteed, spot VMs may be unavailable; allow on-demand"
        )
    rate, minimum = base.fleet.rates[base.max_vms], status.min_examples_per_s
    if minimum is not None and rate < minimum * (1 - tuning.ROUNDING):
        return (
            f"slo.min_examples_per_s: {minimum:g} cannot be guaranteed: {_vms(base.max_vms)} "
            f"train {rate:.3g} examples/s; lower it"
        )
    budget = "no limit" if status.usd_left is None else f"${status.usd_left:,.2f}"
    if status.deadline_s is None and minimum is not None and min_usd is not None:
        vms = f"{_vms(size)} alone would keep up {minimum:g} examples/s"
        ends = "" if is_affordable else ", where the job ends"
        return f"{vms} to the end for ${min_usd:,.2f}; left to spend: {budget}{ends}"
    if is_affordable:
        vms = f"{_vms(size)} alone would finish in time"
        return f"{vms} for ${min_usd:,.2f}; left to spend: {budget}"
    if min_usd is None:
        train_s = base.train_s(base.max_vms, status.examples_left)
        problem = (
            f"{_vms(base.max_vms)} and the end of the job take "
            f"{(base.start_s() + train_s + status.ending_s) / HOUR_S:.3f} h, the "
            f"deadline is in {(status.left_s + status.ending_s) / HOUR_S:.3f} h"
        )
    else:
        problem = (
            f"finishing in time on on-demand VMs costs ${min_usd:,.2f}, left to spend: {budget}"
        )
    remedies = _remedies(status, base, min_usd, earliest_s)
    return f"deadline and budget cannot both be guaranteed: {problem}; {remedies}"


def _remedies(
    status: model.JobStatus,
    base: OnDemandFallback,
    min_usd: float | None,
    earliest_s: float | None,
) -> str:
    """Return which limits could be met instead."""
    remedies = []
    if min_usd is not None:
        remedies.append(f"raise the budget to ${round_up(min_usd):,.2f}")
    if earliest_s is not None:
        after_h = round_up((earliest_s - status.now_s + tuning.LEEWAY_S) / HOUR_S)
        remedies.append(f"move the deadline to {after_h:.2f} h from now")
    else:
        cheapest = base.cheapest(status.examples_left, _paced_s(status))
        usd = base.usd(cheapest, status.examples_left)
        remedies.append(f"without a deadline it costs ${round_up(usd):,.2f}")
    return ", or ".join(remedies)


def _vms(size: int) -> str:
    return f"{size} on-demand VM{'s' * (size != 1)}"


def round_up(amount: float) -> float:
    """Return an amount with two digits that is no less."""
    return math.ceil(100 * amount) / 100
