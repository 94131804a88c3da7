"""The ledger of a job: a line for each VM it ever had, and the cost of storage and traffic.

The ledger is a set of facts. Adding one does not depend on the others: the same facts give
the same ledger in any order and however often they come. Each line costs price times
billed time; the total is their exact sum (see ``money``).

The end of a VM is first what we believe (``gone``), then what the cloud says (``ended``),
which counts from then on. Until either, the VM is open and keeps billing. Market prices are
facts about places, kept whether a VM is there or not: a VM that is reported later may have
run before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.billing import money
from spottrain.pricing.billing.terms import EXACT, TERMS, BillingTerms
from spottrain.pricing.prices.place import Place, place_of

PriceSteps = tuple[tuple[int, money.Rate], ...]
"""Prices and since when they hold, in microseconds since the epoch, by time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Money by purpose, and the VM time that was billed."""

    spot: money.Money = money.NOTHING
    on_demand: money.Money = money.NOTHING
    storage: money.Money = money.NOTHING
    egress: money.Money = money.NOTHING
    boot: money.Money = money.NOTHING
    """The part of spot and on-demand paid for machines before they could train."""
    attached: money.Money = money.NOTHING
    """The part of spot and on-demand paid for VMs' disks and public addresses."""
    if_on_demand: money.Money = money.NOTHING
    """What all VMs would have cost on demand."""
    billed_us: int = 0
    """VM time that was billed, in microseconds."""
    gpu_hours: money.Money = money.NOTHING
    """GPU-hours of VMs that train, an amount of one for each."""

    @property
    def total(self) -> money.Money:
        """All that was spent."""
        return money.total((self.spot, self.on_demand, self.storage, self.egress))

    def plus(self, other: Spending, sign: int = 1) -> Spending:
        """Return the sum; with a sign of -1 the difference."""
        return Spending(
            spot=self.spot + other.spot * sign,
            on_demand=self.on_demand + other.on_demand * sign,
            storage=self.storage + other.storage * sign,
            egress=self.egress + other.egress * sign,
            boot=self.boot + other.boot * sign,
            attached=self.attached + other.attached * sign,
            if_on_demand=self.if_on_demand + other.if_on_demand * sign,
            billed_us=self.billed_us + other.billed_us * sign,
            gpu_hours=self.gpu_hours + other.gpu_hours * sign,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """The facts about one VM; ``offer`` is None while only its end is known."""

    offer: Offer | None = None
    """As it was rented."""
    trains: bool = True
    """False for the VM that the manager runs on."""
    is_part: bool = False
    """Another job had the machine before: that one has paid the shortest time."""
    rate: money.Rate = money.FREE
    """Its price at launch."""
    on_demand: money.Rate = money.FREE
    """Price of the same machine on demand at that time."""
    from_us: int = 0
    """When billing began; moments are microseconds since the epoch."""
    prices: PriceSteps = ()
    """Market prices, where the cloud bills by them: the last one before billing began, and
    all since."""
    fetched: money.Money = money.NOTHING
    """Charges for the data that it fetched from other clouds."""
    ready_us: int | None = None
    """When it could train for the first time."""
    seen_us: int | None = None
    """When it was last launched or listed."""
    gone_us: int | None = None
    """When we last believed it gone."""
    ended_us: int | None = None
    """When its billing ended, as the cloud says."""

    @property
    def is_open(self) -> bool:
        """Return whether it keeps billing."""
        if self.ended_us is not None:
            return False
        if self.gone_us is None:
            return self.offer is not None
        return self.seen_us is not None and self.seen_us > self.gone_us

    @property
    def rate_now(self) -> money.Rate:
        """Its price from now on."""
        return self.prices[-1][1] if self.prices else self.rate

    @property
    def gpus(self) -> money.Rate:
        """GPU-hours per hour."""
        if self.offer is None or not self.trains:
            return money.FREE
        return money.Rate.of(self.offer.gpus)

    @property
    def _terms(self) -> BillingTerms:
        return EXACT if self.offer is None else TERMS.get(self.offer.cloud, EXACT)

    def priced_by(self, markets: Mapping[Place, PriceSteps]) -> LedgerLine:
        """Return the line with the market prices that count for it."""
        if self.offer is None or not _bills_market_price(self.offer):
            return self
        steps = markets.get(place_of(self.offer), ())
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
        least_us = 0 if self.is_part else terms.min_us
        lived_us = max(until_us - self.from_us, least_us)
        return -(-lived_us // terms.unit_us) * terms.unit_us

    def spending(self, at_us: int) -> Spending:
        """Return its cost until ``at_us``, by purpose."""
        if self.offer is None:
            return Spending()
        billed_us, cost = self.billed_us(at_us), self.cost(at_us)
        ready_us = billed_us if self.ready_us is None else self.ready_us - self.from_us
        booted_us = max(0, min(billed_us, ready_us) if self.trains else 0)
        attached = money.Rate.of(self.offer.attached_usd_per_hour)
        return Spending(
            spot=cost if self.offer.spot else money.NOTHING,
            on_demand=money.NOTHING if self.offer.spot else cost,
            egress=self.fetched,
            boot=self._cost(booted_us) - attached.over_us(booted_us),
            attached=attached.over_us(billed_us),
            if_on_demand=self.on_demand.over_us(billed_us),
            billed_us=billed_us,
            gpu_hours=self.gpus.over_us(billed_us),
        )

    def cost(self, at_us: int) -> money.Money:
        """Return its rent until ``at_us``."""
        return self._cost(self.billed_us(at_us))

    def _cost(self, lasting_us: int) -> money.Money:
        """Return the rent of its first ``lasting_us``."""
        if not self.prices:
            return self.rate.over_us(lasting_us)
        steps = ((max(at, self.from_us), rate) for at, rate in self.prices)
        steps_on = [(self.from_us, self.rate), *steps]
        return money.total(_over(steps_on, self.from_us + lasting_us))


def _over(steps: Iterable[tuple[int, money.Rate]], until_us: int) -> Iterator[money.Money]:
    """Yield the cost at each price until the next one holds."""
    for (at_us, rate), (next_us, _) in pairwise([*steps, (until_us, money.FREE)]):
        yield rate.over_us(max(0, min(next_us, until_us) - at_us))


def _with_step(steps: PriceSteps, at_s: float, rate: money.Rate) -> PriceSteps:
    """Add a price; of two for the same moment the higher counts."""
    at_us, known = money.floor_us(at_s), dict(steps)
    if known.get(at_us, money.FREE) >= rate and at_us in known:
        return steps
    return tuple(sorted({**known, at_us: rate}.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All that a job has spent; frozen, every fact returns a new one.

    Times are seconds since the epoch.
    """

    open: Mapping[str, LedgerLine] = field(default_factory=dict)
    """VMs that keep billing, by id."""
    closed: Mapping[str, LedgerLine] = field(default_factory=dict)
    """VMs whose billing ended."""
    settled: Spending = field(default_factory=Spending)
    """The sum over ``closed``."""
    markets: Mapping[Place, PriceSteps] = field(default_factory=dict)
    """Spot prices that were seen, by place. Add changes only, see ``is_news``."""
    storage: PriceSteps = ()
    """Rates of storage."""
    traffic: Mapping[str, money.Money] = field(default_factory=dict)
    """Cost of traffic between VMs, by its kind."""

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
        is_part: bool = False,
    ) -> Ledger:
        """Add a VM that was launched, or that is listed though we believed it gone.

        Raises:
            MoneyError: A price is invalid.
        """
        line = self._line(vm_id)
        new = replace(
            line,
            offer=offer,
            trains=trains,
            is_part=is_part,
            rate=money.Rate.of(offer.usd_per_hour),
            on_demand=money.Rate.of(on_demand_usd_per_hour),
            from_us=money.floor_us(launched_at_s),
        )
        # Reported twice with different terms, the earlier and more expensive counts.
        if line.offer is not None and _sort_key(line) <= _sort_key(new):
            new = line
        seen_us = _latest(line.seen_us, money.ceil_us(seen_at_s))
        return self._put(vm_id, replace(new, seen_us=seen_us))

    def ready(self, vm_id: str, at_s: float) -> Ledger:
        """Note when a VM could train for the first time."""
        line = self._line(vm_id)
        at_us = money.ceil_us(at_s)
        if line.ready_us is not None:
            at_us = min(at_us, line.ready_us)
        return self._put(vm_id, replace(line, ready_us=at_us))

    def gone(self, vm_id: str, at_s: float) -> Ledger:
        """Note that we believe a VM gone; the cloud may correct that."""
        line = self._line(vm_id)
        return self._put(vm_id, replace(line, gone_us=_latest(line.gone_us, money.ceil_us(at_s))))

    def ended(self, vm_id: str, at_s: float) -> Ledger:
        """Note when the billing of a VM ended, as the cloud says."""
        line = self._line(vm_id)
        return self._put(vm_id, replace(line, ended_us=_latest(line.ended_us, money.ceil_us(at_s))))

    def fetched(self, vm_id: str, cost: money.Money) -> Ledger:
        """Note that a VM fetches data from other clouds, for ``cost`` in all."""
        line = self._line(vm_id)
        return self._put(vm_id, replace(line, fetched=max(line.fetched, cost)))

    def priced(self, offer: Offer, at_s: float) -> Ledger:
        """Note a market price; it counts for VMs of clouds that bill by the market.

        Raises:
            MoneyError: The price is invalid.
        """
        if not _bills_market_price(offer):
            return self
        place = place_of(offer)
        known = self.markets.get(place, ())
        steps = _with_step(known, at_s, money.Rate.of(offer.usd_per_hour))
        if steps == known:
            return self
        ledger = replace(self, markets={**self.markets, place: steps})
        for vm_id, line in (*self.open.items(), *self.closed.items()):
            if line.offer is not None and place_of(line.offer) == place:
                ledger = ledger._put(vm_id, line)
        return ledger

    def stored(self, rate: money.Rate, at_s: float) -> Ledger:
        """Note that the checkpoint store costs ``rate`` from a moment on."""
        steps = _with_step(self.storage, at_s, rate)
        return self if steps == self.storage else replace(self, storage=steps)

    def sent(self, what: str, cost: money.Money) -> Ledger:
        """Note that traffic of a kind has cost so much in total."""
        if cost <= self.traffic.get(what, money.NOTHING):
            return self
        return replace(self, traffic={**self.traffic, what: cost})

    # --- questions ----------------------------------------------------------------------

    def spending(self, at_s: float) -> Spending:
        """Return what was spent until ``at_s``, by purpose."""
        at_us = money.ceil_us(at_s)
        spending = self.settled
        for line in self.open.values():
            spending = spending.plus(line.spending(at_us))
        egress = spending.egress + money.total(self.traffic.values())
        storage = money.total(_over(self.storage, at_us))
        return replace(spending, storage=storage, egress=egress)

    def spent(self, at_s: float) -> money.Money:
        """Return all that was spent until ``at_s``: the total of ``spending``."""
        at_us = money.ceil_us(at_s)
        rest = (*_over(self.storage, at_us), *self.traffic.values())
        lines = (line.cost(at_us) + line.fetched for line in self.open.values())
        return self.settled.total + money.total(rest) + money.total(lines)

    def gpu_hours(self, at_s: float) -> money.Money:
        """Return the GPU-hours that were billed until ``at_s``."""
        at_us = money.ceil_us(at_s)
        lines = (line.gpus.over_us(line.billed_us(at_us)) for line in self.open.values())
        return self.settled.gpu_hours + money.total(lines)

    @property
    def gpus(self) -> money.Rate:
        """GPU-hours per hour of the fleet now."""
        return money.total_rate(line.gpus for line in self.open.values())

    @property
    def rate(self) -> money.Rate:
        """Price of the fleet now, without storage."""
        return money.total_rate(line.rate_now for line in self.open.values())

    def rate_of(self, vm_id: str) -> money.Rate:
        """Return the price of a VM now."""
        return self._line(vm_id).rate_now

    @property
    def storage_rate(self) -> money.Rate:
        """Price of storage now."""
        return self.storage[-1][1] if self.storage else money.FREE

    def is_news(self, offer: Offer) -> bool:
        """Return whether a price counts and differs from the newest one known.

        Raises:
            MoneyError: The price is invalid.
        """
        if not _bills_market_price(offer):
            return False
        known = self.markets.get(place_of(offer))
        return known is None or known[-1][1] != money.Rate.of(offer.usd_per_hour)

    @property
    def unconfirmed(self) -> frozenset[str]:
        """VMs that we believe gone, whose end the cloud has not confirmed."""
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


def _sort_key(line: LedgerLine) -> tuple[object, ...]:
    """Return a key that sorts lines of one VM: earliest first, then most expensive."""
    prices = -line.rate.nanousd_per_hour, -line.on_demand.nanousd_per_hour
    return line.from_us, *prices, line.trains, repr(line.offer)


def _bills_market_price(offer: Offer) -> bool:
    """Return whether the cloud bills its VMs by the market price."""
    return offer.spot and TERMS.get(offer.cloud, EXACT).follows_market
