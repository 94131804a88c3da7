"""What is watched of the market for a running job, and what is remembered of its VMs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.varuna_manager.story import OFFER, Story
from tests.view import View

from spottrain.cloud.port.provider import Offer, VmState
from spottrain.pricing.prices.history import VmLife
from spottrain.pricing.prices.place import offer_key, place_of
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.core.step import step
from spottrain.varuna_manager.daemon.market_watch import MarketWatch
from spottrain.varuna_manager.jobs.vm_history import VmHistory, open_history
from spottrain.varuna_manager.reporting.history import JobHistory

OTHER = replace(OFFER, zone="other", instance_type="u", usd_per_hour=1.1)


def trained() -> State:
    return Story().training("a", "b").state


class Sink:
    """Keeps the events that it is fed."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.events: list[e.Event] = []

    def now_s(self) -> float:
        return 5000.0

    def feed(self, event: e.Event) -> Any:
        self.events.append(event)


def fed(sink: Sink) -> list[str]:
    names, sink.events = [type(event).__name__ for event in sink.events], []
    return names


def test_worths_of_offers_are_fed_before_the_offers() -> None:
    sink = Sink(trained())
    watch = MarketWatch(sink)
    asyncio.run(watch.seen((OFFER, OTHER)))
    assert fed(sink) == ["OffersRanked", "OffersSeen"]
    asyncio.run(watch.seen((replace(OFFER, observed_at_s=9.0), OTHER)))
    assert fed(sink) == []
    # A price alone changes no worth: the core applies it by itself.
    asyncio.run(watch.seen((replace(OFFER, usd_per_hour=1.05), OTHER)))
    assert fed(sink) == ["OffersSeen"]


def test_only_what_changes_in_the_market_is_fed_again() -> None:
    """A core that is told of changes knows what one knows that is told everything."""
    sink = Sink(trained())
    watch = MarketWatch(sink)
    third = replace(OFFER, zone="third")
    markets: list[tuple[Offer, ...]] = [
        (OFFER, OTHER),
        (OFFER, OTHER, third),
        (replace(OFFER, usd_per_hour=1.5), third),
        (third, replace(OFFER, available=0)),
        (),
        (OTHER,),
    ]
    told = whole = sink.state
    history, expected = JobHistory(), JobHistory()
    for number, offers in enumerate(markets):
        sink.events = []
        asyncio.run(watch.seen(offers))
        for event in sink.events:
            before, (told, _) = told, step(told, event)
            history.note(before, event, told)
        everything = e.OffersSeen(at_s=sink.now_s(), offers=offers)
        before, (whole, _) = whole, step(whole, everything)
        expected.note(before, everything, whole)
        (seen,) = (one for one in sink.events if isinstance(one, e.OffersSeen))
        assert seen.only_changes == (number > 0)
        assert len(seen.offers) <= 2
        known = {offer_key(one): one for one in View(told).offers}
        assert known == {offer_key(one): one for one in offers}
        assert View(told).worths.keys() == known.keys()
    assert history.prices == expected.prices


def test_interruptions_are_remembered_and_count_from_then_on() -> None:
    sink = Sink(trained())
    watch = MarketWatch(sink)
    asyncio.run(watch.seen((OFFER, OTHER)))
    fed(sink)
    now_s = time.time()
    life = VmLife(
        job="uid",
        vm_id="",
        place=place_of(OFFER),
        spot=True,
        from_s=now_s - 1.0,
        until_s=now_s,
        ended="kill",
    )
    lives = [replace(life, vm_id=f"v{number}") for number in range(600)]
    asyncio.run(watch.ended(lives))
    with open_history() as history:
        (seen,) = history.exposures()
    assert (seen.place, seen.losses) == (place_of(OFFER), 600)
    asyncio.run(watch.seen((OFFER, OTHER)))
    assert fed(sink) == ["OffersRanked"]


def test_without_a_usable_database_only_interruption_rates_are_missing(home: Path) -> None:
    (home / "market.sqlite").mkdir(parents=True)
    sink = Sink(trained())
    watch = MarketWatch(sink)
    asyncio.run(watch.seen((OFFER,)))
    asyncio.run(watch.ended([]))
    assert fed(sink) == ["OffersRanked", "OffersSeen"]


def test_prices_of_clouds_are_remembered() -> None:
    sink = Sink(trained())
    cloud = replace(OFFER, cloud="aws", instance_type="p4d.24xlarge", observed_at_s=1.7e9, gpus=8)
    asyncio.run(MarketWatch(sink).seen((OFFER, cloud)))
    with open_history() as history:
        (price,) = history.latest()
    assert (price.cloud, price.usd_per_hour, price.spot) == ("aws", 1.0, True)


def test_an_ended_vm_is_reported_once() -> None:
    story = Story().training("a", "b", "c", "d")
    book = VmHistory(story.state)
    before = story.state
    story.now_s += 60.0
    vms = tuple(
        story.listed(v, "intent-0", state=VmState.TERMINATED, ended_at_s=story.now_s)
        if v == "a"
        else story.listed(v, "intent-0")
        for v in "abcd"
    )
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=vms)
    book.note(before, story.now_s, story.state)
    (life,) = book.take_ended()
    assert (life.vm_id, life.ended, life.until_s) == ("a", "kill", story.now_s)
    assert book.take_ended() == []
    assert {life.vm_id for life in book.until_now(story.state)} == {"b", "c", "d"}
