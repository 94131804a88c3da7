"""Offers and launches: an intent is journalled, rented, answered; nothing is rented twice."""

from __future__ import annotations

from spottrain.cloud.port.provider import Offer, Vm
from spottrain.eventlog.changed import replace
from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.ranking import cooldowns as cooling
from spottrain.units import counted
from spottrain.varuna_manager.core import allocation, spending
from spottrain.varuna_manager.core.fleet import adopt, return_vms
from spottrain.varuna_manager.core.model import counters, records
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.commands import LaunchVms, TerminateVms
from spottrain.varuna_manager.core.model.records import Intent, PriceChange
from spottrain.varuna_manager.core.model.transition import Transition

UNANSWERED_S = 60.0
"""A launch that a cloud leaves open for so long is given up if another cloud can meet it."""
SETTLE_S = 60.0
"""How long after a call that was not answered its VMs may still appear."""


def offers_seen(transition: Transition, event: e.OffersSeen) -> None:
    """Note what is on offer, and which prices moved."""
    state = transition.state
    # Offers that did not change are the same objects: of hundreds, few do.
    stayed = set(map(id, state.market.offers)).intersection(map(id, event.offers))
    before = {offer_key(one): one for one in state.market.offers if id(one) not in stayed}
    changes = []
    for offer in event.offers:
        if id(offer) in stayed:
            continue
        old = before.get(offer_key(offer))
        if old is not None and old.usd_per_hour != offer.usd_per_hour:
            changes.append(_price_change(transition.now_s, old, offer))
    if changes:
        counters.prices_changed(transition, changes)
    spending.prices_seen(transition, event.offers)
    cooldowns = state.launches.cooldowns
    if cooldowns:
        back = {offer_key(offer) for offer in event.offers if offer.available}
        cooldowns = {k: v for k, v in cooldowns.items() if k not in back}
    transition.put(
        replace(
            transition.state.market,
            offers=event.offers,
            offers_seen_at_s=transition.now_s,
        ),
        replace(transition.state.launches, cooldowns=cooldowns),
    )


def _price_change(now_s: float, old: Offer, new: Offer) -> PriceChange:
    return PriceChange(
        at_s=now_s,
        zone=new.zone,
        instance_type=new.instance_type,
        spot=new.spot,
        old_usd_per_hour=old.usd_per_hour,
        new_usd_per_hour=new.usd_per_hour,
    )


def launch_more(transition: Transition) -> None:
    """Ask for all VMs that are wanted now, and wake the core when the market changes by
    itself."""
    state = transition.state
    if state.preparation.store_error and not state.fleet.vms:
        return  # they could do nothing, but would cost money
    if state.launches.folder_trouble:
        return  # they may not get the user's code, nor the next manager know of them
    while (wanted := allocation.next_launch(transition.state)).offer is not None:
        _intend(transition, wanted.offer, wanted.count)
    transition.wake(wanted.changes_at_s)


def _intend(transition: Transition, offer: Offer, count: int) -> None:
    """Open the next intent, and ask for its VMs: that is done once it is journalled."""
    state = transition.state
    name = allocation.next_intent(state)
    intent = Intent(
        intent=name,
        offer=offer,
        count=count,
        asked_at_s=transition.now_s,
        image=state.launches.images.get(offer.cloud, ""),
        choice=allocation.choice_of(state, offer),
    )
    transition.put(
        replace(
            state.launches,
            intents={**state.launches.intents, intent.intent: intent},
            next_intent=state.launches.next_intent + 1,
            asked_clouds=state.launches.asked_clouds | {intent.offer.cloud},
        )
    )
    launch(transition, intent)


def launch(transition: Transition, intent: Intent) -> None:
    """Ask the cloud for the VMs of ``intent``; the token keeps it from doing so twice."""
    transition.emit(
        LaunchVms(
            intent=intent.intent,
            token=f"{transition.state.job.uid}-{intent.intent}",
            offer=intent.offer,
            count=intent.count,
            image=intent.image,
        )
    )


def vms_launched(transition: Transition, event: e.VmsLaunched) -> None:
    """Adopt the VMs that the cloud gave; an offer that gave fewer cools down."""
    spending.listed(transition, event.vms)  # some may have been taken back already
    for vm in event.vms:
        adopt(transition, vm)
    intent = _close_intent(transition, event.intent)
    if intent is None:
        return
    if event.vms:
        cooldowns = cooling.granted(transition.state.launches.cooldowns, intent.offer)
        transition.put(replace(transition.state.launches, cooldowns=cooldowns))
    if len(event.vms) < intent.count:
        _cool_down(transition, intent.offer, "no_capacity")
        given, zone = len(event.vms), intent.offer.zone
        transition.log(f"{zone} gave {given} of {counted(intent.count, 'VM')}")
    for vm in event.vms:
        note_image(transition, vm, intent.image)


def note_image(transition: Transition, vm: Vm, asked: str = "") -> None:
    """Keep the image of a cloud's first VM for all later ones, as long as it is offered.

    Args:
        transition: With the VM.
        vm: It came from a launch, or from another job.
        asked: The image that it was to have; empty: any.
    """
    images, cloud = transition.state.launches.images, vm.offer.cloud
    known = images.get(cloud, "")
    if not vm.image or vm.image == known or asked != known:
        return
    if known:
        transition.log(f"{cloud} no longer has the image {known}: VMs have {vm.image}")
    transition.put(replace(transition.state.launches, images={**images, cloud: vm.image}))


