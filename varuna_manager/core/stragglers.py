"""Stragglers: given less work, replaced.

The watches beside the core (``varuna_manager.watch``) find them from their ranks' timings.
The mini-batch is shared anew over the replicas where that saves time, and a VM that stays
slower than its peers is replaced when that pays: by a warm spare, or by a VM that is rented
for it. It is returned once a generation without it trains.
"""

from __future__ import annotations

import itertools
import statistics

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import Offer
from spottrain.eventlog.changed import replace
from spottrain.morphing.adapt import policy
from spottrain.pricing.ranking.gpu_speed import gpu_speed
from spottrain.units import HOUR_S
from spottrain.varuna_manager.core.allocation import next_launch
from spottrain.varuna_manager.core.model.events import StragglerFound
from spottrain.varuna_manager.core.model.records import (
    Generation,
    GenerationPhase,
    SlowVm,
    VmPhase,
    VmRecord,
)
from spottrain.varuna_manager.core.model.state import JobPhase, State, rate_usd_per_hour
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.varuna_manager.core.planning import MORPH_COST_S, outlook
from spottrain.wire.messages import ShareMinibatch
from spottrain.wire.model import Profile

MAX_REPLACED_PER_HOUR = 3
"""VMs replaced for being slow within an hour; if more are slow, machines are not why."""


# --- Rebalancing the mini-batch ---------------------------------------------------------------


def share(transition: Transition, replica_bounds: tuple[int, ...]) -> None:
    """Share the mini-batch anew, unless that is how it is shared.

    Args:
        transition: With a generation.
        replica_bounds: As in ``ProgressMade``.
    """
    generation = transition.generation
    before = bounds_of(generation)
    if generation.phase is not GenerationPhase.RUNNING or generation.done:
        return
    if replica_bounds in ((), before):
        return
    number = 1 if generation.share is None else generation.share.number + 1
    newest = ShareMinibatch(
        generation=generation.number, number=number, replica_bounds=replica_bounds
    )
    generation = replace(generation, share=newest)
    transition.put_generation(generation)
    send_share(transition, generation)
    was, becomes = _shares_text(before), _shares_text(replica_bounds)
    transition.log(f"virtual nodes per replica, by speed: {becomes} (before: {was})")


def bounds_of(generation: Generation) -> tuple[int, ...]:
    """Return how the mini-batch is shared over the replicas, as in ``Plan``."""
    if generation.share is not None:
        return generation.share.replica_bounds
    return generation.plan.replica_bounds


def _shares_text(bounds: tuple[int, ...]) -> str:
    """Return shares as short text."""
    shares = [end - start for start, end in itertools.pairwise(bounds)]
    if len(shares) <= 8:
        return "+".join(map(str, shares))
    return f"{min(shares)} to {max(shares)} each"


def send_share(transition: Transition, generation: Generation) -> None:
    """Send the newest share to every VM of the plan, if there is one."""
    if generation.share is not None:
        vm_ids = (slot.vm_id for slot in generation.plan.slots)
        transition.send(vm_ids, generation.share)


# --- Replacing a slow VM ------------------------------------------------------------------------


def straggler_found(transition: Transition, event: StragglerFound) -> None:
    """Mark a slow VM for replacement, if that is possible and pays."""
    state, generation = transition.state, transition.state.training.generation
    vm = state.fleet.vms.get(event.vm_id)
    if generation is None or generation.number != event.generation:
        return
    if generation.phase is not GenerationPhase.RUNNING or generation.done:
        return
    if state.phase is not JobPhase.ACTIVE or vm is None or not vm.is_usable:
        return
    if vm.slow is not None:
        return
    evidence = _evidence(vm, event, alone=generation.plan.data_parallel_width == 1)
    if _may_replace(state) and _pays(transition, event, vm):
        slow = SlowVm(
            vm_id=vm.vm_id,
            found_at_s=transition.now_s,
            slowness=event.slowness,
            evidence=evidence,
        )
        transition.put_vm(replace(vm, slow=slow))
        transition.log(f"{evidence}: looking for a replacement")
        transition.decides = True
    elif vm.vm_id not in generation.reported_slow:
        reported = generation.reported_slow | {vm.vm_id}
        transition.put_generation(replace(generation, reported_slow=reported))
        transition.log(f"{evidence}: kept, replacing it would not pay now")


def _evidence(vm: VmRecord, event: StragglerFound, *, alone: bool) -> str:
    peers = "expected" if alone else "the others of its stage"
    why = f" ({vm.throttled})" if vm.throttled else ""
    return (
        f"{vm.vm_id} is {event.slowness:.1f}x slower than {peers} "
        f"in {event.outlying} of {event.observed} mini-batches{why}"
    )


