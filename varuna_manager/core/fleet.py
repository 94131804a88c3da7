"""The VMs: adopted, booted, suspected, returned, lost (``VM`` of docs/state-machines.md).

Every VM that the cloud lists for the job is in the state until the cloud has taken it
back, so that no billed VM is missed.
"""

from __future__ import annotations

from collections.abc import Iterable

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import Vm, VmState
from spottrain.eventlog.changed import replace
from spottrain.pricing.billing.budget import reserve_s
from spottrain.pricing.ranking import cooldowns as cooling
from spottrain.units import counted
from spottrain.varuna_manager.core import generation as generations
from spottrain.varuna_manager.core import rounds, spending
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import counters, records, starts
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import (
    GenerationPhase,
    OrderPhase,
    VmPhase,
    VmRecord,
)
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    State,
    is_unfit,
    kind_of,
)
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire.messages import AbandonGeneration

BOOT_BOUND_S = 900.0
"""A VM whose supervisor is not ready by then is returned; the user's setup not counted."""
RETRY_S = 5.0
"""Pause before a failed command is repeated."""
_NO_VMS = (VmState.QUEUED, VmState.STOPPING, VmState.TERMINATED)
"""Not yet, or no longer."""


# --- The provider's list ------------------------------------------------------------------


def vms_listed(transition: Transition, event: e.VmsListed) -> None:
    """Reconcile the state with the cloud's list, which is authoritative."""
    transition.put(replace(transition.state.fleet, reconciled=True))
    _ends_told(transition, event.vms)
    listed = {vm.vm_id: vm for vm in event.vms}
    for record in tuple(transition.state.fleet.vms.values()):
        vm = listed.get(record.vm_id)
        covered = event.cloud in ("", record.offer.cloud)
        words = event.last_words.get(record.vm_id, "")
        if vm is not None:
            _update(transition, record, vm, words)
        elif covered and record.known_at_s < event.asked_at_s:
            remove_vm(transition, record, "the provider no longer lists it", words)
    spending.listed(transition, event.vms)
    spending.managers_listed(transition, event.vms, event.cloud)
    for vm in event.vms:
        if vm.intent != tags.MANAGER:
            adopt(transition, vm)
    _queued_listed(transition, event)


def _ends_told(transition: Transition, vms: Iterable[Vm]) -> None:
    """Correct why VMs were lost: a cloud may say so only after they are."""
    gone = {vm.vm_id: vm.why for vm in vms if vm.state is VmState.TERMINATED and vm.why}
    gone = {vm_id: why for vm_id, why in gone.items() if vm_id not in transition.state.fleet.vms}
    history, corrected = transition.state.history, []
    for one in history.interruptions:
        why = gone.get(one.vm_id, one.reason)
        if one.interruption in ("kill", "notice") and why != one.reason:
            transition.log(f"{one.vm_id}: {why}")
            one = replace(one, reason=why)
        corrected.append(one)
    transition.put(replace(history, interruptions=tuple(corrected)))


def _queued_listed(transition: Transition, event: e.VmsListed) -> None:
    """Note what waits in queues, and withdraw what no open intent wants."""
    known = transition.state.fleet.vms
    waiting = [vm for vm in event.vms if vm.state is VmState.QUEUED and vm.vm_id not in known]
    for intent in tuple(transition.state.launches.intents.values()):
        if event.cloud in ("", intent.offer.cloud):
            queued = {vm.vm_id: vm.why for vm in waiting if vm.intent == intent.intent}
            if queued.keys() - intent.queued.keys():
                why = ", ".join(sorted(set(queued.values())))
                transition.log(
                    f"{intent.offer.zone}: {counted(len(queued), 'VM')} in the queue: {why}"
                )
            if queued != intent.queued:
                transition.put_intent(replace(intent, queued=queued))
    intents = transition.state.launches.intents
    if unwanted := tuple(vm.vm_id for vm in waiting if vm.intent not in intents):
        transition.emit(c.TerminateVms(vm_ids=unwanted))


