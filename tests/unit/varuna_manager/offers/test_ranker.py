"""What offers are worth to a job that runs, and what the core makes of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.varuna_manager.story import FACTS, OFFER, ON_DEMAND, PROFILE, Story

from spottrain.cloud.port.provider import Offer, VmState
from spottrain.pricing.prices.hazard import Exposure, Hazards
from spottrain.pricing.prices.history import VmLife
from spottrain.pricing.prices.place import Place, offer_key
from spottrain.pricing.ranking.order import (
    OfferWorth,
    in_order,
)
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.daemon.market_watch import MarketWatch
from spottrain.varuna_manager.jobs.vm_history import VmHistory, open_history
from spottrain.varuna_manager.offers.ranker import TRUSTED_STEPS, OfferRanker

CALM = Hazards((), {})
OTHER = replace(OFFER, zone="other", instance_type="u", usd_per_hour=1.1)
PLACE = Place(OFFER.cloud, OFFER.region, OFFER.zone, OFFER.instance_type)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path))


def worth(offer: Offer, examples_per_usd: float) -> OfferWorth:
    return OfferWorth(
        offer=offer_key(offer),
        examples_per_usd=examples_per_usd,
        usd_per_hour=offer.usd_per_hour,
    )


# --- The core -------------------------------------------------------------------------------


def test_what_trains_most_for_a_dollar_is_rented_whatever_its_market() -> None:
    story = Story(allow_on_demand=True)
    worths = (worth(OFFER, 5.0), worth(ON_DEMAND, 9.0))
    story.tell(e.OffersRanked, worths=worths)
    story.start()
    assert story.emitted(c.IntendLaunch)[0].offer == ON_DEMAND


def test_a_new_price_counts_at_once() -> None:
    worths = {w.offer: w for w in (worth(OFFER, 5.0), worth(OTHER, 6.0))}
    assert in_order((OFFER, OTHER), worths) == (OTHER, OFFER)
    dearer = replace(OTHER, usd_per_hour=OTHER.usd_per_hour * 1.5)
    assert in_order((OFFER, dearer), worths) == (OFFER, dearer)


def test_what_the_job_cannot_run_on_is_rented_only_if_there_is_nothing_else() -> None:
    worths = {w.offer: w for w in (worth(OFFER, 0.0), worth(OTHER, 6.0))}
    new = replace(OFFER, zone="new", usd_per_hour=0.1)
    assert in_order((OFFER, new, OTHER), worths) == (OTHER, new)
    assert in_order((OFFER,), worths) == (OFFER,)
    assert in_order((OTHER, OFFER), {}) == (OFFER, OTHER)


# --- The appraisal --------------------------------------------------------------------------


def trained(*ids: str, steps: int = TRUSTED_STEPS) -> State:
    return Story().training(*ids, steps=steps).state


def test_without_a_profile_nothing_is_known() -> None:
    story = Story()
    story.start()
    assert OfferRanker().appraise(story.state, (OFFER,), CALM) is None


def test_before_that_clouds_gpus_are_told_apart_by_their_peaks() -> None:
    story = Story()
    story.start()
    cloud = replace(OFFER, cloud="aws", usd_per_hour=10.0)
    v100, a100, h100 = (
        replace(cloud, instance_type=name)
        for name in ("p3.16xlarge", "p4d.24xlarge", "p5.48xlarge")
    )
    dear = replace(a100, zone="dear", usd_per_hour=1000.0)
    offers = (dear, v100, a100, h100)
    appraiser = OfferRanker()
    worths = appraiser.appraise(story.state, offers, CALM)
    assert worths is not None
    assert in_order(offers, worths) == (h100, a100, v100, dear)
    assert appraiser.appraise(story.state, offers, CALM) is None
    assert appraiser.appraise(story.state, (*offers, OFFER), CALM) is None
    # A laptop's profile does not tell them apart either.
    known = e.KnownProfile(profile=PROFILE, measured_at_s=0.0)
    story.tell(e.ProfilesListed, profiles=(known,))
    again = OfferRanker().appraise(story.state, offers, CALM)
    assert again == worths


def test_machines_that_cannot_hold_the_model_come_last() -> None:
    huge = replace(FACTS.sections[0], param_bytes=10**12)
    facts = replace(FACTS, sections=(huge, FACTS.sections[1]), num_parameters=10**12)
    story = Story(facts=facts)
    story.start()
    cloud = replace(OFFER, cloud="aws", usd_per_hour=10.0)
    small = replace(cloud, instance_type="p3.2xlarge", usd_per_hour=0.1)
    large = replace(cloud, instance_type="p5.48xlarge")
    worths = OfferRanker().appraise(story.state, (small, large), CALM)
    assert worths is not None
    assert in_order((small, large), worths) == (large,)


def test_a_profile_that_was_kept_ranks_before_anything_is_measured() -> None:
    story = Story()
    known = e.KnownProfile(profile=PROFILE, measured_at_s=0.0)
    story.tell(e.ProfilesListed, profiles=(known,))
    worths = OfferRanker().appraise(story.state, (OFFER, OTHER), CALM)
    assert worths is not None
    first, second = worths[offer_key(OFFER)], worths[offer_key(OTHER)]
    assert first.examples_per_usd == pytest.approx(
        second.examples_per_usd * 1.1, rel=1e-3
    )


def test_the_same_question_is_not_answered_twice() -> None:
    state, appraiser = trained("a", "b"), OfferRanker()
    assert appraiser.appraise(state, (OFFER,), CALM) is not None
    assert appraiser.appraise(state, (OFFER,), CALM) is None
    dearer = replace(OFFER, usd_per_hour=2.0)
    assert appraiser.appraise(state, (dearer,), CALM) is not None


def test_losses_that_were_seen_make_an_offer_worth_less() -> None:
    rough = Hazards([Exposure(place=PLACE, vm_hours=1.0, losses=500)], {})
    state = trained("a", "b")
    calm, seen = (OfferRanker().appraise(state, (OFFER,), h) for h in (CALM, rough))
    assert calm is not None
    assert seen is not None
    key = offer_key(OFFER)
    assert seen[key].examples_per_usd < 0.9 * calm[key].examples_per_usd


def test_predictions_are_corrected_by_what_was_measured() -> None:
    # Predicted 1 s on a pipeline of two VMs, and a second is what its steps take.
    state = trained("a", "b")
    assert state.generation is not None
    slower = replace(
        state,
        generation=replace(state.generation, step_times_s=(4.0,) * TRUSTED_STEPS),
    )
    few = replace(
        state,
        generation=replace(state.generation, step_times_s=(4.0,) * (TRUSTED_STEPS - 1)),
    )
    key = offer_key(OFFER)
    right, slow, unsure = (
        OfferRanker().appraise(one, (OFFER,), CALM) for one in (state, slower, few)
    )
    assert right is not None
    assert slow is not None
    assert unsure is not None
    share = slow[key].examples_per_usd / right[key].examples_per_usd
    assert share == pytest.approx(0.25, rel=0.01)
    assert unsure[key] == right[key]


def test_a_hiccup_hardly_changes_what_is_known_but_what_lasts_does() -> None:
    state = trained("a", "b")
    assert state.generation is not None
    usual_s = state.generation.step_times_s[-1]
    slow = replace(
        state.generation,
        step_times_s=(4 * usual_s,) * len(state.generation.step_times_s),
    )
    key, appraiser = offer_key(OFFER), OfferRanker()
    usual = appraiser.appraise(state, (OFFER,), CALM)
    assert usual is not None

    def share(after_s: float) -> float:
        later = replace(state, generation=slow, now_s=state.now_s + after_s)
        worths = appraiser.appraise(later, (OFFER,), CALM)
        assert worths is not None
        return worths[key].examples_per_usd / usual[key].examples_per_usd

    assert share(2.0) > 0.9
    assert share(600.0) == pytest.approx(0.25, rel=0.02)


def test_machines_that_cost_nothing_can_be_compared() -> None:
    free = replace(OFFER, usd_per_hour=0.0)
    fast = replace(free, zone="fast", gpu_speed=2.0)
    worths = OfferRanker().appraise(trained("a", "b"), (free, fast), CALM)
    assert worths is not None
    assert in_order((free, fast), worths) == (fast, free)


# --- The watch ------------------------------------------------------------------------------


class Desk:
    """Keeps what it is told."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.events: list[e.Event] = []

    def now_s(self) -> float:
        return 5000.0

    def feed(self, event: e.Event) -> Any:
        self.events.append(event)


