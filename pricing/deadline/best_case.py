"""The best case of a job: all VMs at once, no preemptions, at the lowest price of now.

A necessary condition where nothing can be guaranteed: what is late or too expensive in the
best case always is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.pricing.deadline import model, tuning
from spottrain.pricing.deadline.fallback import round_up
from spottrain.units import HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCase:
    """The remaining work in the best case."""

    vms: int
    """As many as the job and the hourly cap allow."""
    takes_s: float
    """With all of them, a boot included if nothing is rented yet."""
    usd: float
    """With the cheapest fleet, the reserve included."""
    usd_per_hour: float
    """Of the cheapest VM."""


def best_case(
    status: model.JobStatus,
    fleet: model.Fleet,
    supplies: Sequence[model.Supply],
    holdings: Sequence[model.Holdings] = (),
) -> BestCase | None:
    """Return the best case, as if all supplies were available.

    Args:
        status: Of the job.
        fleet: Throughput by size.
        supplies: What may be rented.
        holdings: What is rented.

    Returns:
        None if nothing is left to do, or the hourly cap allows no fleet that trains.
    """
    price = min((supply.usd_per_hour for supply in supplies), default=math.inf)
    limit = status.usd_per_hour_limit
    sizes = [n for n in range(1, fleet.max_vms + 1) if n * price <= limit]
    trains = [n for n in sizes if fleet.rates[n] > 0]
    examples = tuning.BEST_CASE_TIME * status.examples_left
    if math.isinf(price) or not trains or examples <= 0:
        return None
    boot_s = 0.0 if any(vms.rented for vms in holdings) else fleet.boot_s
    train_usd = examples * min(n * price / fleet.rates[n] for n in trains)
    rate = fleet.rates[sizes[-1]]
    return BestCase(
        vms=sizes[-1],
        takes_s=boot_s + examples / rate,
        usd=(train_usd + trains[0] * price * (boot_s + status.reserve_s)) / HOUR_S,
        usd_per_hour=price,
    )


def too_late(status: model.JobStatus, found: BestCase | None) -> str:
    """Return why the deadline is missed even in the best case; empty if it is not."""
    if found is None or status.deadline_s is None:
        return ""
    left_s = status.deadline_s - status.now_s
    if found.takes_s <= left_s:
        return ""
    return (
        f"{_vms(found.vms)} without preemptions need {found.takes_s / HOUR_S:,.3f} h, "
        f"the deadline is in {left_s / HOUR_S:,.3f} h"
    )


def over_budget(status: model.JobStatus, found: BestCase | None) -> str:
    """Return why the budget ends the job even in the best case; empty if it does not."""
    usd_left = status.usd_left
    if found is None or usd_left is None or found.usd <= status.usd_limit:
        return ""
    return (
        f"without preemptions and at today's lowest price of "
        f"${found.usd_per_hour:,.2f} per hour it costs ${found.usd:,.2f}, left to spend: "
        f"${usd_left:,.2f}"
    )


def too_slow(status: model.JobStatus, fleet: model.Fleet, found: BestCase | None) -> str:
    """Return why ``min_examples_per_s`` is out of reach; empty if it is not.

    Where the hourly cap allows no VM now, the largest fleet counts.
    """
    vms = fleet.max_vms if found is None else found.vms
    minimum, rate = status.min_examples_per_s, fleet.rates[vms] / tuning.BEST_CASE_TIME
    if minimum is None or rate >= minimum:
        return ""
    return (
        f"slo.min_examples_per_s: {minimum:g} is out of reach: {_vms(vms)} train "
        f"{rate:.3g} examples/s at most"
    )


def feasible_at_best(
    status: model.JobStatus,
    fleet: model.Fleet,
    supplies: Sequence[model.Supply],
    holdings: Sequence[model.Holdings] = (),
) -> model.Feasibility:
    """Return whether deadline, budget and ``min_examples_per_s`` can be met at best.

    Without a deadline a budget that is too small is reported but no obstacle: the job
    trains for what it has.

    Arguments as for ``best_case``.

    Returns:
        With an empty reason if all can be met.
    """
    found = best_case(status, fleet, supplies, holdings)
    late, expensive = too_late(status, found), over_budget(status, found)
    slow = too_slow(status, fleet, found)
    short = bool(late or (expensive and status.deadline_s is not None))
    remedies = []
    if found is not None and late:
        after_h = round_up((found.takes_s + tuning.LEEWAY_S) / HOUR_S)
        remedies.append(f"move the deadline to {after_h:,.2f} h from now at the earliest")
    if found is not None and expensive:
        remedies.append(f"raise the budget to ${round_up(found.usd):,.2f} at least")
    if slow:
        remedies.append("lower slo.min_examples_per_s")
    return model.Feasibility(
        possible=not (short or slow),
        reason=_why((late, expensive, slow), remedies, short),
        min_usd=None if found is None else found.usd,
        earliest_finish_s=None if found is None else status.now_s + found.takes_s,
    )


def _why(problems: Sequence[str], remedies: Sequence[str], short: bool) -> str:
    _, expensive, _ = problems
    if not any(problems):
        return ""
    head = "the budget ends the job before it is done: " if expensive else ""
    if short:
        head = "deadline and budget cannot both be met: "
    return f"{head}{', and '.join(filter(None, problems))}; {' and '.join(remedies)}"


def _vms(count: int) -> str:
    return f"{count} VM{'s' * (count != 1)}"