def _update(transition: Transition, record: VmRecord, vm: Vm, words: str) -> None:
    match vm.state:
        case VmState.RUNNING if record.phase is VmPhase.STARTING:
            address = vm.private_address
            record = replace(record, phase=VmPhase.BOOTING, private_address=address)
            transition.put_vm(record)
            transition.emit(c.StartAgent(vm_id=vm.vm_id))
        case VmState.STOPPING if record.phase is not VmPhase.RETURNING:
            remove_vm(transition, record, _loss_reason(record, vm), words)
        case VmState.TERMINATED:
            remove_vm(transition, record, _loss_reason(record, vm), words)
        case _:
            pass


def _loss_reason(record: VmRecord, vm: Vm) -> str:
    if record.phase is VmPhase.RETURNING:
        return record.return_reason
    if vm.why:
        return vm.why
    noticed = record.leaves_at_s is not None
    return "preempted with notice" if noticed else "preempted without notice"


def adopt(transition: Transition, vm: Vm) -> None:
    """Keep a VM that is new to us if an open intent wants it, else return it.

    An unwanted VM is an orphan of a call whose answer was lost, or one of ours that the
    cloud still lists though it has taken it back; both are billed.
    """
    state = transition.state
    if vm.vm_id in state.fleet.vms or vm.state in _NO_VMS:
        return
    intent = state.launches.intents.get(vm.intent)
    came = _order_of(transition, vm)
    wanted = (intent is not None or came) and state.phase is JobPhase.ACTIVE
    if intent is not None and intent.missing <= 0:
        wanted = False
    if intent is not None and wanted:
        arrived = replace(intent, arrived=intent.arrived + 1)
        transition.put_intent(arrived)
    spending.opened(transition, vm)
    running = vm.state is VmState.RUNNING
    offer = spending.priced(state, vm)
    record = VmRecord(
        vm_id=vm.vm_id,
        intent=vm.intent,
        offer=offer,
        on_demand_usd_per_hour=spending.on_demand_price(state.market.offers, offer),
        # Of one that came from another job the bill may begin later.
        launched_at_s=min(vm.launched_at_s, transition.now_s),
        known_at_s=transition.now_s,
        phase=VmPhase.BOOTING if running else VmPhase.STARTING,
        private_address=vm.private_address,
    )
    transition.put_vm(record)
    tally = transition.state.history.tally
    transition.put(
        replace(
            transition.state.history,
            tally=replace(tally, vms_launched=tally.vms_launched + 1),
        )
    )
    if not wanted:
        return_vms(transition, (record,), "not requested by this job")
    elif running:
        transition.emit(c.StartAgent(vm_id=vm.vm_id))


def _order_of(transition: Transition, vm: Vm) -> bool:
    """Return whether a VM was asked for that another job kept; note that it came."""
    record = transition.state.fleet.orders.get(tags.order_of(vm.intent))
    if record is None or record.phase is not OrderPhase.ASKED:
        return False
    transition.put_order(replace(record, phase=OrderPhase.TAKEN, retry_at_s=None))
    return True


def provider_answered(transition: Transition, event: e.ProviderAnswered) -> None:
    """Decide about a silent VM: if it still runs it is returned, and its memory is lost."""
    vm = transition.state.fleet.vms.get(event.vm_id)
    if vm is None or vm.silent_since_s is None or vm.phase is VmPhase.RETURNING:
        return
    if event.state in (VmState.STARTING, VmState.RUNNING):
        suspect_s = transition.state.job.manager.suspect_s
        seen = "the provider reports it as running"
        _return_silent(transition, vm, f"silent for {suspect_s:g} s although {seen}")
    else:
        remove_vm(transition, vm, "silent, and no longer running at the provider")


def remove_vm(transition: Transition, vm: VmRecord, reason: str, words: str = "") -> None:
    """Remove a VM that is gone; unless it was returned or noticed, count it as killed.

    Args:
        words: The last line of its agent's log, if it never trained and is known.
    """
    if vm.phase is not VmPhase.RETURNING and vm.leaves_at_s is None:
        counters.interrupted(transition, "kill", vm.vm_id, reason)
        starts.failed(transition, vm, reason)
    starts.said(transition, vm.vm_id, words)
    generations.lose_vm(transition, vm.vm_id, f"{vm.vm_id}: {reason}")
    rounds.lose_vms(transition, (vm.vm_id,))
    state = transition.state
    vms = {k: v for k, v in state.fleet.vms.items() if k != vm.vm_id}
    ledger = state.history.ledger.gone(vm.vm_id, transition.now_s)
    transition.put(replace(state.fleet, vms=vms), replace(state.history, ledger=ledger))
    if vm.is_usable:
        transition.note_fleet_change()
    transition.note_phase(vm.phase, None)


