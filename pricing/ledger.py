"""What a job has spent: one line for each VM it ever had, and what storage and traffic cost.

A line is a set of facts, and adding one never depends on those before: whatever the order
in which they arrive, and however often, the same facts give the same ledger. Each line
costs price times billed time; the total is their exact sum (see ``money``).

When a VM ends is first what we believe (``gone``), then what the cloud says (``ended``),
which counts from then on. Until the first, a VM is open and costs on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from spottrain.cloud.provider import Offer
from spottrain.pricing.money import (
    FREE,
    NOTHING,
    Money,
    Rate,
    ceil_us,
    floor_us,
    total,
    total_rate,
)

_S = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a cloud bills."""

    unit_us: int = 1
    """Billed time is a multiple of it, rounded up."""
    least_us: int = 0
    """A VM is billed for so long at least."""
    follows_market: bool = False
    """Whether a running spot VM costs what the market asks now; else the price at which
    it was rented."""
    zone_usd_per_gb: float = 0.0
    """List price of a gigabyte that goes from one zone to another, both ends together."""
    region_usd_per_gb: float = 0.0
    """The same from one region to another."""


EXACT = Terms()
"""By the microsecond at the price of the launch, as the local cloud bills."""
TERMS: Mapping[str, Terms] = {
    "aws": Terms(
        unit_us=_S,
        least_us=60 * _S,
        follows_market=True,
        zone_usd_per_gb=0.02,
        region_usd_per_gb=0.02,
    ),
    "gcp": Terms(
        unit_us=_S,
        least_us=60 * _S,
        follows_market=True,
        zone_usd_per_gb=0.01,
        region_usd_per_gb=0.02,
    ),
    "azure": Terms(
        unit_us=60 * _S,
        least_us=60 * _S,
        follows_market=True,
        region_usd_per_gb=0.02,
    ),
}
"""By cloud; one that is not here bills exactly. Sources: docs/budget.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Money by what it went for, and the time that was paid."""

    spot: Money = NOTHING
    on_demand: Money = NOTHING
    storage: Money = NOTHING
    egress: Money = NOTHING
    boot: Money = NOTHING
    """The part of spot and on-demand that was paid before VMs could train."""
    if_on_demand: Money = NOTHING
    """What spot and on-demand would be, had every VM been rented on demand."""
    billed_us: int = 0
    """VM time that was billed, in microseconds."""

    @property
    def total(self) -> Money:
        """All that was spent."""
        return total((self.spot, self.on_demand, self.storage, self.egress))

    def plus(self, other: Spending, sign: int = 1) -> Spending:
        """Return both together; with a sign of -1 this without the other."""
        return Spending(
            spot=self.spot + other.spot * sign,
            on_demand=self.on_demand + other.on_demand * sign,
            storage=self.storage + other.storage * sign,
            egress=self.egress + other.egress * sign,
            boot=self.boot + other.boot * sign,
            if_on_demand=self.if_on_demand + other.if_on_demand * sign,
            billed_us=self.billed_us + other.billed_us * sign,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What is known of one VM; ``offer`` is None as long as only its end is."""

    offer: Offer | None = None
    """As it was rented."""
    trains: bool = True
    """Whether it was rented to train; else the manager runs on it."""
    rate: Rate = FREE
    """Its price at launch."""
    on_demand: Rate = FREE
    """What the same machine cost on demand then."""
    from_us: int = 0
    """When billing began; moments are microseconds since the epoch."""
    prices: tuple[tuple[int, Rate], ...] = ()
    """Later prices and when they began, for clouds that follow the market."""
    ready_us: int | None = None
    """When it could train for the first time."""
    seen_us: int | None = None
    """When the cloud last gave it to us as new."""
    gone_us: int | None = None
    """When we last believed it gone."""
    ended_us: int | None = None
    """When its billing ended, as the cloud says."""

    @property
    def is_open(self) -> bool:
        """Whether it costs on."""
        if self.ended_us is not None:
            return False
        if self.gone_us is None:
            return self.offer is not None
        return self.seen_us is not None and self.seen_us > self.gone_us

    @property
    def rate_now(self) -> Rate:
        """What it costs from now on."""
        return self.prices[-1][1] if self.prices else self.rate

    @property
    def _terms(self) -> Terms:
        return EXACT if self.offer is None else TERMS.get(self.offer.cloud, EXACT)

    def billed_us(self, at_us: int) -> int:
        """Return the time that is billed until ``at_us``, in microseconds."""
        if self.offer is None:
            return 0
        until_us = at_us
        if not self.is_open:
            until_us = self.ended_us if self.ended_us is not None else self.gone_us or 0
        terms = self._terms
        lived_us = max(until_us - self.from_us, terms.least_us)
        return -(-lived_us // terms.unit_us) * terms.unit_us

    def spending(self, at_us: int) -> Spending:
        """Return what it has cost until ``at_us``."""
        if self.offer is None:
            return Spending()
        billed_us, cost = self.billed_us(at_us), self.cost(at_us)
        ready_us = billed_us if self.ready_us is None else self.ready_us - self.from_us
        return Spending(
            spot=cost if self.offer.spot else NOTHING,
            on_demand=NOTHING if self.offer.spot else cost,
            boot=self._cost(max(0, min(billed_us, ready_us) if self.trains else 0)),
            if_on_demand=self.on_demand.over_us(billed_us),
            billed_us=billed_us,
        )

    def cost(self, at_us: int) -> Money:
        """Return what it has cost until ``at_us``, all told."""
        return self._cost(self.billed_us(at_us))

    def _cost(self, lasting_us: int) -> Money:
        """Return what its first ``lasting_us`` cost."""
        if not self.prices:
            return self.rate.over_us(lasting_us)
        until_us = self.from_us + lasting_us
        steps = [(self.from_us, self.rate)]
        steps += [step for step in self.prices if self.from_us < step[0] < until_us]
        return total(_over(steps, until_us))


def _over(steps: list[tuple[int, Rate]], until_us: int) -> Iterator[Money]:
    """Yield what each of some prices comes to until the next one holds."""
    for (at_us, rate), (next_us, _) in pairwise([*steps, (until_us, FREE)]):
        yield rate.over_us(max(0, next_us - at_us))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All that a job has spent; frozen, every fact gives a new one.

    Times are seconds since the epoch.
    """

    open: Mapping[str, Line] = field(default_factory=dict)
    """VMs that cost on, by id."""
    closed: Mapping[str, Line] = field(default_factory=dict)
    """VMs that do not."""
    settled: Spending = field(default_factory=Spending)
    """The sum over ``closed``."""
    storage: tuple[tuple[int, Rate], ...] = ()
    """What storage costs, and since when (microseconds since the epoch)."""
    traffic: Mapping[str, Money] = field(default_factory=dict)
    """What data sent between zones has cost, by what sent it."""

    # --- facts --------------------------------------------------------------------------

    def opened(
        self,
        vm_id: str,
        offer: Offer,
        *,
        on_demand_usd_per_hour: float,
        launched_at_s: float,
        seen_at_s: float,
        trains: bool = True,
    ) -> Ledger:
        """The cloud gave us a VM, or still lists one that we believed gone.

        Raises:
            MoneyError: A price is no price.
        """
        line = self._line(vm_id)
        new = replace(
            line,
            offer=offer,
            trains=trains,
            rate=Rate.of(offer.usd_per_hour),
            on_demand=Rate.of(on_demand_usd_per_hour),
            from_us=floor_us(launched_at_s),
        )
        # Told twice with different terms, the earlier and dearer one counts.
        if line.offer is not None and _standing(line) <= _standing(new):
            new = line
        seen_us = _latest(line.seen_us, ceil_us(seen_at_s))
        return self._put(vm_id, replace(new, seen_us=seen_us))

    def ready(self, vm_id: str, at_s: float) -> Ledger:
        """A VM could train for the first time."""
        line = self._line(vm_id)
        at_us = ceil_us(at_s)
        if line.ready_us is not None:
            at_us = min(at_us, line.ready_us)
        return self._put(vm_id, replace(line, ready_us=at_us))

    def gone(self, vm_id: str, at_s: float) -> Ledger:
        """We believe that a VM is gone; the cloud may know better."""
        line = self._line(vm_id)
        return self._put(
            vm_id, replace(line, gone_us=_latest(line.gone_us, ceil_us(at_s)))
        )

    def ended(self, vm_id: str, at_s: float) -> Ledger:
        """The cloud says when the billing of a VM ended."""
        line = self._line(vm_id)
        return self._put(
            vm_id, replace(line, ended_us=_latest(line.ended_us, ceil_us(at_s)))
        )

    def priced(self, offer: Offer, at_s: float) -> Ledger:
        """The market asks a new price; it counts for VMs that are open and follow it.

        Raises:
            MoneyError: The price is no price.
        """
        ledger, price = self, (floor_us(at_s), Rate.of(offer.usd_per_hour))
        if not TERMS.get(offer.cloud, EXACT).follows_market or not offer.spot:
            return self
        for vm_id, line in self.open.items():
            known = line.offer is not None and _place(line.offer) == _place(offer)
            if known and line.rate_now != price[1]:
                prices = tuple(sorted({*line.prices, price}))
                ledger = ledger._put(vm_id, replace(line, prices=prices))
        return ledger

    def stored(self, rate: Rate, at_s: float) -> Ledger:
        """From now on what lies in the checkpoint store costs ``rate``."""
        if self.storage and self.storage[-1][1] == rate:
            return self
        if not self.storage and rate == FREE:
            return self
        storage = tuple(sorted({*self.storage, (floor_us(at_s), rate)}))
        return replace(self, storage=storage)

    def sent(self, what: str, cost: Money) -> Ledger:
        """What ``what`` has sent between zones has cost so much, all told."""
        if cost <= self.traffic.get(what, NOTHING):
            return self
        return replace(self, traffic={**self.traffic, what: cost})

    # --- questions ----------------------------------------------------------------------

    def spending(self, at_s: float) -> Spending:
        """Return what was spent until ``at_s``, by what it went for."""
        at_us = ceil_us(at_s)
        spending = self.settled
        for line in self.open.values():
            spending = spending.plus(line.spending(at_us))
        egress = total(self.traffic.values())
        return replace(spending, storage=self._storage_cost(at_us), egress=egress)

    def _storage_cost(self, at_us: int) -> Money:
        steps = [step for step in self.storage if step[0] < at_us]
        return total(_over(steps, at_us))

    def spent(self, at_s: float) -> Money:
        """Return all that was spent until ``at_s``: the total of ``spending``."""
        at_us = ceil_us(at_s)
        rest = (self.settled.total, self._storage_cost(at_us), *self.traffic.values())
        return total(rest) + total(line.cost(at_us) for line in self.open.values())

    @property
    def rate(self) -> Rate:
        """What the fleet costs now; storage is not in it."""
        return total_rate(line.rate_now for line in self.open.values())

    @property
    def unconfirmed(self) -> frozenset[str]:
        """VMs that we believe gone while the cloud has not said when they ended."""
        return frozenset(k for k, v in self.closed.items() if v.ended_us is None)

    def _line(self, vm_id: str) -> Line:
        return self.open.get(vm_id) or self.closed.get(vm_id) or Line()

    def _put(self, vm_id: str, line: Line) -> Ledger:
        settled, closed, opened = self.settled, dict(self.closed), dict(self.open)
        if (before := closed.pop(vm_id, None)) is not None:
            settled = settled.plus(before.spending(0), -1)
        opened.pop(vm_id, None)
        if line.is_open:
            opened[vm_id] = line
        else:
            closed[vm_id] = line
            settled = settled.plus(line.spending(0))
        return replace(self, open=opened, closed=closed, settled=settled)


def _latest(known_us: int | None, at_us: int) -> int:
    return at_us if known_us is None else max(known_us, at_us)


def _standing(line: Line) -> tuple[int, int, int]:
    """Sort lines of one VM: the one that costs most first."""
    return line.from_us, -line.rate.nanousd_per_hour, -line.on_demand.nanousd_per_hour


def _place(offer: Offer) -> tuple[str, str, str, str, bool]:
    return offer.cloud, offer.region, offer.zone, offer.instance_type, offer.spot
