"""When a job will be done and what it will cost yet, with an interval that is kept.

The expected cost is that of the cheapest way through the markets to come, were they a
shuffle of those seen. How far the truth strays from it was measured on replays of seeded
markets (docs/promise.md), other ones than those that its coverage is reported for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spottrain.pricing.deadline.best_case import SOONEST
from spottrain.pricing.deadline.fallback import (
    TIE,
    OnDemandFallback,
    on_demand_fallback,
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
    Market,
    MarketOutlook,
    market_of,
    spot_path,
)
from spottrain.units import HOUR_S

USD_LOW = 0.91
"""The least cost as a multiple of the cheapest way's."""
USD_MEAN, USD_HIGH = 0.1, 0.55
"""The expected and the most cost: parts of the way from the cheapest way up to what
on-demand VMs alone would cost."""
HASTE_LOW, HASTE_MEAN, HASTE_HIGH = 0.87, 0.2, 1.0
"""The same for a job in haste, from what all the spot VMs that there are would cost."""
FINISH_LOW, FINISH_MEAN, FINISH_HIGH = 0.43, 0.86, 0.995
"""Parts of the time between the earliest finish and the deadline."""


def forecast(
    status: JobStatus,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Sequence[Holdings],
    outlook: MarketOutlook,
    *,
    cost_optimal: bool = True,
) -> Forecast:
    """Return finish and cost to expect under ``promise.decide``.

    Arguments as for ``promise.decide``. Without a deadline, or on-demand VMs that the
    budget bears, nobody knows how long spot VMs will be away: the upper ends are infinite.
    What is expected is so too where no VMs are within the caps, or the budget ends first;
    the job's money is the most that it costs.
    """
    examples = status.examples_left
    if examples <= 0:
        done = Interval(low=status.now_s, expected=status.now_s, high=status.now_s)
        return Forecast(finish_s=done, usd=Interval(low=0.0, expected=0.0, high=0.0))
    rented = {vms.name: vms.ready + vms.booting for vms in holdings}
    base = on_demand_fallback(status, fleet, supplies, holdings)
    present = market_of(fleet, _borne(status, fleet, supplies, rented), {})
    outlook = _seen(status, fleet, supplies, outlook)
    soon = _at_leisure(status, fleet, (*outlook.looks, present))
    size = base.fastest(examples, status.usd_left)
    if status.deadline_s is None or not size:
        return soon
    if status.left_s < base.train_s(size, examples):
        return _late(status, fleet, base, size)
    slow = Forecast(
        finish_s=_finish(status, fleet, base, rented),
        usd=_bill(status, fleet, base, outlook, present),
    )
    if not cost_optimal:
        most_usd = base.usd(_net_size(status, base), examples)
        slow = _hastened(slow, soon, status, most_usd)
    return replace(slow, usd=_paid(slow.usd, status))


def _borne(
    status: JobStatus,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Mapping[str, int],
) -> list[Supply]:
    """Return what the cap of an hour's price bears, the cheapest first; VMs that are held
    count as VMs to be had."""
    cap = status.usd_per_hour_cap
    left = math.inf if cap is None else cap * (1 + TIE)
    borne = []
    for supply in sorted(supplies, key=lambda s: s.usd_per_hour):
        free = fleet.most if supply.available is None else supply.available
        count = 0
        if supply.spot:
            count = _count(
                supply.usd_per_hour, free + holdings.get(supply.name, 0), left
            )
        left -= count * supply.usd_per_hour
        borne.append(replace(supply, available=count))
    return borne


def _seen(
    status: JobStatus,
    fleet: Fleet,
    supplies: Sequence[Supply],
    outlook: MarketOutlook,
) -> MarketOutlook:
    """Return the markets that have been with so many VMs as the cap would have borne.

    Of prices then only those are known that hold what interruptions waste.
    """
    cap = status.usd_per_hour_cap
    if cap is None:
        return outlook
    wastes = [
        supply.effective_usd_per_hour(fleet) / supply.usd_per_hour
        for supply in supplies
        if supply.spot and supply.usd_per_hour > 0
    ]
    looks = []
    for seen in outlook.looks:
        left, rows = cap * (1 + TIE) * max(wastes, default=1.0), []
        for usd, there in seen:
            count = _count(usd, there, left)
            left -= count * usd
            rows.append((usd, count))
        looks.append(tuple((usd, count) for usd, count in rows if count))
    return replace(outlook, looks=tuple(looks))


def _count(usd_per_hour: float, most: int, left: float) -> int:
    """Return how many VMs of a price are within what is left of the cap."""
    if usd_per_hour * most <= left:
        return most
    return max(0, min(most, math.floor(left / usd_per_hour)))


def _bill(
    status: JobStatus,
    fleet: Fleet,
    base: OnDemandFallback,
    outlook: MarketOutlook,
    present: Market,
) -> Interval:
    """Return dollars between the cheapest way and on-demand VMs."""
    examples = status.examples_left
    left_s = max(0.0, status.left_s - base.start_s())
    cheapest = spot_path(outlook, present, fleet, base.prices, examples, left_s).usd
    dearest = base.usd(_net_size(status, base), examples)
    above = max(dearest, cheapest) - cheapest
    return Interval(
        low=USD_LOW * cheapest,
        expected=cheapest + USD_MEAN * above,
        high=cheapest + USD_HIGH * above,
    )