def job_moved(transition: Transition, event: e.JobMoved) -> None:
    """Return all VMs: they trust keys that stayed on the old machine.

    Open launches are not repeated: their VMs may exist and trust those keys too. The
    names of later launches differ from any that the journal may have lost.
    """
    transition.put(replace(transition.state.launches, intents={}, takeover_epoch=event.epoch))
    host, vms = event.host, transition.state.fleet.vms.values()
    transition.log(f"the job continues on {host} with new keys; returning its VMs")
    return_vms(transition, vms, "it trusts the keys of the old machine")


def return_vms(transition: Transition, vms: Iterable[VmRecord], reason: str) -> None:
    """Return VMs; what their memory holds is lost from now on."""
    if ids := _leave(transition, vms, reason):
        transition.emit(c.TerminateVms(vm_ids=ids))


def release_or_reserve(transition: Transition, vms: Iterable[VmRecord], reason: str) -> None:
    """Return VMs, or keep those that are well for other jobs of the pool, if it says so."""
    going = tuple(vms)
    grant = transition.state.job.grant
    keeps = grant is not None and grant.reservation_s > 0
    kept = [vm for vm in going if keeps and _is_well(vm)]
    for vm_id in _leave(transition, kept, reason):
        vm = transition.state.fleet.vms[vm_id]
        transition.put_vm(replace(vm, is_clearing=True))
        transition.emit(c.ReserveVm(vm_id=vm_id))
    return_vms(transition, going, reason)


def _is_well(vm: VmRecord) -> bool:
    """Return whether another job could use a VM."""
    is_called = vm.phase in (VmPhase.REGISTERED, VmPhase.READY)
    stays = vm.leaves_at_s is None or bool(vm.drain_reason)
    is_slow = vm.slow is not None or bool(vm.throttled)
    return is_called and stays and vm.silent_since_s is None and not is_slow


def _leave(transition: Transition, vms: Iterable[VmRecord], reason: str) -> tuple[str, ...]:
    """Have VMs that are not leaving yet leave; return their ids."""
    now = transition.state.fleet.vms
    going = [vm for vm in vms if now[vm.vm_id].phase is not VmPhase.RETURNING]
    if not going:
        return ()
    if (generation := transition.state.training.generation) is not None:
        # A cloud may take a while to end them: they must not train on by themselves.
        training = (vm.vm_id for vm in going if generation.trains_on(vm.vm_id))
        transition.send(training, AbandonGeneration(generation=generation.number))
    for vm in going:
        generations.lose_vm(transition, vm.vm_id, f"{vm.vm_id}: {reason}")
        transition.put_vm(
            replace(vm, phase=VmPhase.RETURNING, return_reason=reason, retry_at_s=None)
        )
    ids = tuple(vm.vm_id for vm in going)
    rounds.lose_vms(transition, ids)
    transition.note_fleet_change()
    return ids


def vms_returned(transition: Transition, event: e.VmsReturned) -> None:
    """Remove the VMs that the cloud has taken back."""
    for vm_id in event.vm_ids:
        vm = transition.state.fleet.vms.get(vm_id)
        if vm is not None and vm.phase is VmPhase.RETURNING:
            remove_vm(transition, vm, vm.return_reason, event.last_words.get(vm_id, ""))
    spending.listed(transition, event.vms)


# --- Agents -------------------------------------------------------------------------------


def agent_started(transition: Transition, event: e.AgentStarted) -> None:
    """Keep what the start of a VM took."""
    vm = transition.state.fleet.vms.get(event.vm_id)
    if vm is not None:
        transition.put_vm(replace(vm, start=event.steps))
        took_s = sum(step.seconds for step in event.steps)
        transition.log(f"agent of {vm.vm_id} started after {took_s:.0f} s")


