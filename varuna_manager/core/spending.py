"""The core's entries in the ledger: VMs, prices, storage and egress."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import Offer, Vm, VmState
from spottrain.eventlog.changed import replace
from spottrain.pricing.billing import egress
from spottrain.pricing.billing.money import Rate, is_amount
from spottrain.pricing.prices.place import offer_key
from spottrain.units import GB_BYTES, MONTH_H
from spottrain.varuna_manager.core.model.events import VmsListed
from spottrain.varuna_manager.core.model.records import VmRecord
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.core.model.transition import Transition


def on_demand_price(offers: Iterable[Offer], offer: Offer) -> float:
    """Return the machine's on-demand price in its zone; its own price if unknown."""
    same = replace(offer, spot=False)
    prices = (o.usd_per_hour for o in offers if offer_key(o) == offer_key(same))
    return next(filter(is_amount, prices), offer.usd_per_hour)


def priced(state: State, vm: Vm) -> Offer:
    """Return a VM's offer; without a price, at the highest known for its type."""
    if is_amount(vm.offer.usd_per_hour):
        return vm.offer
    intent = state.launches.intents.get(vm.intent)
    known = [*state.market.offers, *([] if intent is None else [intent.offer])]
    same = [o.usd_per_hour for o in known if o.instance_type == vm.offer.instance_type]
    return replace(vm.offer, usd_per_hour=max(filter(is_amount, same), default=0.0))


def opened(transition: Transition, vm: Vm) -> None:
    """Open a VM's entry from its launch on, or from the job's start if that is later."""
    state = transition.state
    offer = priced(state, vm)
    ledger = state.history.ledger.opened(
        vm.vm_id,
        offer,
        on_demand_usd_per_hour=on_demand_price(state.market.offers, offer),
        launched_at_s=max(vm.launched_at_s, state.submitted_at_s),
        seen_at_s=transition.now_s,
        trains=vm.intent != tags.MANAGER,
        is_part=bool(tags.order_of(vm.intent)),
    )
    transition.put(replace(state.history, ledger=ledger))


def managers_listed(transition: Transition, vms: Iterable[Vm], cloud: str = "") -> None:
    """Open and close the entries of VMs that the job's manager runs on.

    Args:
        transition: Of the event that lists them.
        vms: All VMs that are listed.
        cloud: The cloud that lists them; empty: all.
    """
    alive = {
        vm.vm_id: vm
        for vm in vms
        if vm.intent == tags.MANAGER and vm.state in (VmState.STARTING, VmState.RUNNING)
    }
    for vm in alive.values():
        opened(transition, vm)
    elsewhere = {
        vm_id
        for vm_id, line in transition.state.history.ledger.open.items()
        if cloud and line.offer is not None and line.offer.cloud != cloud
    }
    managers_end(transition, alive.keys() | elsewhere)


def managers_end(transition: Transition, alive: Collection[str] = ()) -> None:
    """Close the entries of VMs that managers ran on, except those in ``alive``."""
    for vm_id, line in transition.state.history.ledger.open.items():
        if not line.trains and vm_id not in alive:
            ledger = transition.state.history.ledger.gone(vm_id, transition.now_s)
            transition.put(replace(transition.state.history, ledger=ledger))


def listed(transition: Transition, vms: Iterable[Vm]) -> None:
    """Take over from the cloud when VMs of this job ended."""
    for vm in vms:
        state = transition.state
        if vm.state is not VmState.TERMINATED or vm.ended_at_s is None:
            continue
        ledger = state.history.ledger
        known = vm.vm_id in ledger.open or vm.vm_id in ledger.closed
        ours = vm.intent in state.launches.intents or vm.intent in state.launches.given_up
        ours = ours or tags.order_of(vm.intent) in state.fleet.orders
        if not known and ours:
            opened(transition, vm)  # it started and ended between two polls
        if known or ours:
            ledger = transition.state.history.ledger.ended(vm.vm_id, vm.ended_at_s)
            transition.put(replace(transition.state.history, ledger=ledger))


def settled(state: State, event: VmsListed) -> State:
    """Take over when VMs ended after the job has: its manager's VM outlives it."""
    transition = Transition(state, event.at_s)
    listed(transition, event.vms)
    return replace(state, history=transition.state.history)


def fetches(transition: Transition, vm: VmRecord) -> None:
    """Charge what a booting VM fetches from the buckets of other clouds."""
    cost = egress.fetched(transition.state.job.data_bytes, vm.offer.cloud)
    ledger = transition.state.history.ledger.fetched(vm.vm_id, cost)
    transition.put(replace(transition.state.history, ledger=ledger))


def prices_seen(transition: Transition, offers: Iterable[Offer]) -> None:
    """Record new prices, which VMs of clouds with moving prices pay from now on."""
    ledger = transition.state.history.ledger
    for offer in offers:
        if is_amount(offer.usd_per_hour) and ledger.is_news(offer):
            ledger = ledger.priced(offer, transition.now_s)
    transition.put(replace(transition.state.history, ledger=ledger))


def advance(transition: Transition) -> None:
    """Bring the costs of storage and egress up to date."""
    state, job = transition.state, transition.state.job
    ledger = state.history.ledger
    if job.budget.storage_usd_per_gb_month > 0:
        num_bytes = job.facts.stored_bytes(len(state.preparation.checkpoints))
        usd_per_hour = num_bytes / GB_BYTES * job.budget.storage_usd_per_gb_month / MONTH_H
        rate = Rate.of(usd_per_hour)
        if rate != ledger.storage_rate:
            ledger = ledger.stored(rate, transition.now_s)
    ledger = ledger.sent("training", state.history.tally.egress)
    if ledger is not state.history.ledger:
        transition.put(replace(state.history, ledger=ledger))
