"""Forecasts of a job's finish and remaining cost, with 90 % intervals.

When a cost-optimal job is done depends on how much spot VMs will train until the deadline
(``availability``). The expected cost is that of the cheapest schedule through the markets to come,
were they a shuffle of those sampled; how far real costs are from it was measured on replays of recorded
and drawn markets. docs/deadlines.md has the coverage on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.availability import Availability, availability
from spottrain.pricing.deadline.fallback import OnDemandFallback, on_demand_fallback
from spottrain.pricing.deadline.markets import (
    Array,
    Markets,
    markets,
    spot_path,
    stairs,
)
from spottrain.pricing.deadline.model import (
    Fleet,
    Forecast,
    Holdings,
    Interval,
    JobStatus,
    Supply,
)
from spottrain.pricing.deadline.outlook import (
    MarketOutlook,
    Sample,
    SpotQuote,
    sample,
)
from spottrain.pricing.deadline.rolling import Rolling, drift, width
from spottrain.units import HOUR_S


def forecast(
    status: JobStatus,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Sequence[Holdings],
    outlook: MarketOutlook,
    *,
    cost_optimal: bool = True,
    rolling: Rolling | None = None,
    usd_spent: float = 0.0,
) -> Forecast:
    """Return the finish and cost to expect under ``policy.decide``.

    Arguments as for ``policy.decide``, and how the job's own forecasts turned out so far,
    with the money spent; without that, as for a typical job. Without a deadline, or without on-demand VMs that
    the budget affords, nobody knows how long spot VMs will be away: the upper ends are
    infinite. The expected values are infinite too where the caps allow no VMs, or the
    budget ends first. The cost never exceeds the budget.
    """
    examples = status.examples_left
    if examples <= 0:
        done = Interval(low=status.now_s, expected=status.now_s, high=status.now_s)
        return Forecast(finish_s=done, usd=Interval(low=0.0, expected=0.0, high=0.0))
    base = on_demand_fallback(status, fleet, supplies, holdings)
    limit = status.usd_per_hour_limit
    samples = (*outlook.quotes, sample(fleet, supplies, holdings))
    affordable = [_affordable_quotes(one, limit) for one in samples]
    seen = markets(affordable, fleet, supplies)
    soon = _spot_alone(status, fleet, seen)
    size = base.fastest(examples, status.usd_limit)
    if status.deadline_s is None or not size:
        return soon
    if status.left_s < base.train_s(size, examples):
        return _late(status, fleet, base, size)
    own = _Own(rolling, usd_spent)
    slow = Forecast(
        finish_s=_finish(status, fleet, base, holdings, seen),
        usd=_cost(status, fleet, base, seen, own if cost_optimal else _Own(None, 0.0)),
    )
    if not cost_optimal:
        max_usd = base.usd(_fallback_size(status, base), examples)
        slow = _time_optimal(slow, soon, status, max_usd, own)
    return replace(slow, usd=_within_budget(slow.usd, status))


@dataclass(frozen=True, slots=True)
class _Own:
    """How the job's own forecasts turned out."""

    rolling: Rolling | None
    usd_spent: float

    def cost(self, fixed: Interval, max_usd: float, ends: tuple[float, float]) -> Interval:
        """Return the cost half-way between fixed ends and those of our own forecasts;
        on-demand VMs alone bound it."""
        wide = width(self.rolling, "usd", fixed.expected)
        expected = fixed.expected * drift(self.rolling, self.usd_spent)
        low, high = (expected * math.exp(end * wide) for end in ends)
        high = min(max_usd, math.sqrt(high * fixed.high))
        low = min(high, math.sqrt(low * fixed.low))
        return Interval(low=low, expected=min(high, max(low, expected)), high=high)


def _affordable_quotes(seen: Sample, usd_per_hour_limit: float) -> Sample:
    """Return the VMs of a sample that the hourly cap allows, cheapest first."""
    left, found = usd_per_hour_limit, list[SpotQuote]()
    for quote in sorted(seen, key=lambda quote: quote.usd_per_hour):
        vms = _count(quote.usd_per_hour, quote.vms, left)
        left -= vms * quote.usd_per_hour
        found.append(quote._replace(vms=vms))
    return tuple(found)