def agent_registered(transition: Transition, event: e.AgentRegistered) -> None:
    """The agent has called: its supervisor starts."""
    vm = transition.state.fleet.vms.get(event.vm_id)
    if vm is not None and vm.phase in (VmPhase.STARTING, VmPhase.BOOTING):
        spending.fetches(transition, vm)
        vm = replace(
            vm,
            phase=VmPhase.REGISTERED,
            agent_version=transition.state.manager_version,
            reports_received=0,
            num_slots=event.num_slots,
            private_address=event.private_address,
        )
        transition.put_vm(vm)


def agent_refused(transition: Transition, event: e.AgentRefused) -> None:
    """Return a VM that cannot join: its agent is of other software than the manager."""
    vm = transition.state.fleet.vms.get(event.vm_id)
    if vm is not None and vm.phase in (VmPhase.STARTING, VmPhase.BOOTING):
        starts.failed(transition, vm, event.reason)
        return_vms(transition, (vm,), event.reason)


def replace_agents(transition: Transition, vms: Iterable[VmRecord]) -> None:
    """Start agents of the manager's version on VMs; what their memory holds is lost."""
    ids, version = [], transition.state.manager_version
    for vm in vms:
        ids.append(vm.vm_id)
        transition.put_vm(
            replace(
                vm,
                phase=VmPhase.BOOTING,
                known_at_s=transition.now_s,
                used_slots=(),
                ready_at_s=None,
                retry_at_s=None,
            )
        )
        transition.emit(c.StartAgent(vm_id=vm.vm_id))
    transition.note_fleet_change()
    transition.log(f"starting agents of version {version} on {', '.join(ids)}")


def vm_heard(transition: Transition, vm_id: str) -> None:
    """A silent VM has called again before it was fenced."""
    vm = transition.state.fleet.vms.get(vm_id)
    if vm is not None and vm.silent_since_s is not None:
        transition.put_vm(replace(vm, silent_since_s=None, retry_at_s=None))
        transition.note_fleet_change()


def command_failed(transition: Transition, event: e.CommandFailed) -> None:
    """Repeat a command that failed for a VM after a pause; see ``advance``."""
    transition.log(f"{event.command.replace('_', ' ')} failed: {event.reason}")
    for vm_id in event.vm_ids:
        if vm := transition.state.fleet.vms.get(vm_id):
            again_s = transition.now_s + RETRY_S
            vm = replace(vm, retry_at_s=again_s, is_clearing=False, trouble=event.reason)
            transition.put_vm(vm)
            _return_if_lease_over(transition, vm)


def _return_if_lease_over(transition: Transition, vm: VmRecord) -> None:
    """Return a silent VM whose cloud does not answer either, once its lease is over.

    Until then it may train on with others that are cut off too, and a generation
    without it would train at the same time.
    """
    since_s, lease_s = vm.silent_since_s, reserve_s(transition.state.job.spec.lease_s)
    if since_s is None or vm.phase is VmPhase.RETURNING:
        return
    if transition.now_s - since_s < lease_s:
        return
    reason = f"silent for {lease_s:g} s, and {vm.offer.cloud} does not answer"
    _return_silent(transition, vm, reason)


def _return_silent(transition: Transition, vm: VmRecord, reason: str) -> None:
    if vm.leaves_at_s is None:
        counters.interrupted(transition, "silence", vm.vm_id, reason)
        starts.failed(transition, vm, reason)
    return_vms(transition, (vm,), reason)


# --- VMs that cannot train ------------------------------------------------------------------


def vm_unfit(transition: Transition, vm_id: str, reason: str) -> None:
    """Return a VM that cannot do what it was rented for, such as without a driver.

    Others of its type will hardly differ: after a few the type is not rented again, and
    the job fails if nothing else can be.
    """
    vm = transition.state.fleet.vms[vm_id]
    transition.log(f"{vm_id}: {reason}")
    starts.failed(transition, vm, reason)
    return_vms(transition, (vm,), reason)
    state, scope = transition.state, kind_of(vm.offer)
    count = state.launches.unfit.get(scope, 0) + 1
    transition.put(replace(state.launches, unfit={**state.launches.unfit, scope: count}))
    if _is_hopeless(transition.state):
        transition.fail(f"{scope}: {reason}", exit_code=6)


