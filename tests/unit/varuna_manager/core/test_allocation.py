"""Which VMs are rented next: each rule of ``next_launch``, and when it must decide again."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.story import OFFER, ON_DEMAND, SETTINGS, Story
from tests.view import View, changed, settings_with

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.deadline.model import FleetDecision
from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.ranking.cooldowns import Cooldown, scope_of
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.varuna_manager.core.allocation import (
    available,
    changes_at_s,
    is_open,
    next_launch,
    room,
)
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.state import JobPhase, State, budget

NOW_S = 1000.0
CHEAP = replace(OFFER, zone="cheap", usd_per_hour=0.5)


def state_of(
    *offers: Offer,
    settings: JobSettings = SETTINGS,
    reconciled: bool = True,
    worths: dict[str, OfferWorth] | None = None,
    cooldowns: dict[str, Cooldown] | None = None,
    decision: FleetDecision | None = None,
) -> State:
    """A job that has rented nothing yet and sees these offers."""
    return changed(
        State(phase=JobPhase.ACTIVE, settings=settings, now_s=NOW_S),
        reconciled=reconciled,
        offers=offers,
        offers_seen_at_s=NOW_S,
        worths=worths or {},
        cooldowns=cooldowns or {},
        decision=decision,
    )


def worths(**by_zone: float) -> dict[str, OfferWorth]:
    found = {}
    for zone, examples in by_zone.items():
        key = offer_key(replace(OFFER, zone=zone))
        found[key] = OfferWorth(offer=key, examples_per_usd=examples, usd_per_hour=1.0)
    return found


def closed(offer: Offer, until_s: float) -> dict[str, Cooldown]:
    scope = scope_of(offer, "no_capacity")
    return {scope: Cooldown(until_s=until_s, length_s=30.0)}


def decided(state: State) -> tuple[Offer | None, int]:
    launch = next_launch(state)
    return launch.offer, launch.count


def test_the_first_launch_is_of_all_vms_of_the_best_offer() -> None:
    assert decided(state_of(OFFER, CHEAP)) == (CHEAP, 4)
    ranked = state_of(OFFER, CHEAP, worths=worths(z=9.0, cheap=1.0))
    assert decided(ranked) == (OFFER, 4)


def test_a_full_fleet_is_not_enlarged_but_a_vm_may_be_replaced() -> None:
    state = Story().training("a", "b", "c", "d").state
    assert room(state) == 0
    assert decided(state) == (None, 0)
    launch = next_launch(state, replacing=View(state).vm("a"))
    assert (launch.offer, launch.count) == (OFFER, 1)


def test_nothing_is_rented_before_the_clouds_have_listed_their_vms() -> None:
    assert decided(state_of(OFFER, reconciled=False)) == (None, 0)


def test_no_more_are_rented_than_the_cloud_has() -> None:
    assert decided(state_of(replace(CHEAP, available=2), OFFER))[1] == 2
    none_left = replace(CHEAP, available=0)
    assert decided(state_of(none_left, OFFER)) == (OFFER, 4)


def test_on_demand_is_rented_only_if_the_job_allows_it() -> None:
    allowing = settings_with(SETTINGS, allow_on_demand=True)
    assert decided(state_of(ON_DEMAND)) == (None, 0)
    assert decided(state_of(ON_DEMAND, settings=allowing)) == (ON_DEMAND, 4)


def test_a_refusal_closes_an_offer_until_its_cooldown_ends() -> None:
    state = state_of(OFFER, CHEAP, cooldowns=closed(CHEAP, NOW_S + 30.0))
    launch = next_launch(state)
    assert (launch.offer, launch.changes_at_s) == (OFFER, NOW_S + 30.0)
    assert decided(replace(state, now_s=NOW_S + 30.0)) == (CHEAP, 4)


def test_the_hourly_cap_bounds_a_launch() -> None:
    capped = settings_with(SETTINGS, max_usd_per_hour=2.0)
    assert decided(state_of(OFFER, settings=capped)) == (OFFER, 2)
    too_few = settings_with(capped, min_vms=3)
    assert decided(state_of(OFFER, settings=too_few)) == (None, 0)


def test_the_deadline_policy_says_how_many_of_each_offer() -> None:
    settings = settings_with(SETTINGS, deadline_s=9000.0, allow_on_demand=True)
    decision = FleetDecision(
        wanted=((offer_key(ON_DEMAND), 2),),
        mode="edge",
        reason="",
        slack_s=0.0,
        slack_usd=0.0,
    )
    state = state_of(OFFER, ON_DEMAND, settings=settings, decision=decision)
    assert decided(state) == (ON_DEMAND, 2)
    undecided = changed(state, decision=None, offers=(ON_DEMAND,))
    assert decided(undecided) == (ON_DEMAND, settings.resources.min_vms)


def test_zones_of_like_prices_are_filled_evenly() -> None:
    zones = [replace(OFFER, zone=zone) for zone in "abcd"]
    assert decided(state_of(*zones)) == (zones[0], 1)


# --- When it must be decided again ----------------------------------------------------------

ZONES = ("a", "b", "c")
OFFERS = st.builds(
    lambda zone, region, spot, usd_per_hour, available: replace(
        OFFER,
        zone=zone,
        region=region,
        spot=spot,
        usd_per_hour=usd_per_hour,
        available=available,
    ),
    st.sampled_from(ZONES),
    st.sampled_from(["r", "q"]),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 1.005, 3.0]),
    st.sampled_from([None, 0, 1, 3]),
)


@st.composite
def states(draw: st.DrawFn) -> State:
    offers = draw(st.lists(OFFERS, max_size=6, unique_by=offer_key))
    cooldowns: dict[str, Cooldown] = {}
    for offer in offers:
        until_s = NOW_S + draw(st.sampled_from([-50.0, 0.0, 20.0, 60.0]))
        if draw(st.booleans()):
            cooldowns |= closed(offer, until_s)
    settings = settings_with(
        SETTINGS,
        max_vms=draw(st.sampled_from([1, 3, 6])),
        allow_on_demand=draw(st.booleans()),
        max_usd_per_hour=draw(st.sampled_from([None, 2.0, 8.0])),
        span=draw(st.sampled_from(["region", "cloud"])),
    )
    return state_of(*offers, settings=settings, cooldowns=cooldowns)


@given(state=states())
def test_a_launch_keeps_every_limit(state: State) -> None:
    launch = next_launch(state)
    if launch.offer is None:
        assert launch.count == 0
        return
    offer = launch.offer
    assert 1 <= launch.count <= min(room(state), available(state, offer))
    assert is_open(state, offer)
    assert offer.spot or state.job.resources.allow_on_demand
    assert launch.count <= budget(state).affords(offer.usd_per_hour, 99)


@given(state=states(), share=st.floats(0.0, 0.999))
def test_a_decision_holds_until_it_says(state: State, share: float) -> None:
    launch = next_launch(state)
    until_s = launch.changes_at_s or NOW_S + 1e6
    assert until_s > NOW_S
    later = replace(state, now_s=NOW_S + share * (until_s - NOW_S))
    assert next_launch(later) == launch


@given(state=states())
def test_offers_open_when_it_was_said(state: State) -> None:
    for offer in View(state).offers:
        changes = changes_at_s(state, [offer])
        if changes is None:
            forbidden = not offer.spot and not state.job.resources.allow_on_demand
            assert is_open(state, offer) is not forbidden
        else:
            assert not is_open(state, offer)
            assert is_open(replace(state, now_s=changes), offer)
            assert not is_open(replace(state, now_s=math.nextafter(changes, 0.0)), offer)