def _paid(usd: Interval, status: JobStatus) -> Interval:
    """Return dollars that are not more than there are: the budget ends the job."""
    left = math.inf if status.usd_left is None else max(0.0, status.usd_left)
    return Interval(
        low=min(usd.low, left),
        expected=min(usd.expected, left),
        high=min(usd.high, left),
    )


def _late(
    status: JobStatus, fleet: Fleet, base: OnDemandFallback, size: int
) -> Forecast:
    """Return what to expect of on-demand VMs that train to the end, were it not for the
    deadline."""
    examples, now_s = status.examples_left, status.now_s
    train_s, usd = base.train_s(size, examples), base.usd(size, examples)
    bill = Interval(low=USD_LOW * usd, expected=usd, high=usd / USD_LOW)
    return Forecast(
        finish_s=Interval(
            low=now_s + SOONEST * examples / fleet.rates[-1],
            expected=now_s + base.start_s() + train_s,
            high=now_s + base.start_s() + train_s / SOONEST,
        ),
        usd=_paid(bill, status),
    )


def _net_size(status: JobStatus, base: OnDemandFallback) -> int:
    """Return the cheapest size on demand that is in time, else the largest."""
    left_s = max(0.0, status.left_s - base.start_s())
    return base.cheapest(status.examples_left, left_s) or base.most


def _hastened(
    slow: Forecast, soon: Forecast, status: JobStatus, most_usd: float
) -> Forecast:
    """Return what to expect of all the spot VMs that there are, with a net below.

    Args:
        slow: With a deadline, were dollars all that counts.
        soon: With all the spot VMs that there are, were there no deadline.
        status: The job's.
        most_usd: What on-demand VMs alone would cost.
    """
    finish_s = min(soon.finish_s.expected, slow.finish_s.expected)
    usd = soon.usd.expected if soon.usd.expected < math.inf else slow.usd.expected
    above = max(0.0, most_usd - usd)
    return Forecast(
        finish_s=Interval(
            low=min(soon.finish_s.low, finish_s),
            expected=finish_s,
            high=slow.finish_s.high,
        ),
        usd=Interval(
            low=HASTE_LOW * usd,
            expected=usd + (HASTE_MEAN * above if above < math.inf else 0.0),
            high=usd + HASTE_HIGH * above,
        ),
    )


def _finish(
    status: JobStatus, fleet: Fleet, base: OnDemandFallback, rented: dict[str, int]
) -> Interval:
    """Return an interval between the earliest finish there is and the latest."""
    boot_s = 0.0 if sum(rented.values()) else base.start_s()
    train_s = status.examples_left / fleet.rates[-1]
    earliest_s = status.now_s + boot_s + train_s
    latest_s = max(earliest_s, status.now_s + status.left_s)
    if status.left_s < boot_s + train_s:  # late: as late as on-demand VMs make it
        latest_s = earliest_s + base.start_s()

    def at(part: float) -> float:
        return earliest_s + part * (latest_s - earliest_s)

    return Interval(low=at(FINISH_LOW), expected=at(FINISH_MEAN), high=at(FINISH_HIGH))


def _at_leisure(
    status: JobStatus, fleet: Fleet, looks: Sequence[tuple[tuple[float, int], ...]]
) -> Forecast:
    """Return the interval for spot VMs that may take as long as they like."""
    throughputs = [fleet.rates[sum(count for _, count in seen)] for seen in looks]
    bills = [sum(usd * count for usd, count in seen) / HOUR_S for seen in looks]
    pace, bill = sum(throughputs) / len(throughputs), sum(bills) / len(bills)
    examples, now_s = status.examples_left, status.now_s
    left = math.inf if status.usd_left is None else max(0.0, status.usd_left)
    soonest_s = now_s + SOONEST * examples / fleet.rates[-1]
    if pace <= 0:
        return Forecast(
            finish_s=Interval(low=soonest_s, expected=math.inf, high=math.inf),
            usd=Interval(low=0.0, expected=math.inf, high=left),
        )
    least_usd = (
        SOONEST
        * examples
        * min(
            bill / rate
            for bill, rate in zip(bills, throughputs, strict=True)
            if rate > 0
        )
    )
    usd = examples * bill / pace
    ends_usd = max(0.0, left - status.kept_s * bill)
    if least_usd > ends_usd:
        soonest_s, least_usd = math.inf, max(0.0, left - status.kept_s * max(bills))
    return Forecast(
        finish_s=Interval(
            low=soonest_s,
            expected=now_s + examples / pace if usd <= ends_usd else math.inf,
            high=math.inf,
        ),
        usd=Interval(
            low=min(least_usd, ends_usd), expected=min(usd, ends_usd), high=left
        ),
    )
