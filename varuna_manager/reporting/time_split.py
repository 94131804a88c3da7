"""Splits rented time and its cost by what it was spent on; pure.

Every second that a VM is billed for is of one of six kinds: productive, morph, boot,
idle, lost, manager. A VM of several slots is split by slots: with one of two slots in a
plan, half of the VM is at work.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Literal

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.billing.ledger import LedgerLine
from spottrain.pricing.billing.money import NOTHING, Money, ceil_us

Activity = Literal["waiting", "preparing", "morphing", "training", "lost"]
"""What a job does at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """The bill of one VM until a moment. Times in seconds since the epoch."""

    vm_id: str
    offer: Offer
    """The offer at launch."""
    trains: bool = True
    """True if it was rented to train; else the manager ran on it."""
    slots: int
    launched_s: float
    ready_s: float
    """When its slots could train; ``end_s`` if they never could."""
    end_s: float
    """When its billing ended, or the moment of the report."""
    billed_s: float
    """What the cloud charges for; may exceed the VM's lifetime (minimum charge, started
    second)."""
    cost: Money
    if_on_demand: Money
    """What it would have cost on demand where it ran."""


def rental(vm_id: str, line: LedgerLine, slots: int, at_s: float) -> Rental | None:
    """Return a VM's bill until ``at_s`` from its line of the ledger; None if it is not
    known what was rented.

    Args:
        line: Its line.
        slots: How many it has; 0 if that is not known.
        at_s: Seconds since the epoch.
    """
    if line.offer is None:
        return None
    at_us = ceil_us(at_s)
    end_us = at_us if line.is_open else line.ended_us or line.gone_us or at_us
    end_us = max(end_us, line.from_us)
    ready_us = end_us if line.ready_us is None else min(line.ready_us, end_us)
    spending = line.spending(at_us)
    return Rental(
        vm_id=vm_id,
        offer=line.offer,
        trains=line.trains,
        slots=slots or max(1, line.offer.gpus),
        launched_s=line.from_us / 1e6,
        ready_s=max(ready_us, line.from_us) / 1e6,
        end_s=end_us / 1e6,
        billed_s=spending.billed_us / 1e6,
        cost=spending.spot + spending.on_demand,
        if_on_demand=spending.if_on_demand,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An interval in which a job did one thing."""

    from_s: float
    to_s: float
    activity: Activity
    slots: Mapping[str, int]
    """Number of participating slots by VM; all others were idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """VM-seconds by kind."""

    productive_s: float = 0.0
    """Training that is part of the final result."""
    morph_s: float = 0.0
    """Between two plans: stopping, handing state over, forming, saving."""
    boot_s: float = 0.0
    """From launch until ready, measuring, and writing the first weights."""
    idle_s: float = 0.0
    """Ready, but not in a plan."""
    lost_s: float = 0.0
    """Computed and discarded: in flight when a peer died, or undone by a restore."""
    manager_s: float = 0.0
    """VMs that the manager ran on."""

    @property
    def billed_s(self) -> float:
        """The sum of all kinds."""
        return math.fsum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the seconds by kind: ``productive``, ``morph``, …"""
        return {f.name.removesuffix("_s"): getattr(self, f.name) for f in fields(self)}


KINDS: tuple[str, ...] = tuple(TimeSplit().parts())
"""Kinds of time, in the order of reports."""
_KIND_OF: dict[Activity, str] = {
    "training": "productive",
    "morphing": "morph",
    "preparing": "boot",
    "lost": "lost",
}


def split_time(rental: Rental, intervals: Sequence[Interval]) -> TimeSplit:
    """Return a VM's billed seconds by kind.

    Args:
        rental: The VM. Time billed beyond its lifetime counts as idle.
        intervals: What the job did, in order, without overlaps.
    """
    if not rental.trains:
        return TimeSplit(manager_s=rental.billed_s)
    spent = dict.fromkeys(KINDS, 0.0)
    spent["boot"] = rental.ready_s - rental.launched_s
    first = bisect_right(intervals, rental.ready_s, key=lambda one: one.to_s)
    for one in intervals[first:]:
        if one.from_s >= rental.end_s:
            break
        kind = _KIND_OF.get(one.activity)
        slots = one.slots.get(rental.vm_id, 0)
        if kind is not None and slots:
            seconds = min(one.to_s, rental.end_s) - max(one.from_s, rental.ready_s)
            spent[kind] += seconds * min(1.0, slots / rental.slots)
    # The rest; less than a microsecond is rounding.
    idle_s = round(rental.billed_s - math.fsum(spent.values()), 6)
    spent["idle"] = max(0.0, idle_s)
    return TimeSplit(**{f"{kind}_s": seconds for kind, seconds in spent.items()})


def sum_of(splits: Iterable[TimeSplit]) -> TimeSplit:
    """Return the sum of several splits."""
    rows = [one.parts() for one in splits]
    sums = {kind: math.fsum(row[kind] for row in rows) for kind in KINDS}
    return TimeSplit(**{f"{kind}_s": seconds for kind, seconds in sums.items()})


def share_money(cost: Money, split: TimeSplit) -> dict[str, Money]:
    """Return the cost of each kind of a VM's time; together they are ``cost``.

    The mean price is used where the price changed while the VM ran.
    """
    billed_s, given = split.billed_s, NOTHING
    shares: dict[str, Money] = {}
    seconds = 0.0
    for kind, part_s in split.parts().items():
        seconds += part_s
        upto = Money(int(cost.grains * Fraction(seconds) / Fraction(billed_s or 1.0)))
        shares[kind], given = upto - given, upto
    shares["idle"] += cost - given
    return shares
