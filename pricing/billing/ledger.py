"""What a job has spent: one line for each VM it ever had, and what storage and traffic cost.

The ledger is a set of facts, and adding one never depends on those before: whatever the
order in which they arrive, and however often, the same facts give the same ledger. Each
line costs price times billed time; the total is their exact sum (see ``money``).

When a VM ends is first what we believe (``gone``), then what the cloud says (``ended``),
which counts from then on. Until the first, a VM is open and costs on. Prices of the market
are facts about places, kept whether a VM is there or not: one that is told of later may
have run since before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.billing.money import (
    FREE,
    NOTHING,
    Money,
    Rate,
    ceil_us,
    floor_us,
    total,
    total_rate,
)
from spottrain.pricing.billing.terms import EXACT, TERMS, BillingTerms

Steps = tuple[tuple[int, Rate], ...]
"""Prices and since when they hold, in microseconds since the epoch, by time."""
PlaceKey = tuple[str, str, str, str]


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
class LedgerLine:
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
    prices: Steps = ()
    """What the market has asked where that counts: the last price that was seen before
    billing began, and all since."""
    fetched: Money = NOTHING
    """What clouds charge for the data that it fetched from them."""
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
    def _terms(self) -> BillingTerms:
        return EXACT if self.offer is None else TERMS.get(self.offer.cloud, EXACT)

    def priced_by(self, markets: Mapping[PlaceKey, Steps]) -> LedgerLine:
        """Return it with the prices of the market that count for it."""
        if self.offer is None or not _follows(self.offer):
            return self
        steps = markets.get(_place(self.offer), ())
        until_us = None if self.is_open else self.from_us + self.billed_us(0)
        first_us = max((at for at, _ in steps if at <= self.from_us), default=0)
        prices = tuple(
            step
            for step in steps
            if first_us <= step[0] and (until_us is None or step[0] < until_us)
        )
        return self if prices == self.prices else replace(self, prices=prices)

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
            egress=self.fetched,
            boot=self._cost(max(0, min(billed_us, ready_us) if self.trains else 0)),
            if_on_demand=self.on_demand.over_us(billed_us),
            billed_us=billed_us,
        )

    def cost(self, at_us: int) -> Money:
        """Return its rent until ``at_us``."""
        return self._cost(self.billed_us(at_us))

    def _cost(self, lasting_us: int) -> Money:
        """Return what its first ``lasting_us`` cost."""
        if not self.prices:
            return self.rate.over_us(lasting_us)
        steps = ((max(at, self.from_us), rate) for at, rate in self.prices)
        steps_on = [(self.from_us, self.rate), *steps]
        return total(_over(steps_on, self.from_us + lasting_us))


def _over(steps: Iterable[tuple[int, Rate]], until_us: int) -> Iterator[Money]:
    """Yield what each of some prices comes to until the next one holds."""
    for (at_us, rate), (next_us, _) in pairwise([*steps, (until_us, FREE)]):
        yield rate.over_us(max(0, min(next_us, until_us) - at_us))


def _noted(steps: Steps, at_s: float, rate: Rate) -> Steps:
    """Add a price to some; of two for the same moment the dearer counts."""
    at_us, known = floor_us(at_s), dict(steps)
    if known.get(at_us, FREE) >= rate and at_us in known:
        return steps
    return tuple(sorted({**known, at_us: rate}.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All that a job has spent; frozen, every fact gives a new one.

    Times are seconds since the epoch.
    """

    open: Mapping[str, LedgerLine] = field(default_factory=dict)
    """VMs that cost on, by id."""
    closed: Mapping[str, LedgerLine] = field(default_factory=dict)
    """VMs that do not."""
    settled: Spending = field(default_factory=Spending)
    """The sum over ``closed``."""
    markets: Mapping[PlaceKey, Steps] = field(default_factory=dict)
    """What the market was seen to ask for spot VMs, by place: as much of it as is told, so
    tell what is new alone (``is_news``)."""
    storage: Steps = ()
    """What storage costs."""
    traffic: Mapping[str, Money] = field(default_factory=dict)
    """What data that VMs send each other has cost, by what sent it."""

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

    def fetched(self, vm_id: str, cost: Money) -> Ledger:
        """A VM fetches data from other clouds, which charge ``cost`` for all of it."""
        line = self._line(vm_id)
        return self._put(vm_id, replace(line, fetched=max(line.fetched, cost)))

    def priced(self, offer: Offer, at_s: float) -> Ledger:
        """The market asks a price; it counts for VMs of clouds that follow the market.

        Raises:
            MoneyError: The price is no price.
        """
        if not _follows(offer):
            return self
        place = _place(offer)
        known = self.markets.get(place, ())
        steps = _noted(known, at_s, Rate.of(offer.usd_per_hour))
        if steps == known:
            return self
        ledger = replace(self, markets={**self.markets, place: steps})
        for vm_id, line in (*self.open.items(), *self.closed.items()):
            if line.offer is not None and _place(line.offer) == place:
                ledger = ledger._put(vm_id, line)
        return ledger

    def stored(self, rate: Rate, at_s: float) -> Ledger:
        """From a moment on what lies in the checkpoint store costs ``rate``."""
        steps = _noted(self.storage, at_s, rate)
        return self if steps == self.storage else replace(self, storage=steps)

    def sent(self, what: str, cost: Money) -> Ledger:
        """What ``what`` has sent from VM to VM has cost so much, all told."""
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
        egress = spending.egress + total(self.traffic.values())
        storage = total(_over(self.storage, at_us))
        return replace(spending, storage=storage, egress=egress)

    def spent(self, at_s: float) -> Money:
        """Return all that was spent until ``at_s``: the total of ``spending``."""
        at_us = ceil_us(at_s)
        rest = (*_over(self.storage, at_us), *self.traffic.values())
        lines = (line.cost(at_us) + line.fetched for line in self.open.values())
        return self.settled.total + total(rest) + total(lines)

    @property
    def rate(self) -> Rate:
        """What the fleet costs now; storage is not in it."""
        return total_rate(line.rate_now for line in self.open.values())

    @property
    def storage_rate(self) -> Rate:
        """What storage costs now."""
        return self.storage[-1][1] if self.storage else FREE

    def is_news(self, offer: Offer) -> bool:
        """Whether a price counts for anything and is not the newest that is known.

        Raises:
            MoneyError: It is no price.
        """
        if not _follows(offer):
            return False
        known = self.markets.get(_place(offer))
        return known is None or known[-1][1] != Rate.of(offer.usd_per_hour)

    @property
    def unconfirmed(self) -> frozenset[str]:
        """VMs that we believe gone while the cloud has not said when they ended."""
        return frozenset(k for k, v in self.closed.items() if v.ended_us is None)

    def _line(self, vm_id: str) -> LedgerLine:
        return self.open.get(vm_id) or self.closed.get(vm_id) or LedgerLine()

    def _put(self, vm_id: str, line: LedgerLine) -> Ledger:
        line = line.priced_by(self.markets)
        if line in (self.open.get(vm_id), self.closed.get(vm_id)):
            return self
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


def _standing(line: LedgerLine) -> tuple[object, ...]:
    """Sort lines of one VM: the one that costs most first, of like ones always the same."""
    dearest = -line.rate.nanousd_per_hour, -line.on_demand.nanousd_per_hour
    return line.from_us, *dearest, line.trains, repr(line.offer)


def _place(offer: Offer) -> PlaceKey:
    return offer.cloud, offer.region, offer.zone, offer.instance_type


def _follows(offer: Offer) -> bool:
    """Whether a VM of it costs what the market asks."""
    return offer.spot and TERMS.get(offer.cloud, EXACT).follows_market
