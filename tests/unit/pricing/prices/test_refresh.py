"""Asking, remembering, making do; and the last look before renting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from spottrain.cloud.http import PriceSourceError
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.price import FilteredPrices, Price, offers
from spottrain.pricing.prices.recheck import LIVE_S, check_live
from spottrain.pricing.prices.refresh import (
    HISTORY_S,
    TTL_S,
    PriceQuery,
    PriceRequest,
    Refreshed,
    known,
    on_demand_prices,
    refresh,
)
from spottrain.units import DAY_S, HOUR_S

FACTS = catalogue()
NOW_S = 1_790_000_000.0
LATER_S = NOW_S + DAY_S
P4D, P5 = (FACTS.types["aws", name] for name in ("p4d.24xlarge", "p5.48xlarge"))
T4 = FACTS.types["azure", "Standard_NC4as_T4_v3"]
PRICE = Price(
    cloud="aws",
    region="us-east-1",
    zone="us-east-1a",
    instance_type="p4d.24xlarge",
    spot=True,
    usd_per_hour=8.0,
    since_s=NOW_S - HOUR_S,
    seen_s=NOW_S,
    source="test",
)


@dataclass
class Market:
    """A price API of which the test says what it tells."""

    prices: list[Price]
    cloud: str = "aws"
    name: str = "aws test"
    markets: frozenset[bool] = frozenset({True, False})
    ttl_s: float = TTL_S
    down: bool = False
    questions: list[PriceQuery] = field(default_factory=list)

    def fetch(self, question: PriceQuery) -> Iterator[Price]:
        self.questions.append(question)
        if self.down:
            raise PriceSourceError("the API is down")
        names = {kind.name for kind in question.kinds}
        for price in self.prices:
            if price.instance_type in names:
                yield replace(price, seen_s=question.now_s)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with History(tmp_path / "market.sqlite") as history:
        yield history


def ask(market: Market, history: History, now_s: float, **more: Any) -> Refreshed:
    request = more.pop("request", PriceRequest(kinds=[P4D]))
    return refresh([market], history, FACTS, request, now_s, **more)


def spot(history: History) -> list[Price]:
    return [
        p for p in known(history, FACTS, PriceRequest(kinds=[P4D, P5]), LATER_S).prices if p.spot
    ]


def test_what_was_queried_a_moment_ago_is_not_queried_again(history: History) -> None:
    market = Market([PRICE])
    for now_s in (NOW_S, NOW_S + TTL_S / 2, NOW_S + TTL_S * 1.5):
        ask(market, history, now_s)
    assert len(market.questions) == 2
    assert [q.since_s for q in market.questions] == [NOW_S - HISTORY_S, NOW_S]
    assert [p.seen_s for p in spot(history)] == [NOW_S + TTL_S * 1.5]


def test_only_what_is_due_is_queried(history: History) -> None:
    market = Market([PRICE])
    ask(market, history, NOW_S)
    ask(market, history, NOW_S, request=PriceRequest(kinds=[P4D, P5, T4]))
    ask(market, history, NOW_S, request=PriceRequest(kinds=[P5], regions=["us-east-1"]))
    assert [list(q.kinds) for q in market.questions] == [[P4D], [P5]]


def test_a_query_of_one_region_does_not_count_for_all(history: History) -> None:
    market = Market([PRICE])
    ask(market, history, NOW_S, request=PriceRequest(kinds=[P4D], regions=["us-east-1"]))
    ask(market, history, NOW_S)
    assert [list(q.regions) for q in market.questions] == [["us-east-1"], []]


def test_after_a_clock_jumped_back_prices_are_queried_again(history: History) -> None:
    market = Market([PRICE])
    ask(market, history, NOW_S + DAY_S)
    ask(market, history, NOW_S)
    assert len(market.questions) == 2


def test_a_cloud_that_does_not_answer_costs_its_own_prices_only(
    history: History,
) -> None:
    aws = Market([PRICE])
    ask(aws, history, NOW_S)
    aws.down = True
    azure_price = replace(
        PRICE,
        cloud="azure",
        region="eastus",
        zone="eastus",
        instance_type=T4.name,
        usd_per_hour=0.2,
    )
    azure = Market([azure_price], cloud="azure", name="azure test")
    later_s = NOW_S + 2 * HOUR_S
    request = PriceRequest(kinds=[P4D, T4])
    answers = refresh([aws, azure], history, FACTS, request, later_s)
    assert answers.failures == {"aws": "the API is down"}
    newest = {p.cloud: p for p in known(history, FACTS, request, LATER_S).prices if p.spot}
    assert newest["aws"].age_s(later_s) == 2 * HOUR_S
    assert newest["azure"].age_s(later_s) == 0.0
    ask(aws, history, later_s)
    assert len(aws.questions) == 3, "a failure is no answer: it is asked again at once"


def test_an_invalid_price_is_named_and_not_recorded(history: History) -> None:
    market = Market([replace(PRICE, usd_per_hour=float("nan"))])
    (warning,) = ask(market, history, NOW_S).warnings
    assert warning.startswith("aws us-east-1a p4d.24xlarge spot: price: got nan")
    assert spot(history) == []


def test_shipped_prices_count_until_newer_ones_are_known(history: History) -> None:
    request = PriceRequest(kinds=[P4D], regions=["us-east-1"])
    (shipped,) = known(history, FACTS, request, LATER_S).prices
    assert (shipped.source, shipped.usd_per_hour) == ("published", 21.957642)
    newer = replace(PRICE, spot=False, zone="us-east-1", usd_per_hour=20.0)
    history.record_prices([newer])
    assert known(history, FACTS, request, LATER_S) == FilteredPrices((newer,), ())
    elsewhere = PriceRequest(kinds=[P4D], regions=["eu-west-1"])
    assert known(history, FACTS, elsewhere, LATER_S).prices == ()


def test_spot_at_the_list_price_is_left_out(history: History) -> None:
    history.record_prices([replace(PRICE, usd_per_hour=21.96)])
    believed = known(history, FACTS, PriceRequest(kinds=[P4D]), LATER_S)
    assert not any(p.spot for p in believed.prices)
    assert "no usable spot" in believed.warnings[0]


def test_prices_recorded_by_a_clock_that_was_ahead_are_left_out(
    history: History,
) -> None:
    ahead_s = NOW_S + 30 * DAY_S
    expensive = replace(PRICE, usd_per_hour=2 * PRICE.usd_per_hour)
    history.record_prices([replace(PRICE, since_s=ahead_s, seen_s=ahead_s)])
    history.record_prices([replace(expensive, since_s=NOW_S, seen_s=NOW_S)])
    request = PriceRequest(kinds=[P4D])
    (known_now,) = [p for p in known(history, FACTS, request, NOW_S).prices if p.spot]
    assert (known_now.usd_per_hour, known_now.seen_s) == (expensive.usd_per_hour, NOW_S)


def test_a_price_that_a_wrong_clock_confirmed_was_seen_when_it_began(
    history: History,
) -> None:
    history.record_prices([replace(PRICE, since_s=NOW_S, seen_s=NOW_S)])
    history.record_prices([replace(PRICE, seen_s=NOW_S + 30 * DAY_S)])
    request, now_s = PriceRequest(kinds=[P4D]), NOW_S + 2 * DAY_S
    (price,) = [p for p in known(history, FACTS, request, now_s).prices if p.spot]
    assert price.is_stale(now_s)


def test_an_invalid_price_in_the_database_is_named_and_left_out(
    history: History,
) -> None:
    history.record_prices([replace(PRICE, usd_per_hour=-5.0)])
    believed = known(history, FACTS, PriceRequest(kinds=[P4D]), LATER_S)
    assert not any(p.spot for p in believed.prices)
    assert "got -5 USD per hour" in believed.warnings[0]


def test_on_demand_prices_are_returned_while_they_are_new_enough(
    history: History,
) -> None:
    newer = replace(PRICE, spot=False, zone="us-east-1", usd_per_hour=20.0)
    history.record_prices([newer, PRICE])
    price_of = on_demand_prices(history, FACTS, "aws", NOW_S)
    assert price_of("us-east-1", "p4d.24xlarge") == 20.0
    assert price_of("eu-west-1", "p4d.24xlarge") is None
    later_of = on_demand_prices(history, FACTS, "aws", NOW_S + 91 * DAY_S)
    assert later_of("us-east-1", "p4d.24xlarge") is None


# --- The last look ------------------------------------------------------------------------


def wanted(*prices: Price) -> list[Any]:
    return offers(prices or (PRICE,), FACTS)


def test_offers_are_checked_at_the_price_of_the_moment(history: History) -> None:
    market = Market([PRICE])
    ask(market, history, NOW_S)
    market.prices = [replace(PRICE, usd_per_hour=9.5, since_s=NOW_S + 100)]
    later_s = NOW_S + 2 * LIVE_S
    (offer,), warnings = check_live(wanted(), [market], history, FACTS, later_s)
    assert (offer.usd_per_hour, offer.observed_at_s) == (9.5, later_s)
    assert warnings == ()
    assert market.questions[-1].regions == ["us-east-1"]
    assert market.questions[-1].since_s == NOW_S


def test_a_price_of_the_same_minute_is_not_queried_twice(history: History) -> None:
    market = Market([PRICE])
    for _ in range(2):
        check_live(wanted(), [market], history, FACTS, NOW_S)
    assert len(market.questions) == 1


def test_an_offer_that_the_cloud_no_longer_lists_is_left_out(history: History) -> None:
    market = Market([PRICE])
    ask(market, history, NOW_S)
    market.prices = []
    offers_left, warnings = check_live(wanted(), [market], history, FACTS, NOW_S + 2 * LIVE_S)
    assert offers_left == []
    assert warnings == (
        "aws/us-east-1/us-east-1a/p4d.24xlarge/spot: no price to rent by; left out",
    )


def test_spot_without_a_discount_is_left_out(history: History) -> None:
    market = Market([replace(PRICE, usd_per_hour=30.0)])
    assert check_live(wanted(), [market], history, FACTS, NOW_S)[0] == []


def test_a_zone_takes_the_price_of_its_region(history: History) -> None:
    regional = replace(PRICE, zone="us-east-1")
    (offer,), _ = check_live(wanted(), [Market([regional])], history, FACTS, NOW_S)
    assert (offer.zone, offer.usd_per_hour) == ("us-east-1a", 8.0)


@pytest.mark.parametrize(("age_s", "left"), [(HOUR_S, 1), (25 * HOUR_S, 0)])
def test_while_a_cloud_is_down_its_last_prices_serve_for_a_day(
    history: History, age_s: float, left: int
) -> None:
    market = Market([PRICE])
    ask(market, history, NOW_S)
    market.down = True
    found, warnings = check_live(wanted(), [market], history, FACTS, NOW_S + age_s)
    assert len(found) == left
    assert warnings[0] == "aws: not refreshed: the API is down"


def test_an_offer_of_an_unknown_machine_is_left_out(history: History) -> None:
    strange = replace(wanted()[0], instance_type="p99.metal")
    found, warnings = check_live([strange], [], history, FACTS, NOW_S)
    assert found == []
    assert "p99.metal" in warnings[0]