def _count(usd_per_hour: float, max_vms: int, left: float) -> int:
    """Return how many VMs of a price the rest of the cap allows."""
    if usd_per_hour * max_vms <= left:
        return max_vms
    return max(0, min(max_vms, math.floor(left / usd_per_hour)))


def _cost(
    status: JobStatus,
    fleet: Fleet,
    base: OnDemandFallback,
    seen: Markets,
    own: _Own,
) -> Interval:
    """Return the cost between the cheapest schedule and on-demand VMs alone."""
    examples = status.examples_left
    left_s = max(0.0, status.left_s - base.start_s())
    cheapest = spot_path(seen, fleet, base.prices, examples, left_s).usd
    on_demand = base.usd(_fallback_size(status, base), examples)
    max_usd = max(on_demand, cheapest)
    above = max_usd - cheapest
    fixed = Interval(
        low=tuning.COST_LOW * cheapest,
        expected=cheapest + tuning.COST_EXPECTED * above,
        high=cheapest + tuning.COST_HIGH * above,
    )
    return own.cost(fixed, max_usd, tuning.COST_ENDS)


def _within_budget(usd: Interval, status: JobStatus) -> Interval:
    """Return the cost, cut off at the budget, which ends the job."""
    left = math.inf if status.usd_left is None else max(0.0, status.usd_left)
    return Interval(
        low=min(usd.low, left),
        expected=min(usd.expected, left),
        high=min(usd.high, left),
    )


def _late(status: JobStatus, fleet: Fleet, base: OnDemandFallback, size: int) -> Forecast:
    """Return the forecast of a late job: on-demand VMs train to the end."""
    examples, now_s = status.examples_left, status.now_s
    train_s, usd = base.train_s(size, examples), base.usd(size, examples)
    part = tuning.BEST_CASE_TIME
    cost = Interval(low=part * usd, expected=usd, high=usd / part)
    return Forecast(
        finish_s=Interval(
            low=now_s + tuning.BEST_CASE_TIME * examples / fleet.rates[-1],
            expected=now_s + base.start_s() + train_s,
            high=now_s + base.start_s() + train_s / tuning.BEST_CASE_TIME,
        ),
        usd=_within_budget(cost, status),
    )


def _fallback_size(status: JobStatus, base: OnDemandFallback) -> int:
    """Return the cheapest on-demand fleet that is in time, else the largest."""
    left_s = max(0.0, status.left_s - base.start_s())
    return base.cheapest(status.examples_left, left_s) or base.max_vms


def _time_optimal(
    slow: Forecast, soon: Forecast, status: JobStatus, max_usd: float, own: _Own
) -> Forecast:
    """Return the forecast of a time-optimal job: all spot VMs, with the fallback below.

    Args:
        slow: Forecast of a cost-optimal job with this deadline.
        soon: Forecast of all spot VMs without a deadline.
        status: Of the job.
        max_usd: Cost of on-demand VMs alone.
        own: How the job's own forecasts turned out.
    """
    finish_s = min(soon.finish_s.expected, slow.finish_s.expected)
    usd = soon.usd.expected if soon.usd.expected < math.inf else slow.usd.expected
    max_usd = max(usd, max_usd)
    if max_usd == math.inf:
        cost = Interval(low=usd, expected=usd, high=math.inf)
    else:
        fixed = Interval(
            low=tuning.FAST_COST_LOW * usd,
            expected=usd + tuning.FAST_COST_EXPECTED * (max_usd - usd),
            high=max_usd,
        )
        cost = own.cost(fixed, max_usd, tuning.FAST_COST_ENDS)
    now_s = status.now_s
    left_s = finish_s - now_s
    wide = width(own.rolling, "time_s", left_s)
    low, high = (left_s * math.exp(end * wide) for end in tuning.FAST_FINISH_ENDS)
    low = math.sqrt(low * max(0.0, min(soon.finish_s.low, finish_s) - now_s))
    latest_s = max(left_s, status.left_s)
    high = math.sqrt(high * latest_s)
    return Forecast(
        finish_s=Interval(
            low=now_s + min(low, left_s),
            expected=finish_s,
            high=now_s + max(left_s, min(latest_s, high)),
        ),
        usd=cost,
    )