def _may_replace(state: State) -> bool:
    """Return whether to replace one now: one at a time, in a calm fleet, not too many."""
    if state.fleet.move or any(vm.slow is not None for vm in state.fleet.vms.values()):
        return False
    lately = sum(slow.found_at_s > state.now_s - HOUR_S for slow in state.history.slow_vms)
    vms = state.fleet.vms.values()
    calm = all(vm.leaves_at_s is None and vm.silent_since_s is None for vm in vms)
    return calm and lately < MAX_REPLACED_PER_HOUR


def _pays(transition: Transition, event: StragglerFound, vm: VmRecord) -> bool:
    """Return whether the gain is worth a morph, and the price of a VM to rent."""
    state, generation = transition.state, transition.generation
    spare = _spare(state, generation, vm)
    offer = None
    if spare is None:
        launch = next_launch(state, replacing=vm)
        transition.wake(launch.changes_at_s)
        offer = launch.offer
        if offer is None or not _suits(state, vm, offer):
            return False
    step_s, saved_s = event.step_s, event.saved_s
    new_step_s = step_s - saved_s
    if new_step_s <= 0 or saved_s <= 0:
        return False
    examples = generation.plan.minibatch_size
    left_s = (state.job.spec.steps - state.history.progress.step) * step_s
    if offer is not None:
        left_s -= boot_s(state)
        now = rate_usd_per_hour(state)
        then = now - vm.offer.usd_per_hour + offer.usd_per_hour
        if then * new_step_s > now * step_s:
            return False  # every example would cost more
    at_s = policy.morph_at_s(
        policy.MorphOption(examples_per_s=examples / step_s),
        policy.MorphOption(
            examples_per_s=examples / new_step_s,
            cost_s=state.history.progress.morph_cost_s or MORPH_COST_S,
        ),
        outlook(state),
        left_s=left_s,
    )
    return transition.now_s >= at_s


def _suits(state: State, vm: VmRecord, offer: Offer) -> bool:
    """Return whether a VM of ``offer`` can do what ``vm`` does."""
    have, want, profile = offer, vm.offer, state.preparation.profile
    return (
        have.gpus >= want.gpus
        and have.gpu_memory_bytes >= want.gpu_memory_bytes
        and profile is not None
        and speed_of(state, have, profile) >= speed_of(state, want, profile)
    )


def speed_of(state: State, offer: Offer, profile: Profile) -> float:
    """Return the speed of an offer's GPUs relative to the profile's device."""
    return gpu_speed(offer, profile, state.job.facts, state.job.spec.precision)


def boot_s(state: State) -> float:
    """Return the median time from launch to ready of the VMs, 0 if unknown."""
    times_s = [
        vm.ready_at_s - vm.launched_at_s
        for vm in state.fleet.vms.values()
        if vm.ready_at_s is not None and not tags.order_of(vm.intent)
    ]
    return statistics.median(times_s) if times_s else 0.0


def _spare(state: State, generation: Generation, vm: VmRecord) -> VmRecord | None:
    """Return a ready VM outside the plan that can replace ``vm``."""
    busy = {slot.vm_id for slot in generation.plan.slots}
    usable = [other for other in state.fleet.vms.values() if other.is_usable]
    if len(usable) <= state.job.resources.min_vms:
        return None
    spares = (v for v in usable if v.vm_id not in busy and v.slow is None)
    return next((v for v in spares if _suits(state, vm, v.offer)), None)


def advance(transition: Transition) -> None:
    """Let a spare replace a slow VM, as soon as there is one."""
    generation = transition.state.training.generation
    for vm in tuple(transition.state.fleet.vms.values()):
        if vm.slow is None or vm.phase is VmPhase.RETURNING:
            continue
        if vm.is_replaced and _is_missing(transition.state, vm.slow.replaced_by):
            vm = _set_replacement(transition, vm, vm.slow, "")
        if generation is None or generation.phase is not GenerationPhase.RUNNING:
            continue
        spare = None if vm.is_replaced else _spare(transition.state, generation, vm)
        if spare is not None and vm.slow is not None:
            _set_replacement(transition, vm, vm.slow, spare.vm_id)
            transition.log(f"{vm.slow.evidence}: replaced by {spare.vm_id}")


def _set_replacement(
    transition: Transition, vm: VmRecord, slow: SlowVm, replaced_by: str
) -> VmRecord:
    vm = replace(vm, slow=replace(slow, replaced_by=replaced_by))
    transition.put_vm(vm)
    transition.note_fleet_change()
    return vm


def _is_missing(state: State, vm_id: str) -> bool:
    """Return whether a VM is gone or cannot replace another any more."""
    vm = state.fleet.vms.get(vm_id)
    return vm is None or not vm.is_usable