def told(desk: Desk) -> list[str]:
    names, desk.events = [type(event).__name__ for event in desk.events], []
    return names


def test_the_core_hears_what_offers_are_worth_before_it_sees_them() -> None:
    desk = Desk(trained("a", "b"))
    watch = MarketWatch(desk)
    asyncio.run(watch.seen((OFFER, OTHER)))
    assert told(desk) == ["OffersRanked", "OffersSeen"]
    asyncio.run(watch.seen((replace(OFFER, observed_at_s=9.0), OTHER)))
    assert told(desk) == []
    # A price alone changes no worth: the core reckons with it by itself.
    asyncio.run(watch.seen((replace(OFFER, usd_per_hour=1.05), OTHER)))
    assert told(desk) == ["OffersSeen"]


def test_how_vms_end_is_remembered_and_counts_from_then_on() -> None:
    desk = Desk(trained("a", "b"))
    watch = MarketWatch(desk)
    asyncio.run(watch.seen((OFFER, OTHER)))
    told(desk)
    now_s = time.time()
    life = VmLife(
        job="uid",
        vm_id="",
        place=PLACE,
        spot=True,
        from_s=now_s - 1.0,
        until_s=now_s,
        ended="kill",
    )
    lives = [replace(life, vm_id=f"v{number}") for number in range(600)]
    asyncio.run(watch.ended(lives))
    with open_history() as history:
        (seen,) = history.exposures()
    assert (seen.place, seen.losses) == (PLACE, 600)
    asyncio.run(watch.seen((OFFER, OTHER)))
    assert told(desk) == ["OffersRanked"]


