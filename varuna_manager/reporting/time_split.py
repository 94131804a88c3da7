"""Where the rented time and its money went; pure.

Every second that a VM is billed for goes to one of six: productive, morph, boot, idle,
lost, manager. A VM of several slots is split by slots: one of two in a plan is half a VM at work.
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
"""What the job did for a while, as far as its slots are concerned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """One VM until a moment, as its bill has it. Seconds since the epoch."""

    vm_id: str
    offer: Offer
    """As it was at launch."""
    trains: bool = True
    """Whether it was rented to train; else the manager ran on it."""
    slots: int
    launched_s: float
    ready_s: float
    """When its slots could train; ``end_s`` if they never could."""
    end_s: float
    """When its billing ended, or the moment up to which it is told."""
    billed_s: float
    """What the cloud charges for: at times more than the VM's life (a least charge, a
    started second)."""
    cost: Money
    if_on_demand: Money
    """What it would have cost on demand where it ran."""


def rental(vm_id: str, line: LedgerLine, slots: int, at_s: float) -> Rental | None:
    """Return what a line of the ledger says of a VM until ``at_s``; None if it is not
    known what was rented.

    Args:
        vm_id: The VM.
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
    """A while in which a job did one thing."""

    from_s: float
    to_s: float
    activity: Activity
    slots: Mapping[str, int]
    """How many slots of which VM took part; all others were idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """VM-seconds by what they were spent on."""

    productive_s: float = 0.0
    """Mini-batches that are in the final history."""
    morph_s: float = 0.0
    """Between training and training: getting out, handing over, forming, saving."""
    boot_s: float = 0.0
    """From launch until ready, and measuring and writing the first weights."""
    idle_s: float = 0.0
    """Ready, but in no plan, or there was none."""
    lost_s: float = 0.0
    """Computed and thrown away: in the air when a peer died, or undone by a restore."""
    manager_s: float = 0.0
    """VMs that the manager ran on."""

    @property
    def billed_s(self) -> float:
        """All of them together."""
        return math.fsum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the seconds by kind: ``productive``, ``morph``, …"""
        return {f.name.removesuffix("_s"): getattr(self, f.name) for f in fields(self)}


KINDS: tuple[str, ...] = tuple(TimeSplit().parts())
"""What time is spent on, in the order in which people are told."""
_KIND_OF: dict[Activity, str] = {
    "training": "productive",
    "morphing": "morph",
    "preparing": "boot",
    "lost": "lost",
}


def split_time(rental: Rental, intervals: Sequence[Interval]) -> TimeSplit:
    """Return what a VM's billed seconds were spent on.

    Args:
        rental: The VM. What is billed beyond its life counts as idle.
        intervals: What the job did, by time, without overlaps.
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
    # What is left; less than a microsecond is none.
    idle_s = round(rental.billed_s - math.fsum(spent.values()), 6)
    spent["idle"] = max(0.0, idle_s)
    return TimeSplit(**{f"{kind}_s": seconds for kind, seconds in spent.items()})


def sum_of(splits: Iterable[TimeSplit]) -> TimeSplit:
    """Return several together."""
    rows = [one.parts() for one in splits]
    sums = {kind: math.fsum(row[kind] for row in rows) for kind in KINDS}
    return TimeSplit(**{f"{kind}_s": seconds for kind, seconds in sums.items()})


def share_money(cost: Money, split: TimeSplit) -> dict[str, Money]:
    """Return what each kind of a VM's time cost; together it is ``cost``.

    Time has one price here: where the price moved while the VM ran, its mean.
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
