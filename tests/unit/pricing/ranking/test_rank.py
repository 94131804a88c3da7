"""Examples per dollar: laws of the ranking, and figures worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pricing.ranked import (
    JOB,
    TERMS,
    THROUGHPUTS,
    TOO_SMALL,
    markets,
    offer,
    priced,
    terms,
)

from spottrain.pricing.billing.terms import TERMS as TERMS_OF
from spottrain.pricing.prices.place import Place, offer_key
from spottrain.pricing.ranking.rank import (
    Priced,
    Ranking,
    RankingTerms,
    fleet_size,
    greedy_fleet,
    rank,
    worth_of,
)
from spottrain.pricing.ranking.throughput import FleetThroughput, ThroughputCache

FOR_MONEY = ThroughputCache(replace(JOB, objective="examples_per_dollar"))
THROUGHPUT = FleetThroughput(
    vms=4, pipeline_depth=2, data_parallel_width=2, copies=2, step_s=2.0, examples_per_s=8.0
)


def names(ranking: Ranking) -> list[str]:
    return [offer_key(row.priced.offer) for row in ranking.rows if not row.why_not]


@given(markets(), terms, st.integers(1, 4), st.sampled_from([THROUGHPUTS, FOR_MONEY]))
def test_the_first_rows_are_those_of_planning_everything(
    market: list[Priced], asked: RankingTerms, exact: int, throughputs: ThroughputCache
) -> None:
    whole = rank(market, throughputs, asked, exact=len(market))
    short = rank(market, throughputs, asked, exact=exact)
    assert names(short)[:exact] == names(whole)[:exact]
    assert not any(row.is_bound for row in whole.rows)
    assert len(short.rows) == len(market)
    firsts, rest = short.rows[:exact], short.rows[exact:]
    last = [row.worth.examples_per_usd for row in firsts if row.worth]
    bounds = [row.worth.examples_per_usd for row in rest if row.worth]
    assert all(bound <= last[-1] for bound in bounds)


@given(markets(), terms, st.randoms())
def test_the_order_of_offers_does_not_count(
    market: list[Priced], asked: RankingTerms, draw: random.Random
) -> None:
    mixed = list(market)
    draw.shuffle(mixed)
    assert rank(mixed, THROUGHPUTS, asked) == rank(market, THROUGHPUTS, asked)


@given(markets(), terms)
def test_the_first_offer_has_the_most_examples_per_dollar(
    market: list[Priced], asked: RankingTerms
) -> None:
    rows = [r for r in rank(market, THROUGHPUTS, asked, exact=99).rows if r.worth]
    values = [row.worth.examples_per_usd for row in rows if row.worth]
    assert values == sorted(values, reverse=True)


@given(st.floats(0.0, 10.0), st.floats(0.0, 600.0), st.floats(0.01, 50.0))
def test_losses_boot_and_price_never_help(
    losses_per_hour: float, boot_s: float, usd_per_hour: float
) -> None:
    asked = replace(TERMS, morph_s=10.0, lag_steps=5.0)
    calm = priced(usd_per_hour=usd_per_hour)
    rough = replace(calm, losses_per_hour=losses_per_hour, boot_s=boot_s)
    better, worse = (worth_of(THROUGHPUT, one, asked) for one in (calm, rough))
    assert worse.examples_per_usd <= better.examples_per_usd * (1 + 1e-12)
    assert better.examples_per_usd <= better.raw_examples_per_usd * (1 + 1e-12)
    pricier = priced(usd_per_hour=2 * usd_per_hour)
    assert worth_of(THROUGHPUT, pricier, asked).examples_per_usd < better.examples_per_usd


def test_without_losses_it_is_throughput_over_price() -> None:
    worth = worth_of(THROUGHPUT, priced(usd_per_hour=2.0), TERMS)
    assert worth.usd_per_hour == 8.0
    assert worth.raw_examples_per_usd == 8.0 * 3600 / 8.0
    assert worth.examples_per_usd == pytest.approx(3600.0)
    assert worth.usd == pytest.approx(1e6 / 3600)


def test_an_interruption_costs_two_morphs_a_boot_and_repeated_work() -> None:
    asked = replace(TERMS, morph_s=30.0, lag_steps=10.0)
    rough = priced(losses_per_hour=0.5, boot_s=240.0)
    # Two replicas of two stages: the partner of the first loss is hit 1 time in 3.
    lost_s = 240.0 / 4 + 2 * 30.0 + 10.0 * 2.0 / 3
    net_examples_per_s = 8.0 / (1 + 4 * 0.5 * lost_s / 3600)
    worth = worth_of(THROUGHPUT, rough, asked)
    assert worth.net_examples_per_s == pytest.approx(net_examples_per_s)
    boot_usd = 8.0 * 240.0 / 3600
    unused_usd = 4 * 0.5 * 2.0 * TERMS_OF["aws"].unused_s(0.5) / 3600
    hours = 1e6 / net_examples_per_s / 3600
    assert worth.usd == pytest.approx((8.0 + unused_usd) * hours + boot_usd)


def test_no_life_is_billed_for_less_than_the_clouds_shortest_time() -> None:
    # 8 examples take a second; 4 VMs are billed for a minute each.
    short = replace(TERMS, examples=8.0)
    assert worth_of(THROUGHPUT, priced(), short).usd == pytest.approx(8.0 / 60)
    exact = priced(cloud="local")
    assert worth_of(THROUGHPUT, exact, short).usd == pytest.approx(8.0 / 3600)
    # Lives of a second on the average, of which hardly one exceeds the minute.
    assert TERMS_OF["aws"].unused_s(3600.0) == pytest.approx(0.5 + 59.0)
    assert TERMS_OF["aws"].unused_s(0.0) == 0.5


def test_a_place_that_hardly_gives_machines_costs_boots_in_vain() -> None:
    """Half as likely, twice as many boots; unknown is as good as certain."""
    usd = {
        score: worth_of(THROUGHPUT, replace(priced(boot_s=360.0), obtainability=score), TERMS).usd
        for score in (None, 1.0, 0.5, 0.0)
    }
    boot_usd = 4 * priced().offer.usd_per_hour * 0.1
    assert usd[None] == usd[1.0]
    assert usd[0.5] - usd[1.0] == pytest.approx(boot_usd)
    assert usd[0.0] - usd[1.0] == pytest.approx(9 * boot_usd)


def test_storage_egress_and_traffic_between_zones_are_paid() -> None:
    plain = worth_of(THROUGHPUT, priced(), TERMS).usd
    hours = 1e6 / 8.0 / 3600
    stored = replace(TERMS, stored_bytes=73.05e9, storage_usd_per_gb_month=0.1)
    assert worth_of(THROUGHPUT, priced(), stored).usd == pytest.approx(plain + 0.01 * hours)
    elsewhere = Place("aws", "r", "b", "t")
    lost = priced(losses_per_hour=0.5)
    before = worth_of(THROUGHPUT, lost, TERMS).usd
    fetching = replace(TERMS, data_bytes={"gcp": 1e9, "azure": 2e9, "aws": 4e9})
    each = THROUGHPUT.vms * 3 * 0.09
    assert worth_of(THROUGHPUT, priced(), fetching).usd == pytest.approx(plain + each)
    assert worth_of(THROUGHPUT, lost, fetching).usd > before + each
    joining = replace(TERMS, held=elsewhere)
    chatty = replace(THROUGHPUT, sent_bytes=1e9)
    steps = 1e6 / 16
    usd = worth_of(chatty, priced(), joining).usd
    assert usd == pytest.approx(plain + 0.02 * steps)
    assert worth_of(chatty, priced(zone="b"), joining).usd == pytest.approx(plain)
    own = replace(joining, zone_usd_per_gb=0.0)
    assert worth_of(chatty, priced(), own).usd == pytest.approx(plain)


def test_what_was_measured_corrects_its_type_and_no_other() -> None:
    asked = replace(TERMS, corrections={("aws", "t"): 0.5})
    assert worth_of(THROUGHPUT, priced(), asked).examples_per_s == 4.0
    plain = worth_of(THROUGHPUT, priced(instance_type="u"), TERMS)
    assert worth_of(THROUGHPUT, priced(instance_type="u"), asked) == plain


def test_expensive_but_rarely_interrupted_beats_cheap_but_often_interrupted() -> None:
    cheap = priced(zone="cheap", usd_per_hour=1.0, losses_per_hour=6.0, boot_s=300.0)
    safe = priced(zone="safe", usd_per_hour=1.5, spot=False, boot_s=300.0)
    asked = replace(TERMS, morph_s=60.0)
    best = rank([cheap, safe], THROUGHPUTS, asked).best
    assert best is not None
    assert best.priced is safe
    calm = rank([replace(cheap, losses_per_hour=0.0), safe], THROUGHPUTS, asked).best
    assert calm is not None
    assert calm.priced.offer.zone == "cheap"


@pytest.mark.parametrize(
    ("one", "why_not"),
    [
        (priced(usd_per_hour=math.nan), "price: got nan USD per hour"),
        (priced(usd_per_hour=-1.0), "price: got -1 USD per hour"),
        (priced(usd_per_hour=math.inf), "price: got inf USD per hour"),
        (priced(losses_per_hour=math.nan), "losses per hour: got nan"),
        (priced(is_stale=True), "its price is too old to rent by"),
        (
            priced(None),
            "its speed is unknown: no published peak at the job's precision",
        ),
        (priced(spot=False), "on demand: resources.allow_on_demand is not set"),
        (priced(max_vms=0), "no machine is available"),
        (priced(usd_per_hour=9.0), "budget.max_usd_per_hour does not pay for one"),
        (priced(TOO_SMALL), "the model needs"),
    ],
)
def test_offers_that_cannot_be_used_say_why(one: Priced, why_not: str) -> None:
    asked = replace(TERMS, allow_on_demand=False, max_usd_per_hour=8.0)
    good = priced(zone="good", usd_per_hour=2.0)
    ranking = rank([one, good], THROUGHPUTS, asked)
    assert [row.priced for row in ranking.rows] == [good, one]
    assert ranking.rows[1].why_not.startswith(why_not)
    alone = rank([one], THROUGHPUTS, asked)
    assert alone.best is None
    ((reason, count),) = alone.reasons().items()
    assert reason.startswith(why_not)
    assert count == 1


def test_of_machines_that_cost_nothing_the_faster_comes_first() -> None:
    fast = replace(priced().machine, speed=2.0)  # type: ignore[type-var]
    free = [priced(zone="slow", usd_per_hour=0.0)]
    free.append(priced(fast, zone="fast", usd_per_hour=0.0))
    best = rank(free, THROUGHPUTS, TERMS).best
    assert best is not None
    assert best.priced.offer.zone == "fast"


def test_a_fleet_is_as_large_as_limits_allow() -> None:
    assert fleet_size(offer(usd_per_hour=2.0), TERMS) == 4
    capped = replace(TERMS, max_usd_per_hour=0.3)
    assert fleet_size(offer(usd_per_hour=0.1), capped) == 3
    assert fleet_size(offer(gpus=8), replace(TERMS, max_gpus=20)) == 2


def test_a_fleet_is_no_larger_than_the_quota_of_its_family() -> None:
    for quota, vms in ((None, 8), (3.9, 3), (0.0, 1), (100.0, 8)):
        bounded = replace(offer(), quota_vms=quota)
        assert fleet_size(bounded, replace(TERMS, max_vms=8)) == vms


def test_where_the_best_offer_has_too_few_the_next_of_its_region_fills_up() -> None:
    market = [
        priced(zone="a", usd_per_hour=1.0, max_vms=2),
        priced(zone="a", usd_per_hour=1.1, max_vms=2, spot=False),
        priced(zone="far", region="far", usd_per_hour=1.2),
        priced(zone="b", usd_per_hour=1.5),
    ]
    ranking = rank(market, THROUGHPUTS, TERMS)
    fleet = greedy_fleet(ranking, TERMS)
    found = [(row.priced.offer.zone, row.priced.offer.spot, n) for row, n in fleet]
    assert found == [("a", True, 2), ("b", True, 2)]
    capped = replace(TERMS, max_usd_per_hour=3.6)
    few = [(r.priced.offer.zone, n) for r, n in greedy_fleet(ranking, capped)]
    assert few == [("a", 2), ("b", 1)]
    assert greedy_fleet(rank([], THROUGHPUTS, TERMS), TERMS) == []


CAPPED = replace(TERMS, min_vms=4, max_usd_per_hour=9.0)


def test_an_offer_whose_min_vms_exceed_the_cap_cannot_be_used() -> None:
    ranking = rank([priced(usd_per_hour=3.0)], THROUGHPUTS, CAPPED)
    assert ranking.best is None
    reason = "budget.max_usd_per_hour does not pay for 4, as resources.min_vms asks"
    assert ranking.reasons() == {reason: 1}
    beside = rank([priced(usd_per_hour=3.0), priced(usd_per_hour=1.0)], THROUGHPUTS, CAPPED)
    assert [row.vms for row in beside.rows] == [4, 3]
    assert not beside.reasons()


def test_a_fleet_is_large_enough_whenever_the_cap_allows_it() -> None:
    fast = replace(priced().machine, speed=9.0)  # type: ignore[type-var]
    expensive, cheap = (
        priced(fast, zone="z", usd_per_hour=3.0),
        priced(usd_per_hour=1.0),
    )
    for max_vms, wanted in (
        (None, [("a", 4)]),
        (2, [("a", 2), ("z", 2)]),
        (1, [("a", 1)]),
    ):
        ranking = rank([expensive, replace(cheap, max_vms=max_vms)], THROUGHPUTS, CAPPED)
        assert ranking.rows[0].priced == expensive
        fleet = [(r.priced.offer.zone, n) for r, n in greedy_fleet(ranking, CAPPED)]
        assert fleet == wanted


@pytest.mark.rotated
@given(markets(), terms, st.integers(1, 5))
def test_no_fleet_costs_more_an_hour_than_the_cap(
    market: list[Priced], asked: RankingTerms, min_vms: int
) -> None:
    asked = replace(asked, min_vms=min(min_vms, asked.max_vms))
    cap = asked.max_usd_per_hour or math.inf
    ranking = rank(market, THROUGHPUTS, asked)
    assert all(row.worth.usd_per_hour <= cap for row in ranking.rows if row.worth)
    fleet = greedy_fleet(ranking, asked)
    assert sum(row.priced.offer.usd_per_hour * n for row, n in fleet) <= cap
    assert not fleet or sum(n for _, n in fleet) >= asked.min_vms


def test_a_fleet_is_not_filled_up_from_another_region() -> None:
    expensive, far = (priced(usd_per_hour=3.0), priced(region="far", usd_per_hour=1.0))
    ranking = rank([expensive, far], THROUGHPUTS, CAPPED)
    assert [row.priced for row in ranking.rows if not row.why_not] == [far]
    assert greedy_fleet(ranking, CAPPED) == [(ranking.rows[0], 4)]
