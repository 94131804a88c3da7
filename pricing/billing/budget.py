"""Arithmetic of a budget. What a fleet may still spend unwatched counts as spent."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.pricing.billing.money import FREE, NOTHING, Money, Rate, is_amount

LAST_CHECKPOINT_S = 120.0
"""How long an ending job may take to write its last checkpoint; VMs whose lease is over
take no longer either."""
RETURN_S = 30.0
"""How long it may take to return VMs."""
WORTH_S = 300.0
"""A VM is rented only if the budget bears the fleet for so long beside the reserve: less
would hardly be more than its boot."""


def reserve_s(lease_s: float) -> float:
    """Return for how long a fleet may cost on after the decision to end the job.

    The last checkpoint and the return of the VMs; and should the manager die on the way,
    the lease, at whose end the VMs checkpoint and return themselves.
    """
    return LAST_CHECKPOINT_S + RETURN_S + lease_s + LAST_CHECKPOINT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The caps of a job, and where it stands under them."""

    cap: Money | None
    """For the whole job; None: no bound."""
    hourly_cap: Rate | None
    spent: Money
    rate: Rate
    """Of the fleet, machines that are on their way included."""
    reserve_s: float
    """How long a fleet may run on before anybody stops it."""
    side: Rate = FREE
    """What storage, and the traffic of the plan that runs, cost beside the machines."""
    coming: Money = NOTHING
    """What machines that are on their way will pay at once when they boot."""

    @property
    def pace(self) -> Rate:
        """What the job spends as time goes on: machines and all beside them."""
        return self.rate + self.side

    @property
    def kept(self) -> Money:
        """What the fleet may still spend though the job has begun to end."""
        return self.pace.over(self.reserve_s) + self.coming

    @property
    def committed(self) -> Money:
        """What counts as spent: a lower cap would end the job at once."""
        return self.spent + self.kept

    @property
    def lasts_s(self) -> float | None:
        """How long the fleet may train on, 0 or less if no longer; None: for ever."""
        if self.cap is None or self.pace == FREE:
            return None
        return self.pace.lasts_s(self.cap - self.committed)

    def affords(self, usd_per_hour: float, most: int, once: Money = NOTHING) -> int:
        """Return how many more machines of this price the caps bear.

        Args:
            usd_per_hour: Price of one; none is afforded at what is no price.
            most: The answer is never more.
            once: What each of them pays at once when it boots.
        """
        if not is_amount(usd_per_hour):
            return 0
        price, counts = Rate.of(usd_per_hour), [most]
        if self.hourly_cap is not None and price > FREE:
            counts.append((self.hourly_cap - self.rate) // price)
        needed_s = self.reserve_s + WORTH_S
        each = price.over(needed_s) + once
        if self.cap is not None and each > NOTHING:
            left = self.cap - self.spent - self.coming - self.pace.over(needed_s)
            counts.append(left.grains // each.grains)
        return max(0, min(counts))
