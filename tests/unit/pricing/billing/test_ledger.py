"""What a job has spent, whatever the order in which facts about it arrive."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pricing.ledger_facts import AWS, LOCAL, Fact, due, facts

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.billing.ledger import Ledger
from spottrain.pricing.billing.money import FREE, Money, Rate
from spottrain.pricing.billing.terms import EXACT, TERMS


def opened(
    vm_id: str = "a", offer: Offer = LOCAL, at_s: float = 1000.0, on_demand: float = 9.0
) -> Ledger:
    return Ledger().opened(
        vm_id,
        offer,
        on_demand_usd_per_hour=on_demand,
        launched_at_s=at_s,
        seen_at_s=at_s,
    )


def test_a_vm_costs_from_its_launch_on() -> None:
    ledger = opened()
    assert ledger.spent(1000.0) == Money()
    assert ledger.spent(1100.0).usd == 0.1
    assert ledger.spending(1100.0).if_on_demand.usd == 0.25
    assert ledger.rate.usd_per_hour == 3.6


def test_its_boot_is_paid_and_shown_separately() -> None:
    ledger = opened()
    assert ledger.spending(1010.0).boot == ledger.spent(1010.0)
    ledger = ledger.ready("a", 1020.0).ready("a", 1050.0)
    assert ledger.spending(1100.0).boot.usd == 0.02
    assert ledger.spending(1100.0).spot.usd == 0.1


def test_spot_and_on_demand_are_counted_separately() -> None:
    ledger = opened(offer=replace(LOCAL, spot=False))
    spending = ledger.spending(1100.0)
    assert (spending.spot, spending.on_demand.usd) == (Money(), 0.1)


def test_a_vm_that_is_gone_costs_no_more() -> None:
    ledger = opened().gone("a", 1100.0)
    assert ledger.spent(9999.0).usd == 0.1
    assert ledger.rate == FREE
    assert ledger.unconfirmed == {"a"}


def test_the_cloud_knows_better_when_a_vm_ended() -> None:
    ledger = opened().gone("a", 1100.0).ended("a", 1050.0)
    assert ledger.spent(9999.0).usd == 0.05
    assert ledger.unconfirmed == frozenset()


def test_a_vm_that_the_cloud_still_lists_was_never_gone() -> None:
    ledger = opened().gone("a", 1100.0)
    ledger = ledger.opened(
        "a", LOCAL, on_demand_usd_per_hour=9.0, launched_at_s=1000.0, seen_at_s=1200.0
    )
    assert ledger.spent(1300.0).usd == 0.3
    assert ledger.gone("a", 1400.0).spent(9999.0).usd == 0.4


def test_a_wrong_clock_reduces_nothing() -> None:
    assert opened().ended("a", 900.0).spent(2000.0) == Money()
    assert opened().spent(900.0) == Money()


@pytest.mark.parametrize(
    ("cloud", "lived_s", "billed_s"),
    [
        ("local", 0.5, 0.5),
        ("aws", 0.5, 60),
        ("aws", 60.5, 61),
        ("gcp", 59.0, 60),
        ("azure", 60.5, 120),
    ],
)
def test_each_cloud_bills_by_its_own_unit(cloud: str, lived_s: float, billed_s: float) -> None:
    ledger = opened(offer=replace(LOCAL, cloud=cloud))
    assert ledger.spending(1000.0 + lived_s).billed_us == billed_s * 1e6
    ended = ledger.ended("a", 1000.0 + lived_s)
    assert ended.spent(5000.0) == Rate.of(3.6).over(billed_s)


def test_a_market_price_counts_where_the_cloud_follows_it() -> None:
    expensive = replace(AWS, usd_per_hour=7.2)
    ledger = opened(offer=AWS).priced(expensive, 1100.0)
    assert ledger.spent(1200.0).usd == pytest.approx(0.3)
    assert ledger.rate.usd_per_hour == 7.2
    assert ledger.priced(expensive, 1100.0) is ledger
    elsewhere = replace(expensive, zone="y", usd_per_hour=99.0)
    ledger = ledger.priced(elsewhere, 1100.0)
    assert ledger.spent(1200.0).usd == pytest.approx(0.3)


def at(usd_per_hour: float) -> Offer:
    return replace(AWS, usd_per_hour=usd_per_hour)


def listed(ledger: Ledger, seen_at_s: float, usd_per_hour: float = 1.0) -> Ledger:
    """Tell that a VM launched at 0 is there."""
    return ledger.opened(
        "v",
        at(usd_per_hour),
        on_demand_usd_per_hour=9.0,
        launched_at_s=0.0,
        seen_at_s=seen_at_s,
    )


def test_a_price_from_before_a_vm_was_known_counts_since_then() -> None:
    ledger = listed(Ledger().priced(at(3.0), 30.0), 60.0)
    assert ledger.spent(3600.0) == Rate.of(1.0).over(30.0) + Rate.of(3.0).over(3570.0)


def test_the_market_of_the_launch_counts_more_than_the_price_of_the_order() -> None:
    ledger = Ledger().priced(at(2.0), -60.0).priced(at(3.0), -30.0)
    assert listed(ledger, 60.0).spent(3600.0).usd == 3.0


def test_a_price_that_moved_while_a_vm_was_believed_gone_counts() -> None:
    gone = listed(Ledger(), 0.0).gone("v", 100.0).priced(at(3.0), 200.0)
    assert gone.spent(3600.0) == Rate.of(1.0).over(100.0)
    due = Rate.of(1.0).over(200.0) + Rate.of(3.0).over(3400.0)
    assert gone.ended("v", 3600.0).spent(9999.0) == due
    assert listed(gone, 3000.0).spent(3600.0) == due


def test_a_price_that_is_reported_late_counts_from_when_it_held() -> None:
    ledger = listed(Ledger(), 0.0).priced(at(2.0), 1000.0).priced(at(2.0), 600.0)
    due = Rate.of(1.0).over(600.0) + Rate.of(2.0).over(3000.0)
    assert ledger.spent(3600.0) == due


def test_a_known_price_is_no_news() -> None:
    ledger = Ledger()
    assert ledger.is_news(AWS)
    ledger = ledger.priced(AWS, 10.0)
    assert not ledger.is_news(AWS)
    assert ledger.is_news(at(1.0))
    assert not ledger.is_news(LOCAL)


@pytest.mark.parametrize("offer", [LOCAL, replace(AWS, spot=False)])
def test_a_price_that_is_locked_stays(offer: Offer) -> None:
    ledger = opened(offer=offer)
    assert ledger.priced(replace(offer, usd_per_hour=99.0), 1100.0) == ledger


def test_storage_costs_by_its_rate() -> None:
    assert Ledger().storage_rate == FREE
    ledger = Ledger().stored(Rate.of(1.0), 3600.0).stored(Rate.of(2.0), 7200.0)
    assert ledger.stored(Rate.of(2.0), 7200.0) is ledger
    assert ledger.stored(FREE, 7200.0) is ledger, "the higher rate of one moment counts"
    assert ledger.storage_rate == Rate.of(2.0)
    assert ledger.spending(10800.0).storage.usd == 3.0
    assert ledger.spent(3600.0) == Money()


def test_what_a_vm_fetches_is_paid_once() -> None:
    ledger = Ledger().fetched("a", Money.allowed(1.0))
    assert ledger.spent(9999.0) == Money(), "nobody knows of such a VM"
    ledger = opened().fetched("a", Money.allowed(1.0)).fetched("a", Money.allowed(1.0))
    assert ledger.spending(1100.0).egress.usd == 1.0
    assert ledger.spent(1100.0).usd == 1.1
    assert ledger.gone("a", 1100.0).spent(9999.0).usd == 1.1


def test_traffic_is_reported_as_a_total() -> None:
    ledger = Ledger().sent("training", Money.allowed(1.0)).sent("training", Money.allowed(3.0))
    ledger = ledger.sent("training", Money.allowed(2.0)).sent("moves", Money.allowed(0.5))
    assert ledger.spending(0.0).egress.usd == 3.5
    assert ledger.spent(0.0).usd == 3.5


# --- Laws ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """A VM as the cloud saw it."""

    vm_id: str
    offer: Offer
    from_s: float
    until_s: float

    def exact_us(self) -> int:
        us = math.ceil(self.until_s * 1e6) - math.floor(self.from_s * 1e6)
        if self.offer.cloud == "aws":
            us = math.ceil(Fraction(max(us, 60_000_000), 10**6)) * 10**6
        return us

    def exact_usd(self) -> Fraction:
        nano = math.ceil(Fraction(repr(self.offer.usd_per_hour)) * 10**9)
        return Fraction(nano * self.exact_us(), 10**9 * 3_600_000_000)


@st.composite
def lives(draw: st.DrawFn) -> list[Life]:
    count = draw(st.integers(0, 5))
    return [
        Life(
            vm_id=f"vm-{i}",
            offer=replace(
                LOCAL,
                cloud=draw(st.sampled_from(["local", "aws"])),
                spot=draw(st.booleans()),
                usd_per_hour=draw(st.floats(0, 50)),
                gpus=draw(st.integers(1, 8)),
            ),
            from_s=(from_s := draw(st.floats(1.6e9, 1.6e9 + 1e5))),
            until_s=from_s + draw(st.floats(0, 1e6)),
        )
        for i in range(count)
    ]


def facts_of(life: Life) -> list[Fact]:
    offer, from_s, until_s = life.offer, life.from_s, life.until_s
    return [
        Fact("opened", life.vm_id, from_s + 1.0, offer=offer, from_s=from_s),
        Fact("ready", life.vm_id, from_s + 30.0),
        Fact("gone", life.vm_id, until_s + 5.0),
        Fact("ended", life.vm_id, until_s),
    ]


@given(lives=lives())
def test_the_total_is_the_exact_sum_of_times_and_prices(lives: list[Life]) -> None:
    ledger = Ledger()
    for fact in (fact for life in lives for fact in facts_of(life)):
        ledger = fact.applied_to(ledger)
    exact = sum((life.exact_usd() for life in lives), Fraction(0))
    assert ledger.spent(9e9).microusd == math.ceil(exact * 10**6)
    gpu_us = sum(life.offer.gpus * life.exact_us() for life in lives)
    assert ledger.gpu_hours(9e9).microusd == math.ceil(Fraction(gpu_us, 3600))


@given(
    lives=lives(),
    moments=st.lists(st.floats(1.6e9, 1.6e9 + 2e6), min_size=2).map(sorted),
)
def test_spending_never_shrinks_while_vms_come_and_go(
    lives: list[Life], moments: list[float]
) -> None:
    ledger, last = Ledger(), Money()
    for now_s in moments:
        for life in lives:
            opened, ready, _, ended = facts_of(life)
            if life.from_s <= now_s:
                ledger = ready.applied_to(opened.applied_to(ledger))
            if life.until_s <= now_s:
                ledger = ended.applied_to(ledger)
        spent = ledger.spent(now_s)
        assert spent == ledger.spending(now_s).total
        assert ledger.gpu_hours(now_s) == ledger.spending(now_s).gpu_hours
        assert spent >= last
        last = spent


@given(known=facts(), data=st.data())
def test_the_order_of_what_is_learned_and_how_often_changes_nothing(
    known: list[Fact], data: st.DataObject
) -> None:
    repeated = data.draw(st.lists(st.sampled_from(known), max_size=9))
    one, other = Ledger(), Ledger()
    for fact in known:
        one = fact.applied_to(one)
    for fact in data.draw(st.permutations([*known, *repeated])):
        other = fact.applied_to(other)
    assert other == one
    for at_s in (3000.0, 3600.0, 9999.0):
        assert other.spent(at_s) == other.spending(at_s).total
        assert other.spent(at_s).grains == due(known, at_s)


@given(
    cloud=st.sampled_from([*TERMS, "local"]),
    gaps_s=st.lists(st.floats(0.0, 500.0), min_size=1, max_size=5),
)
def test_parts_of_a_machines_life_cost_what_the_whole_does(cloud: str, gaps_s: list[float]) -> None:
    """However often it changes jobs, and however early it ends."""
    terms, offer = TERMS.get(cloud, EXACT), replace(AWS, cloud=cloud)
    *moves_s, end_s = itertools.accumulate(gaps_s, initial=1000.0)
    parts, began_s = Ledger(), moves_s[0]
    for n, now_s in enumerate([*moves_s[1:], None]):
        until_s = end_s
        if now_s is not None:
            until_s = terms.next_end_s(began_s, max(now_s, began_s), is_whole=not n)
        parts = parts.opened(
            f"i.{n}",
            offer,
            on_demand_usd_per_hour=9.0,
            launched_at_s=began_s,
            seen_at_s=began_s,
            is_part=n > 0,
        ).ended(f"i.{n}", max(until_s, began_s))
        began_s = until_s
    lived_s = max(end_s, began_s)
    whole = opened("i", offer).ended("i", lived_s).spending(0)
    assert parts.spending(0).billed_us == pytest.approx(whole.billed_us, abs=10)
    if terms is not EXACT:
        assert parts.spending(0).billed_us == whole.billed_us
        assert parts.spending(0).total == whole.total
