"""The best that may happen to a job: what no luck with spot VMs can better.

A necessary condition where nothing can be promised: if a fleet that nobody takes away, at
the lowest price there is now, would be late or cost too much, so will any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.pricing.deadline.fallback import LEEWAY_S, TIE, round_up
from spottrain.pricing.deadline.model import (
    Feasibility,
    Fleet,
    Holdings,
    JobStatus,
    Supply,
)
from spottrain.units import HOUR_S

SOONEST = 0.9
"""The shortest a job may take, as a part of what its largest fleet is counted on to take:
fleets are promised to do less than they are measured to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCase:
    """The rest of a job in the best case."""

    vms: int
    """As many as the job may have, and the cap of an hour's price bears."""
    takes_s: float
    """By all of them, a boot included if nothing is rented yet."""
    usd: float
    """By the fleet that does it for least, what is kept back included."""
    usd_per_hour: float
    """Of the cheapest VM."""


def best_case(
    status: JobStatus,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Sequence[Holdings] = (),
) -> BestCase | None:
    """Return the best case: all VMs at once, none lost, at the lowest price there is now.

    That some of them are not to be had for a moment does not count.

    Args:
        status: Of the job.
        fleet: What fleets train.
        supplies: What may be rented.
        holdings: What is rented.

    Returns:
        None if nothing is left to do, or no VMs that train it are within the cap now.
    """
    price = min((supply.usd_per_hour for supply in supplies), default=math.inf)
    cap = status.usd_per_hour_cap
    limit = math.inf if cap is None else cap * (1 + TIE)
    sizes = [n for n in range(1, fleet.most + 1) if n * price <= limit]
    trains = [n for n in sizes if fleet.rates[n] > 0]
    examples = SOONEST * status.examples_left
    if math.isinf(price) or not trains or examples <= 0:
        return None
    boot_s = 0.0 if any(vms.ready + vms.booting for vms in holdings) else fleet.boot_s
    train_usd = examples * min(n * price / fleet.rates[n] for n in trains)
    rate = fleet.rates[sizes[-1]]
    return BestCase(
        vms=sizes[-1],
        takes_s=boot_s + examples / rate,
        usd=(train_usd + trains[0] * price * (boot_s + status.kept_s)) / HOUR_S,
        usd_per_hour=price,
    )


def too_late(status: JobStatus, found: BestCase | None) -> str:
    """Return why the deadline cannot be kept in the best case; empty if it can."""
    if found is None or status.deadline_s is None:
        return ""
    left_s = status.deadline_s - status.now_s
    if found.takes_s <= left_s:
        return ""
    return (
        f"{_vms(found.vms)} that nobody takes away need {found.takes_s / HOUR_S:,.3f} h, "
        f"the deadline is in {left_s / HOUR_S:,.3f} h"
    )


def over_budget(status: JobStatus, found: BestCase | None) -> str:
    """Return why the budget ends the job in the best case; empty if it does not."""
    usd_left = status.usd_left
    if found is None or usd_left is None or found.usd <= usd_left * (1 + TIE):
        return ""
    return (
        f"undisturbed and at today's lowest price of ${found.usd_per_hour:,.2f} per hour "
        f"it costs ${found.usd:,.2f}, to be spent: ${usd_left:,.2f}"
    )


def too_slow(status: JobStatus, fleet: Fleet, found: BestCase | None) -> str:
    """Return why the least rate is out of reach in the best case; empty if it is not.

    Where the cap bears no VM now, it is asked of the largest fleet.
    """
    vms = fleet.most if found is None else found.vms
    least, rate = status.min_examples_per_s, fleet.rates[vms] / SOONEST
    if least is None or rate >= least:
        return ""
    return (
        f"slo.min_examples_per_s: {least:g} is out of reach: {_vms(vms)} train "
        f"{rate:.3g} examples/s at the most"
    )


def conceivable(
    status: JobStatus,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Sequence[Holdings] = (),
) -> Feasibility:
    """Return whether deadline, budget and least rate can be met in the best case.

    A budget that is too small is no obstacle where there is no deadline: the job does what
    it pays for. It is told all the same.

    Arguments as for ``best_case``.

    Returns:
        With an empty reason if nothing is known against it.
    """
    found = best_case(status, fleet, supplies, holdings)
    late, dear = too_late(status, found), over_budget(status, found)
    slow = too_slow(status, fleet, found)
    short = bool(late or (dear and status.deadline_s is not None))
    cures = []
    if found is not None and late:
        after_h = round_up((found.takes_s + LEEWAY_S) / HOUR_S)
        cures.append(f"move the deadline to {after_h:,.2f} h from now at the earliest")
    if found is not None and dear:
        cures.append(f"raise the budget to ${round_up(found.usd):,.2f} at the least")
    if slow:
        cures.append("lower slo.min_examples_per_s")
    return Feasibility(
        possible=not (short or slow),
        reason=_why((late, dear, slow), cures, short),
        least_usd=None if found is None else found.usd,
        earliest_finish_s=None if found is None else status.now_s + found.takes_s,
    )


def _why(problems: Sequence[str], cures: Sequence[str], short: bool) -> str:
    _, dear, _ = problems
    if not any(problems):
        return ""
    head = "the budget ends the job before it is done: " if dear else ""
    if short:
        head = "deadline and budget cannot both be met: "
    return f"{head}{', and '.join(filter(None, problems))}; {' and '.join(cures)}"


def _vms(count: int) -> str:
    return f"{count} VM{'s' * (count != 1)}"
