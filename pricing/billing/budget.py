"""Arithmetic of a budget. The reserve, which a fleet may still spend, counts as spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spottrain.pricing.billing.money import FREE, NOTHING, Money, Rate, is_amount

BudgetKey = Literal["max_usd", "max_gpu_hours"]
UNITS: Mapping[BudgetKey, str] = {"max_usd": "USD", "max_gpu_hours": "GPU-hours"}
LAST_CHECKPOINT_S = 120.0
"""Longest time for the last checkpoint, of an ending job or of VMs whose lease is over."""
RETURN_S = 30.0
"""Longest time to return VMs."""
WORTH_S = 300.0
"""A VM is rented only if the budget pays the fleet for so long beside the reserve: less is
hardly more than its boot."""


def reserve_s(lease_s: float) -> float:
    """Return how long a fleet may keep billing after the decision to end the job.

    The last checkpoint and the return of the VMs; if the manager dies meanwhile, also the
    lease, after which VMs checkpoint and return themselves.
    """
    return LAST_CHECKPOINT_S + RETURN_S + lease_s + LAST_CHECKPOINT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The caps of a job, and its spending under them: in dollars, or in GPU-hours, which are
    counted like dollars: a VM's price is the number of its GPUs."""

    key: BudgetKey = "max_usd"
    """Of the section ``budget`` of the job file: where the cap is."""

    cap: Money | None
    """For the whole job; None: no cap."""
    hourly_cap: Rate | None = None
    spent: Money
    rate: Rate
    """Of the fleet, VMs being launched included."""
    reserve_s: float
    """See ``reserve_s``."""
    side_rate: Rate = FREE
    """Of storage, and of the running plan's traffic."""
    pending: Money = NOTHING
    """One-time charges of VMs that have not booted yet."""

    @property
    def unit(self) -> str:
        """Of what is spent, for people."""
        return UNITS[self.key]

    @property
    def job_rate(self) -> Rate:
        """Rate of the whole job: fleet, storage and traffic."""
        return self.rate + self.side_rate

    @property
    def reserve(self) -> Money:
        """What the fleet may still spend once the job begins to end."""
        return self.job_rate.over(self.reserve_s) + self.pending

    @property
    def committed(self) -> Money:
        """Money that counts as spent: a lower cap would end the job at once."""
        return self.spent + self.reserve

    @property
    def lasts_s(self) -> float | None:
        """How long the fleet may go on training; None: no limit."""
        if self.cap is None or self.job_rate == FREE:
            return None
        return self.job_rate.lasts_s(self.cap - self.committed)

    def affords(self, usd_per_hour: float, max_vms: int, once: Money = NOTHING) -> int:
        """Return how many more VMs of a price the caps allow.

        Args:
            usd_per_hour: Price of one, or the number of its GPUs; 0 VMs if it is invalid.
            max_vms: The answer is never more.
            once: One-time charge of each when it boots.
        """
        if not is_amount(usd_per_hour):
            return 0
        price, counts = Rate.of(usd_per_hour), [max_vms]
        if self.hourly_cap is not None and price > FREE:
            counts.append((self.hourly_cap - self.rate) // price)
        needed_s = self.reserve_s + WORTH_S
        each = price.over(needed_s) + once
        if self.cap is not None and each > NOTHING:
            left = self.cap - self.spent - self.pending - self.job_rate.over(needed_s)
            counts.append(left.grains // each.grains)
        return max(0, min(counts))