def _finish(
    status: JobStatus,
    fleet: Fleet,
    base: OnDemandFallback,
    holdings: Sequence[Holdings],
    seen: Markets,
) -> Interval:
    """Return the finish between the earliest possible one and the deadline.

    Spot VMs train a share of what a full fleet would, which decides when they are done. If that
    is too late, on-demand VMs train to the deadline.
    """
    boot_s = 0.0 if any(vms.rented for vms in holdings) else base.start_s()
    train_s = status.examples_left / fleet.rates[-1]
    earliest_s = status.now_s + boot_s + train_s
    latest_s = max(earliest_s, status.now_s + status.left_s)
    if status.left_s < boot_s + train_s:  # late: as late as on-demand VMs make it
        latest_s = earliest_s + base.start_s()

    there = availability(_bought(status, fleet, base, seen), max(0.0, status.left_s - boot_s))
    spare_s = latest_s - earliest_s

    def at(chance: float) -> float:
        """Return when the job is done with so much probability."""
        early_s = _early_s(status, fleet, there, chance)
        away_s = train_s / there.quantile(1 - chance) - train_s
        if away_s >= spare_s - early_s:
            return max(earliest_s, latest_s - early_s) if chance <= 0.5 else latest_s
        if chance < 0.5 and away_s < there.away_s:  # they go for a while, or not at all
            return earliest_s
        return earliest_s + away_s

    # What is bounded on one side may miss on the other alone.
    misses = tuning.MISSES
    is_open = at(misses) > earliest_s, at(1 - misses) < latest_s
    return Interval(
        low=at(misses / 2 if is_open[1] else misses),
        expected=at(0.5),
        high=at(1 - (misses / 2 if is_open[0] else misses)),
    )


def _bought(status: JobStatus, fleet: Fleet, base: OnDemandFallback, seen: Markets) -> Array:
    """Return what those spot VMs of each market train that are worth their price, as a share of
    a full fleet."""
    left_s = max(0.0, status.left_s - base.start_s())
    worth = spot_path(seen, fleet, base.prices, status.examples_left, left_s).usd_per_example
    usd, rates = stairs(seen, fleet, ())
    taken = np.where(usd <= worth * (1 + tuning.ROUNDING), rates, 0.0)
    bought: Array = taken.sum(axis=1) / fleet.rates[-1]
    return bought


def _early_s(status: JobStatus, fleet: Fleet, there: Availability, chance: float) -> float:
    """Return by how much a job is early that on-demand VMs have to finish, with so much probability.

    The policy rents them when slack is ``PATIENCE`` of the time left, at the latest loss of
    spot VMs before the end, and keeps them to it; slack is then what it was.
    """
    train_s = status.examples_left / fleet.rates[-1]
    last_s = min(train_s / (1 - tuning.PATIENCE), -there.cycle_s * math.log(chance))
    return max(status.margin_s(fleet), tuning.PATIENCE * last_s)


def _spot_alone(status: JobStatus, fleet: Fleet, seen: Markets) -> Forecast:
    """Return the forecast of spot VMs alone, without a deadline."""
    there = np.isfinite(seen)
    throughputs = [fleet.rates[count] for count in there.sum(axis=1)]
    usd_rates = (np.where(there, seen, 0.0).sum(axis=1) / HOUR_S).tolist()
    throughput = sum(throughputs) / len(throughputs)
    usd_per_s = sum(usd_rates) / len(usd_rates)
    examples, now_s = status.examples_left, status.now_s
    left = math.inf if status.usd_left is None else max(0.0, status.usd_left)
    soonest_s = now_s + tuning.BEST_CASE_TIME * examples / fleet.rates[-1]
    if throughput <= 0:
        return Forecast(
            finish_s=Interval(low=soonest_s, expected=math.inf, high=math.inf),
            usd=Interval(low=0.0, expected=math.inf, high=left),
        )
    rates = zip(usd_rates, throughputs, strict=True)
    min_usd = tuning.BEST_CASE_TIME * examples * min(u / r for u, r in rates if r > 0)
    usd = examples * usd_per_s / throughput
    ends_usd = max(0.0, left - status.reserve_s * usd_per_s)
    if min_usd > ends_usd:
        soonest_s = math.inf
        min_usd = max(0.0, left - status.reserve_s * max(usd_rates))
    return Forecast(
        finish_s=Interval(
            low=soonest_s,
            expected=now_s + examples / throughput if usd <= ends_usd else math.inf,
            high=math.inf,
        ),
        usd=Interval(low=min(min_usd, ends_usd), expected=min(usd, ends_usd), high=left),
    )
