"""Facts for a ledger, and what they cost, calculated from scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import strategies as st
from tests.builders import an_offer

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.billing.ledger import Ledger
from spottrain.pricing.billing.money import (
    FREE,
    NOTHING,
    Money,
    Rate,
    ceil_us,
    floor_us,
)
from spottrain.pricing.billing.terms import EXACT, TERMS

LOCAL = an_offer(usd_per_hour=3.6, gpu_memory_bytes=1)
AWS = replace(LOCAL, cloud="aws")
PLACES = (
    AWS,
    replace(AWS, zone="y"),
    replace(AWS, spot=False),
    replace(LOCAL, cloud="azure"),
    LOCAL,
)
"""Where VMs stand; one is rented on demand, one by a cloud that follows no market."""


@dataclass(frozen=True)
class Fact:
    """A fact that a ledger may learn at any time."""

    kind: str
    what: str
    """A VM, or what sends."""
    at_s: float = 0.0
    offer: Offer = LOCAL
    from_s: float = 0.0
    on_demand: float = 60.0
    rate: Rate = FREE
    cost: Money = NOTHING

    def applied_to(self, ledger: Ledger) -> Ledger:
        """Return the ledger with it."""
        match self.kind:
            case "opened":
                return ledger.opened(
                    self.what,
                    self.offer,
                    on_demand_usd_per_hour=self.on_demand,
                    launched_at_s=self.from_s,
                    seen_at_s=self.at_s,
                )
            case "ready":
                return ledger.ready(self.what, self.at_s)
            case "gone":
                return ledger.gone(self.what, self.at_s)
            case "ended":
                return ledger.ended(self.what, self.at_s)
            case "fetched":
                return ledger.fetched(self.what, self.cost)
            case "priced":
                return ledger.priced(self.offer, self.at_s)
            case "stored":
                return ledger.stored(self.rate, self.at_s)
            case _:
                return ledger.sent(self.what, self.cost)


# Few moments and prices: the same ones meet often.
MOMENTS = st.sampled_from([0.0, 0.25, 30.0, 59.9, 60.0, 61.5, 200.0, 1000.0, 3000.0])
PRICES = st.sampled_from([0.0, 1.0, 2.0, 3.0])
VMS = [f"vm-{number}" for number in range(4)]
COSTS = st.integers(0, 3).map(Money)


@st.composite
def facts(draw: st.DrawFn) -> list[Fact]:
    """Draw what happens to several VMs in several places."""
    places = {vm_id: draw(st.sampled_from(PLACES)) for vm_id in VMS}

    def some(vm_id: str) -> st.SearchStrategy[Fact]:
        offer = PRICES.map(lambda usd: replace(places[vm_id], usd_per_hour=usd))
        kinds = st.sampled_from(["ready", "gone", "ended"])
        return st.one_of(
            st.builds(
                Fact,
                st.just("opened"),
                st.just(vm_id),
                MOMENTS,
                offer=offer,
                from_s=MOMENTS,
                on_demand=PRICES,
            ),
            st.builds(Fact, kinds, st.just(vm_id), MOMENTS),
            st.builds(Fact, st.just("fetched"), st.just(vm_id), cost=COSTS),
        )

    asked = st.builds(
        lambda offer, usd: replace(offer, usd_per_hour=usd),
        st.sampled_from(PLACES),
        PRICES,
    )
    others = st.one_of(
        st.builds(Fact, st.just("priced"), st.just(""), MOMENTS, offer=asked),
        st.builds(Fact, st.just("stored"), st.just(""), MOMENTS, rate=PRICES.map(Rate.of)),
        st.builds(Fact, st.just("sent"), st.sampled_from("ab"), cost=COSTS),
    )
    return draw(st.lists(st.one_of(others, others, *map(some, VMS)), min_size=1, max_size=30))


def due(known: Sequence[Fact], at_s: float) -> int:
    """Return what some facts come to until a moment, in grains."""
    vms = {fact.what for fact in known if fact.kind == "opened"}
    rents = (_vm(known, vm_id, at_s) for vm_id in vms)
    stored: dict[int, int] = {}
    for fact in known:
        if fact.kind == "stored":
            _keep_dearest(stored, fact.at_s, fact.rate)
    storage = _integral(stored, 0, min(stored, default=0), ceil_us(at_s))
    sent: dict[str, int] = {}
    for fact in known:
        if fact.kind == "sent":
            sent[fact.what] = max(sent.get(fact.what, 0), fact.cost.grains)
    return sum(rents) + storage + sum(sent.values())


def _vm(known: Sequence[Fact], vm_id: str, at_s: float) -> int:
    own = [fact for fact in known if fact.what == vm_id]
    rented = [fact for fact in own if fact.kind == "opened"]
    first = min(rented, key=lambda fact: (fact.from_s, -fact.offer.usd_per_hour))
    from_us = floor_us(first.from_s)
    terms = TERMS.get(first.offer.cloud, EXACT)
    until_us = ceil_us(_until_s(own, at_s))
    lasted_us = max(until_us - from_us, terms.min_us)
    lasted_us += -lasted_us % terms.unit_us
    market: dict[int, int] = {}
    for fact in known:
        same = replace(fact.offer, usd_per_hour=first.offer.usd_per_hour) == first.offer
        if fact.kind == "priced" and same and same_market(first.offer):
            _keep_dearest(market, fact.at_s, Rate.of(fact.offer.usd_per_hour))
    rate = Rate.of(first.offer.usd_per_hour).nanousd_per_hour
    rent = _integral(market, rate, from_us, from_us + lasted_us)
    return rent + max((f.cost.grains for f in own if f.kind == "fetched"), default=0)


def same_market(offer: Offer) -> bool:
    """Whether a VM costs what the market asks."""
    return offer.spot and TERMS.get(offer.cloud, EXACT).follows_market


def _until_s(own: Iterable[Fact], at_s: float) -> float:
    last = {"ended": -1.0, "gone": -1.0, "opened": -1.0}
    for fact in own:
        if fact.kind in last:
            last[fact.kind] = max(last[fact.kind], fact.at_s)
    if last["ended"] >= 0:
        return last["ended"]
    return last["gone"] if last["gone"] >= last["opened"] else at_s


def _keep_dearest(steps: dict[int, int], at_s: float, rate: Rate) -> None:
    at_us = floor_us(at_s)
    steps[at_us] = max(steps.get(at_us, 0), rate.nanousd_per_hour)


def _integral(steps: dict[int, int], rate: int, from_us: int, until_us: int) -> int:
    """Return the sum of intervals times the price that was newest when they began."""
    ends = sorted({from_us, until_us, *(t for t in steps if from_us < t < until_us)})
    grains = 0
    for begin, end in pairwise(ends):
        newest = max((t for t in steps if t <= begin), default=None)
        price = rate if newest is None else steps[newest]
        grains += price * (end - begin) * (begin >= from_us and end <= until_us)
    return grains