def launch_refused(transition: Transition, event: e.LaunchRefused) -> None:
    """Close what refused for a while, or ask again if the answer leaves it open.

    Where only a person can help, and nothing else can be rented, the job fails.
    """
    intent = transition.state.launches.intents.get(event.intent)
    if intent is None:
        return
    if event.refusal == "queued" and not intent.is_abandoned:
        retry_at_s = transition.now_s + event.retry_after_s
        transition.put_intent(replace(intent, retry_at_s=retry_at_s))
        return  # it is told by what the cloud lists
    transition.log(f"no VM from {intent.offer.zone}: {event.reason}")
    if event.refusal == "queued" or event.refusal == "throttled" or event.refusal == "unknown":
        pause_s = event.retry_after_s
        if intent.is_abandoned:
            pause_s = SETTLE_S
        elif _may_give_up(transition, intent):
            _give_up(transition, intent)
            return
        retry_at_s = transition.now_s + pause_s
        transition.put_intent(replace(intent, retry_at_s=retry_at_s))
        return
    _close_intent(transition, event.intent)
    _cool_down(transition, intent.offer, event.refusal, intent.count)
    if event.refusal in ("auth", "misconfigured") and _is_hopeless(transition):
        transition.fail(event.reason, exit_code=6)


def abandon(transition: Transition) -> None:
    """Ask for nothing again: VMs of calls without an answer are waited for, and returned."""
    for intent in transition.state.launches.intents.values():
        if intent.queued:
            _withdraw(transition, intent)
        elif not intent.is_abandoned:
            retry_at_s = intent.retry_at_s
            if retry_at_s is not None:  # else its call is under way
                retry_at_s = transition.now_s + SETTLE_S
            transition.put_intent(replace(intent, retry_at_s=retry_at_s, is_abandoned=True))


def _withdraw(transition: Transition, intent: Intent) -> None:
    """Give an intent up whose VMs wait in a queue, and take them out of it."""
    _close_intent(transition, intent.intent)
    given_up = transition.state.launches.given_up | {intent.intent}
    transition.put(replace(transition.state.launches, given_up=given_up))
    transition.emit(TerminateVms(vm_ids=tuple(sorted(intent.queued))))


def _is_hopeless(transition: Transition) -> bool:
    """Return whether nothing is rented, nor can be before a person acts."""
    state = transition.state
    return not state.fleet.vms and all(
        cooling.needs_a_person(state.launches.cooldowns, offer, transition.now_s)
        for offer in state.market.offers
        if offer.spot or state.job.resources.allow_on_demand
    )


def _may_give_up(transition: Transition, intent: Intent) -> bool:
    """Return whether an intent was left open for too long while another cloud can meet it.

    Within its own cloud it is asked for again: VMs of an intent that nobody asks for, and
    that are gone before the next poll, would be in no ledger.
    """
    state, cloud = transition.state, intent.offer.cloud
    unanswered = state.now_s - intent.asked_at_s >= UNANSWERED_S
    others = (offer for offer in state.market.offers if offer.cloud != cloud)
    return unanswered and any(allocation.is_open(state, offer) for offer in others)


def _give_up(transition: Transition, intent: Intent) -> None:
    """Give an intent up, so that another cloud meets it; see ``State.given_up``."""
    _close_intent(transition, intent.intent)
    given_up = transition.state.launches.given_up | {intent.intent}
    transition.put(replace(transition.state.launches, given_up=given_up))
    _cool_down(transition, intent.offer, "unreachable")
    transition.log(f"{intent.offer.cloud} does not answer: renting in other clouds")


def _close_intent(transition: Transition, name: str) -> Intent | None:
    intents = dict(transition.state.launches.intents)
    intent = intents.pop(name, None)
    transition.put(replace(transition.state.launches, intents=intents))
    return intent


def _cool_down(
    transition: Transition, offer: Offer, refusal: cooling.Refusal, count: int = 1
) -> None:
    state, now_s = transition.state, transition.now_s
    cooldowns = cooling.refused(
        state.launches.cooldowns, offer, refusal, now_s, records.COOLDOWN_S, count
    )
    transition.put(replace(state.launches, cooldowns=cooldowns))


def advance(transition: Transition) -> None:
    """Ask again where an answer left it open whether VMs were rented; return VMs that
    cannot train with the others."""
    state = transition.state
    if allocation.must_move(state):
        transition.wake(allocation.changes_at_s(state, state.market.offers))
    reason = "not in the region of the VMs that train"
    return_vms(transition, allocation.stranded_vms(state), reason)
    reason = "has fewer slots than divide matrices in every plan"
    return_vms(transition, allocation.small_vms(transition.state), reason)
    for intent in reversed(tuple(state.launches.intents.values())):
        if intent.queued and allocation.room(transition.state) < 0:
            transition.log(f"{intent.intent}: no longer wanted, taken out of the queue")
            _withdraw(transition, intent)
    for intent in transition.state.launches.intents.values():
        if intent.retry_at_s is None or not transition.waited_until(intent.retry_at_s):
            continue
        if intent.is_abandoned:
            _close_intent(transition, intent.intent)
        else:
            again = replace(intent, retry_at_s=None)
            transition.put_intent(again)
            launch(transition, again)