def test_a_database_that_cannot_be_used_costs_the_hazards_only(tmp_path: Path) -> None:
    (tmp_path / "market.sqlite").mkdir()
    desk = Desk(trained("a", "b"))
    watch = MarketWatch(desk)
    asyncio.run(watch.seen((OFFER,)))
    asyncio.run(watch.ended([]))
    assert told(desk) == ["OffersRanked", "OffersSeen"]


def test_prices_of_clouds_are_remembered() -> None:
    desk = Desk(trained("a", "b"))
    cloud = replace(
        OFFER, cloud="aws", instance_type="p4d.24xlarge", observed_at_s=1.7e9, gpus=8
    )
    asyncio.run(MarketWatch(desk).seen((OFFER, cloud)))
    with open_history() as history:
        (price,) = history.latest()
    assert (price.cloud, price.usd_per_hour, price.spot) == ("aws", 1.0, True)


def test_ended_vms_are_told_once() -> None:
    story = Story().training("a", "b", "c", "d")
    book = VmHistory(story.state)
    before = story.state
    story.now_s += 60.0
    vms = tuple(
        story.vm(v, "intent-0", state=VmState.TERMINATED, ended_at_s=story.now_s)
        if v == "a"
        else story.vm(v, "intent-0")
        for v in "abcd"
    )
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=vms)
    book.note(before, story.now_s, story.state)
    (life,) = book.take_ended()
    assert (life.vm_id, life.ended, life.until_s) == ("a", "kill", story.now_s)
    assert book.take_ended() == []
    assert {life.vm_id for life in book.until_now(story.state)} == {"b", "c", "d"}
