"""Offers and launches: an intent is journalled, rented, answered; nothing twice."""

from __future__ import annotations

from dataclasses import replace

from spottrain.cloud.provider import Offer
from spottrain.pricing.offers import offer_key
from spottrain.varuna_manager import history
from spottrain.varuna_manager.commands import LaunchVms, Outcome
from spottrain.varuna_manager.core_fleet import adopt
from spottrain.varuna_manager.events import (
    LaunchIntended,
    LaunchRefused,
    OffersSeen,
    VmsLaunched,
)
from spottrain.varuna_manager.launching import next_intent, room
from spottrain.varuna_manager.records import Intent, PriceChange
from spottrain.varuna_manager.state import JobPhase
from spottrain.varuna_manager.turn import Turn

AUTH_COOLDOWN_S = 300.0


def offers_seen(turn: Turn, event: OffersSeen) -> None:
    """Note what can be rented, and which prices moved."""
    state = turn.state
    before = {offer_key(offer): offer for offer in state.offers}
    for offer in event.offers:
        old = before.get(offer_key(offer))
        if old is not None and old.usd_per_hour != offer.usd_per_hour:
            _price_changed(turn, old, offer)
    back = {offer_key(offer) for offer in event.offers if offer.available}
    cooldowns = {k: v for k, v in state.cooldowns.items() if k not in back}
    turn.state = replace(
        turn.state,
        offers=event.offers,
        offers_seen_at_s=turn.now_s,
        cooldowns=cooldowns,
    )


def _price_changed(turn: Turn, old: Offer, new: Offer) -> None:
    change = PriceChange(
        at_s=turn.now_s,
        zone=new.zone,
        instance_type=new.instance_type,
        spot=new.spot,
        old_usd_per_hour=old.usd_per_hour,
        new_usd_per_hour=new.usd_per_hour,
    )
    tally = turn.state.tally
    turn.state = replace(
        turn.state,
        price_changes=history.keep(turn.state.price_changes, change),
        tally=replace(tally, price_changes=tally.price_changes + 1),
    )
    turn.say(f"price in {new.zone}: {old.usd_per_hour:g} -> {new.usd_per_hour:g} USD/h")


def launch_intended(turn: Turn, event: LaunchIntended) -> None:
    """Rent, now that the intent is in the journal; a repeated intent is ignored."""
    turn.state = state = replace(turn.state, launch_wished=False)
    new = event.intent == next_intent(state)
    if not new or state.phase is not JobPhase.ACTIVE or event.count > room(state):
        return
    intent = Intent(
        intent=event.intent, token=event.token, offer=event.offer, count=event.count
    )
    turn.state = replace(
        state,
        intents={**state.intents, intent.intent: intent},
        next_intent=state.next_intent + 1,
    )
    launch(turn, intent)


def launch(turn: Turn, intent: Intent) -> None:
    """Ask the cloud for the VMs of ``intent``; the token keeps it from doing so twice."""
    turn.do(
        LaunchVms(
            intent=intent.intent,
            token=intent.token,
            offer=intent.offer,
            count=intent.count,
        )
    )


def vms_launched(turn: Turn, event: VmsLaunched) -> None:
    """Take in what the cloud gave; an offer that gave less cools down."""
    for vm in event.vms:
        adopt(turn, vm)
    intent = _close_intent(turn, event.intent)
    if intent is not None and len(event.vms) < intent.count:
        _cool_down(turn, intent, turn.state.job.cooldown_s)
        turn.say(f"{intent.offer.zone} gave {len(event.vms)} of {intent.count} VMs")


def launch_refused(turn: Turn, event: LaunchRefused) -> None:
    """Leave the offer alone for a while, or ask again if the answer left it open."""
    intent = turn.state.intents.get(event.intent)
    if intent is None:
        return
    turn.say(f"no VM from {intent.offer.zone}: {event.reason}")
    if event.refusal in ("throttled", "unknown"):
        retry_at_s = turn.now_s + event.retry_after_s
        intents = {
            **turn.state.intents,
            event.intent: replace(intent, retry_at_s=retry_at_s),
        }
        turn.state = replace(turn.state, intents=intents)
        return
    _close_intent(turn, event.intent)
    refused = event.refusal == "auth"
    cooldown_s = AUTH_COOLDOWN_S if refused else turn.state.job.cooldown_s
    _cool_down(turn, intent, cooldown_s)
    if refused and not turn.state.vms:
        turn.end(Outcome(kind="failed", exit_code=6, reason=event.reason))


def _close_intent(turn: Turn, name: str) -> Intent | None:
    intents = dict(turn.state.intents)
    intent = intents.pop(name, None)
    turn.state = replace(turn.state, intents=intents)
    return intent


def _cool_down(turn: Turn, intent: Intent, cooldown_s: float) -> None:
    until_s = turn.now_s + cooldown_s
    cooldowns = {**turn.state.cooldowns, offer_key(intent.offer): until_s}
    turn.state = replace(turn.state, cooldowns=cooldowns)


def advance(turn: Turn) -> None:
    """Ask again where an answer left it open whether VMs were rented."""
    for intent in turn.state.intents.values():
        if intent.retry_at_s is not None and turn.due(intent.retry_at_s):
            again = replace(intent, retry_at_s=None)
            intents = {**turn.state.intents, intent.intent: again}
            turn.state = replace(turn.state, intents=intents)
            launch(turn, again)
