"""When a job will be done and what it will cost yet, with an interval that is kept.

The expected cost is that of the cheapest way through the markets to come, were they a
shuffle of those seen. How far the truth strays from it was measured on replays of seeded
markets (docs/promise.md), other ones than those that its coverage is reported for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spottrain.pricing.promise_net import Net, net
from spottrain.pricing.promise_outlook import Market, Outlook, market, plan
from spottrain.pricing.promise_terms import (
    HOUR_S,
    Fleet,
    Held,
    Interval,
    Projection,
    Standing,
    Supply,
)

USD_LOW = 0.91
"""The least cost as a multiple of the cheapest way's."""
USD_MEAN, USD_HIGH = 0.1, 0.55
"""The expected and the most cost: parts of the way from the cheapest way up to what
on-demand VMs alone would cost."""
HASTE_LOW, HASTE_MEAN, HASTE_HIGH = 0.87, 0.2, 1.0
"""The same for a job in haste, from what all the spot VMs that there are would cost."""
FINISH_LOW, FINISH_MEAN, FINISH_HIGH = 0.43, 0.86, 0.995
"""Parts of the time between the earliest finish and the deadline."""
SOONEST = 0.9
"""The shortest a job in haste may take, as a part of what its largest fleet is counted on
to take: fleets are promised to do less than they are measured to."""


def project(
    standing: Standing,
    fleet: Fleet,
    supplies: Sequence[Supply],
    held: Sequence[Held],
    outlook: Outlook,
    *,
    thrifty: bool = True,
) -> Projection:
    """Return finish and cost to expect under ``promise.decide``.

    Arguments as for ``promise.decide``. Without a deadline nobody knows how long spot VMs
    will be away, so the upper ends are infinite; so they are where no VMs can be had.
    """
    rented = {vms.name: vms.ready + vms.booting for vms in held}
    present = market(fleet, supplies, rented)
    base = net(standing, fleet, supplies, held)
    if standing.examples_left <= 0:
        done = Interval(
            low=standing.now_s, expected=standing.now_s, high=standing.now_s
        )
        return Projection(finish_s=done, usd=Interval(low=0.0, expected=0.0, high=0.0))
    if standing.deadline_s is None:
        return _at_leisure(standing, fleet, (*outlook.looks, present))
    slow = Projection(
        finish_s=_finish(standing, fleet, base, rented),
        usd=_bill(standing, fleet, base, outlook, present),
    )
    is_late = standing.left_s < base.train_s(base.most, standing.examples_left)
    if thrifty or is_late:
        return slow
    soon = _at_leisure(standing, fleet, (*outlook.looks, present))
    size = _net_size(standing, base)
    most_usd = base.usd(size, standing.examples_left) if size else math.inf
    return _hastened(slow, soon, standing, most_usd)


def _bill(
    standing: Standing, fleet: Fleet, base: Net, outlook: Outlook, present: Market
) -> Interval:
    """Return dollars between the cheapest way and on-demand VMs; late, the latter's."""
    examples = standing.examples_left
    left_s = max(0.0, standing.left_s - base.start_s())
    cheapest = plan(outlook, present, fleet, base.prices, examples, left_s).usd
    size = _net_size(standing, base)
    dearest = base.usd(size, examples) if size else math.inf
    bears = standing.usd_left is None or dearest <= standing.usd_left
    if size and bears and standing.left_s < base.train_s(base.most, examples):
        return Interval(low=USD_LOW * dearest, expected=dearest, high=dearest / USD_LOW)
    above = max(dearest, cheapest) - cheapest
    return Interval(
        low=USD_LOW * cheapest,
        expected=cheapest + USD_MEAN * above,
        high=cheapest + USD_HIGH * above,
    )


def _net_size(standing: Standing, base: Net) -> int:
    """Return the cheapest size on demand that is in time, else the largest."""
    left_s = max(0.0, standing.left_s - base.start_s())
    return base.cheapest(standing.examples_left, left_s) or base.most


def _hastened(
    slow: Projection, soon: Projection, standing: Standing, most_usd: float
) -> Projection:
    """Return what to expect of all the spot VMs that there are, with a net below.

    Args:
        slow: With a deadline, were dollars all that counts.
        soon: With all the spot VMs that there are, were there no deadline.
        standing: The job's.
        most_usd: What on-demand VMs alone would cost.
    """
    soonest_s = SOONEST * (soon.finish_s.low - standing.now_s)
    finish_s = min(soon.finish_s.expected, slow.finish_s.expected)
    usd = soon.usd.expected if soon.usd.expected < math.inf else slow.usd.expected
    above = max(0.0, most_usd - usd)
    return Projection(
        finish_s=Interval(
            low=min(standing.now_s + max(0.0, soonest_s), finish_s),
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
    standing: Standing, fleet: Fleet, base: Net, rented: dict[str, int]
) -> Interval:
    """Return an interval between the earliest finish there is and the latest."""
    boot_s = 0.0 if sum(rented.values()) else base.start_s()
    train_s = standing.examples_left / fleet.rates[-1]
    earliest_s = standing.now_s + boot_s + train_s
    latest_s = max(earliest_s, standing.now_s + standing.left_s)
    if standing.left_s < boot_s + train_s:  # late: as late as on-demand VMs make it
        latest_s = earliest_s + base.start_s()

    def at(part: float) -> float:
        return earliest_s + part * (latest_s - earliest_s)

    return Interval(low=at(FINISH_LOW), expected=at(FINISH_MEAN), high=at(FINISH_HIGH))


def _at_leisure(
    standing: Standing, fleet: Fleet, looks: Sequence[tuple[tuple[float, int], ...]]
) -> Projection:
    """Return the interval for spot VMs that may take as long as they like."""
    paces = [fleet.rates[sum(count for _, count in seen)] for seen in looks]
    bills = [sum(usd * count for usd, count in seen) / HOUR_S for seen in looks]
    pace = sum(paces) / len(paces)
    if pace <= 0:
        endless = Interval(low=0.0, expected=math.inf, high=math.inf)
        return Projection(finish_s=endless, usd=endless)
    examples, now_s = standing.examples_left, standing.now_s
    cheapest = min(
        bill / rate for bill, rate in zip(bills, paces, strict=True) if rate > 0
    )
    most_usd = math.inf if standing.usd_left is None else standing.usd_left
    usd = examples * sum(bills) / sum(paces)
    return Projection(
        finish_s=Interval(
            low=now_s + examples / fleet.rates[-1],
            expected=now_s + examples / pace,
            high=math.inf,
        ),
        usd=Interval(low=examples * cheapest, expected=usd, high=max(usd, most_usd)),
    )