def vm_failed(transition: Transition, vm_id: str, reason: str) -> None:
    """Return a VM whose agent ends by itself, and says why."""
    vm = transition.state.fleet.vms[vm_id]
    if vm.leaves_at_s is None:
        counters.interrupted(transition, "kill", vm_id, reason)
        starts.failed(transition, vm, reason)
    return_vms(transition, (vm,), reason)


def vm_fit(transition: Transition, vm: VmRecord) -> None:
    """Forget unfit VMs of a type of which one has become ready."""
    unfit = dict(transition.state.launches.unfit)
    if unfit.pop(kind_of(vm.offer), None) is not None:
        transition.put(replace(transition.state.launches, unfit=unfit))


def _is_hopeless(state: State) -> bool:
    """Return whether every offer is of a type whose VMs were unfit too often."""
    wanted = [one for one in state.market.offers if one.spot or state.job.resources.allow_on_demand]
    usable = any(vm.phase is not VmPhase.RETURNING for vm in state.fleet.vms.values())
    return not usable and all(is_unfit(state, offer) for offer in wanted)


def gpu_sick(transition: Transition, vm_id: str, reason: str) -> None:
    """Return a VM whose GPU has failed; its replacement is rented elsewhere, if possible.

    Clouds tend to give the same machine again: the offer cools down as after a refusal.
    """
    vm = transition.state.fleet.vms[vm_id]
    counters.interrupted(transition, "sick_gpu", vm_id, reason)
    starts.failed(transition, vm, reason)
    return_vms(transition, (vm,), reason)
    state = transition.state
    cooldowns = cooling.refused(
        state.launches.cooldowns,
        vm.offer,
        "no_capacity",
        state.now_s,
        records.COOLDOWN_S,
    )
    transition.put(replace(state.launches, cooldowns=cooldowns))


# --- Timeouts and returns -------------------------------------------------------------------


def advance(transition: Transition) -> None:
    """Repeat failed commands; return VMs that are late, drained or replaced."""
    bound_s = BOOT_BOUND_S + transition.state.job.busy_s
    for vm in tuple(transition.state.fleet.vms.values()):
        if vm.retry_at_s is not None and transition.waited_until(vm.retry_at_s):
            transition.put_vm(replace(vm, retry_at_s=None))
            ask_again(transition, vm)
        if vm.is_coming and transition.waited_until(vm.known_at_s + bound_s):
            words = f": {vm.trouble}" if vm.trouble else ""
            reason = f"not ready in {bound_s:g} s{words}"
            starts.failed(transition, vm, reason)
            return_vms(transition, (vm,), reason)
        elif vm.leaves_at_s is not None and not is_needed(transition, vm):
            reason = vm.drain_reason or "drained before its preemption"
            release_or_reserve(transition, (vm,), reason)
        elif vm.slow is not None and vm.is_replaced and not is_needed(transition, vm):
            if vm.phase is not VmPhase.RETURNING:
                counters.replaced(transition, vm.slow)
            return_vms(transition, (vm,), f"slow: replaced by {vm.slow.replaced_by}")
        elif vm.successor == "arrived" and not is_needed(transition, vm):
            return_vms(transition, (vm,), "others train more per dollar")


def ask_again(transition: Transition, vm: VmRecord) -> None:
    """Emit again the command that a VM waits for."""
    if vm.is_clearing:
        transition.emit(c.ReserveVm(vm_id=vm.vm_id))
    elif vm.phase is VmPhase.RETURNING and vm.reserved_at_s is None:
        transition.emit(c.TerminateVms(vm_ids=(vm.vm_id,)))
    elif vm.phase is VmPhase.BOOTING:
        transition.emit(c.StartAgent(vm_id=vm.vm_id))
    elif vm.silent_since_s is not None:
        transition.emit(c.AskProvider(vm_id=vm.vm_id))


def is_needed(transition: Transition, vm: VmRecord) -> bool:
    """Return whether the memory of a VM that is leaving is still needed."""
    state, generation = transition.state, transition.state.training.generation
    if not vm.used_slots:
        return generation is not None and generation.trains_on(vm.vm_id)
    if generation is None:
        saved = state.newest_checkpoint.step if state.newest_checkpoint else 0
        return state.history.progress.step > saved
    if generation.phase is GenerationPhase.RUNNING:
        return generation.trains_on(vm.vm_id)
    return True
