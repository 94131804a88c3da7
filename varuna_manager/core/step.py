"""The manager's decisions, with no I/O: ``step(state, event) -> (state, commands)``.

A step is taken once: its fact is journalled with what it changed, which is put in again when
a manager restarts (``eventlog``). The rules:

1. Nothing in this folder reads a clock, a file or a socket. Time arrives in events, and
   it never goes back.
2. Events are facts, commands are requests. The daemon journals an event, then performs
   the commands that follow from it, and feeds their outcomes back as events.
3. Every command may be performed twice, and every event may come late, twice, or never:
   what is asked for without an answer is asked for again when a manager starts
   (``_manager_started``), or when its time has passed.
4. An event is first folded in as a fact (``_fold``). Then every part of the core looks
   at the state, and takes it further where nothing is missing, until a round changes
   nothing (``_settle``). So a decision depends on what is the case, not on the order in
   which it became so.
5. A decision that has to wait for a moment asks ``Transition.waited_until``: one timer, for
   the earliest of these moments, is all that wakes the core.
6. An event that the present phase has no use for is ignored. What is ignored, and what
   follows from the others, is in docs/state-machines.md: the life cycles of the job, its
   VMs and its generations.

The life of a job: NEW until it is submitted. While it is ACTIVE, the parts below rent VMs
(``allocation``, ``launches``, ``fleet``), have the model measured and plans computed
(``rounds``, ``planning``), and train one generation after the other
(``generation``, ``hangs``, ``replacement``). Success, a limit, a failure or a person ends it
(``shutdown``): while it is ENDING, a last checkpoint is written if there is time, and all
VMs are returned; it is ENDED once nothing costs money any more. ``resume`` makes a job
that has not succeeded ACTIVE again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from spottrain.eventlog.changed import replace
from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.units import counted
from spottrain.varuna_manager.core import (
    allocation,
    deadline,
    fleet,
    hangs,
    launches,
    limits,
    moves,
    planning,
    reports,
    rounds,
    shutdown,
    spending,
    stragglers,
    vm_transfer,
)
from spottrain.varuna_manager.core import generation as generations
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model.commands import Command, SetTimer
from spottrain.varuna_manager.core.model.errors import InternalError
from spottrain.varuna_manager.core.model.recent import with_event
from spottrain.varuna_manager.core.model.state import JobPhase, State, queued
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire.messages import MinibatchCommitted

MAX_ROUNDS = 20
"""Rounds after which a state that still changes is a bug."""


def step(state: State, event: e.Event, *, rents: bool = True) -> tuple[State, tuple[Command, ...]]:
    """Return the state after ``event``, and the commands that it calls for.

    Args:
        state: The state before it.
        event: What has happened.
        rents: False: no VM is asked for, as no manager runs.

    Raises:
        InternalError: a bug of ours.
    """
    if state.phase is JobPhase.NEW and not isinstance(event, e.JobSubmitted):
        return state, ()
    recent = with_event(state.recent, event)
    reopens = isinstance(event, e.ManagerStarted | e.JobMoved)
    if state.phase is JobPhase.ENDED and not reopens:
        return _fold_after_end(replace(state, recent=recent), event), ()
    transition = Transition(state, event.at_s, recent)
    try:
        _fold(transition, event)
        # Progress changes hardly any decision, and comes often.
        if transition.decides or not _is_progress(event):
            transition.is_settling = True
            _settle(transition, rents=rents)
    except Exception as error:
        raise InternalError(transition.result(), error) from error
    return transition.result(), tuple(transition.commands)


def _fold_after_end(state: State, event: e.Event) -> State:
    """Fold what may still change once the job has ended."""
    match event:
        case e.LimitsChanged():
            return limits.with_limits(state, event)
        case e.GrantReceived():
            return limits.with_grant(state, event)
        case e.StepsChanged():
            return limits.with_steps(state, event)
        case e.CodeUpdated():
            return limits.with_code(state, event)
        case e.FromScratchRequested():
            return limits.with_from_scratch(state)
        case e.VmsListed():
            return spending.settled(state, event)
        case _:
            return state


def _is_progress(event: e.Event) -> bool:
    what = event.report if isinstance(event, e.ReportReceived) else event
    watched = e.ProgressMade | e.ProgressStalled | e.StragglerFound
    return isinstance(what, watched | MinibatchCommitted)


def _fold(transition: Transition, event: e.Event) -> None:
    """Fold a fact into the state."""
    match event:
        case e.JobSubmitted():
            _job_submitted(transition, event)
        case e.ManagerStarted(software_version=version):
            _manager_started(transition, version)
        case e.JobMoved():
            fleet.job_moved(transition, event)
        case e.StopRequested():
            shutdown.stop_requested(transition, event)
        case e.LimitsChanged():
            limits.limits_changed(transition, event)
        case e.GrantReceived():
            limits.grant_received(transition, event)
        case e.StepsChanged():
            transition.state = limits.with_steps(transition.state, event)
        case e.CodeUpdated():
            transition.state = limits.with_code(transition.state, event)
        case e.ClockSet(by_s=by_s):
            way = "forward" if by_s > 0 else "back"
            transition.log(
                f"the wall clock was set {abs(by_s):.0f} s {way}; the job keeps its own clock"
            )
        case e.FolderSeen():
            shutdown.folder_seen(transition, event)
        case e.TimerFired():
            transition.state = replace(transition.state, timer_at_s=None)
        case e.FromScratchRequested():
            transition.state = limits.with_from_scratch(transition.state)
        case e.CheckpointsListed():
            reports.checkpoints_listed(transition, event)
        case e.StoreUnreachable(reason=reason):
            reports.store_unreachable(transition, reason)
        case e.ProfilesListed(profiles=profiles):
            transition.put(replace(transition.state.preparation, known_profiles=profiles))
        case e.OffersSeen():
            launches.offers_seen(transition, _all_offers(transition.state, event))
        case e.OffersRanked():
            known = _all_worths(transition.state, event)
            number = transition.state.market.rankings + 1
            transition.put(replace(transition.state.market, worths=known, rankings=number))
        case e.FleetRated():
            deadline.fleet_rated(transition, event)
        case e.VmsLaunched():
            launches.vms_launched(transition, event)
        case e.LaunchRefused():
            launches.launch_refused(transition, event)
        case e.VmsListed():
            fleet.vms_listed(transition, event)
        case e.ProviderAnswered():
            fleet.provider_answered(transition, event)
        case e.VmsReturned():
            fleet.vms_returned(transition, event)
        case e.VmReserved(vm_id=vm_id):
            vm_transfer.vm_reserved(transition, vm_id)
        case e.OrderAnswered():
            vm_transfer.order_answered(transition, event)
        case e.VmLost(vm_id=vm_id, reason=reason):
            if vm := transition.state.fleet.vms.get(vm_id):
                fleet.remove_vm(transition, vm, reason)
        case e.AgentStarted():
            fleet.agent_started(transition, event)
        case e.AgentRegistered():
            fleet.agent_registered(transition, event)
        case e.AgentRefused():
            fleet.agent_refused(transition, event)
        case e.ReportReceived():
            reports.report_received(transition, event)
        case e.ProgressMade():
            reports.progress_made(transition, event)
        case e.ProgressStalled():
            reports.progress_stalled(transition, event)
        case e.StragglerFound():
            stragglers.straggler_found(transition, event)
        case e.VmSilent(vm_id=vm_id):
            if vm_id in transition.state.fleet.vms:
                generations.suspect(transition, vm_id)
        case e.VmHeard(vm_id=vm_id):
            fleet.vm_heard(transition, vm_id)
        case e.PlanComputed():
            planning.plan_computed(transition, event)
        case e.CommandFailed(command="compute_plan"):
            planning.plan_failed(transition, event)
        case e.CommandFailed(command="release_job"):
            shutdown.release_failed(transition, event)
        case e.CommandFailed(command="take_vm"):
            vm_transfer.take_failed(transition, event)
        case e.CommandFailed():
            fleet.command_failed(transition, event)
        case e.JobReleased():
            shutdown.job_released(transition)
        case e.SetupFailed(reason=reason, output=output):
            transition.fail(reason, exit_code=3, traceback=output)
        case _:
            assert_never(event)


def _all_offers(state: State, event: e.OffersSeen) -> e.OffersSeen:
    """Return the event with all offers that can be rented now."""
    if not event.only_changes:
        return event
    known = {offer_key(offer): offer for offer in state.market.offers}
    known |= {offer_key(offer): offer for offer in event.offers}
    offers = tuple(one for key, one in known.items() if key not in event.gone)
    return e.OffersSeen(at_s=event.at_s, offers=offers)


def _all_worths(state: State, event: e.OffersRanked) -> dict[str, OfferWorth]:
    """Return the worth of all offers, by ``offer_key``."""
    known = dict(state.market.worths) if event.only_changes else {}
    known |= {worth.offer: worth for worth in event.worths}
    return {key: worth for key, worth in known.items() if key not in event.gone}


def _job_submitted(transition: Transition, event: e.JobSubmitted) -> None:
    if transition.state.phase is JobPhase.NEW:
        transition.state = replace(
            transition.state,
            phase=JobPhase.ACTIVE,
            settings=event.settings,
            submitted_at_s=event.at_s,
        )
        preparation = transition.state.preparation
        launches = transition.state.launches
        transition.put(
            replace(preparation, profile=event.settings.profile),
            replace(launches, kernels=event.settings.numerics.kernels),
        )
        transition.note_phase(JobPhase.NEW, JobPhase.ACTIVE)
        transition.log("submitted")


def _manager_started(transition: Transition, version: str) -> None:
    """Emit again what is not answered: the manager that asked is gone."""
    shutdown.reopen(transition)
    state = transition.state
    transition.state = replace(state, manager_version=version, timer_at_s=None, release=None)
    transition.put(
        replace(state.fleet, reconciled=False),
        replace(state.training, plan_asked=None),
        replace(
            state.launches,
            folder_trouble="",
            intents={
                k: replace(
                    v,
                    retry_at_s=None,
                    is_abandoned=False,
                    asked_at_s=transition.now_s,
                )
                for k, v in state.launches.intents.items()
            },
        ),
        replace(
            state.preparation,
            progress_at_s=transition.now_s,
            listed=False,
            store_error="",
            doubted=(),
            unread=(),
            blocked_since_s=None,
        ),
    )
    for intent in transition.state.launches.intents.values():
        launches.launch(transition, intent)
    vm_transfer.ask_again(transition)
    for vm in state.fleet.vms.values():
        # Silence counts from now on: no manager listened in between.
        transition.put_vm(replace(vm, silent_since_s=None, retry_at_s=None))
        if vm.phase in (records.VmPhase.BOOTING, records.VmPhase.RETURNING):
            fleet.ask_again(transition, vm)
    if state.preparation.round is not None:
        rounds.send(transition, state.preparation.round)
    _resume_generation(transition)


def _resume_generation(transition: Transition) -> None:
    """Repeat the commands of the generation's phase; supervisors ignore duplicates."""
    generation = transition.state.training.generation
    if generation is None:
        return
    if generation.phase is not records.GenerationPhase.RUNNING:
        generation = replace(generation, since_s=transition.now_s, abandoned=False)
        transition.put_generation(generation)
    match generation.phase:
        case records.GenerationPhase.OPENING:
            generations.open_store(transition, generation)
        case records.GenerationPhase.STARTING:
            generations.invite(transition, generation)
        case records.GenerationPhase.STOPPING:
            generations.send_stop(transition, generation)
        case records.GenerationPhase.RUNNING:
            stragglers.send_share(transition, generation)
        case records.GenerationPhase.BREAKING:
            pass  # its ranks are told to give up when it is due
        case _:
            assert_never(generation.phase)


PARTS: tuple[Callable[[Transition], None], ...] = (
    spending.advance,  # the bill of storage and traffic; those below spend what is left
    shutdown.watch_limits,  # ends the job at a limit, and with it what most parts do
    limits.advance,  # drains VMs over grant and hourly cap
    deadline.advance,  # how many VMs of each offer; drains what is too many
    launches.advance,  # asks again for VMs; returns those that cannot train with others
    vm_transfer.advance,  # asks for VMs of other jobs; returns what was kept for long
    fleet.advance,  # returns VMs that are late, drained or replaced, unless they are needed
    hangs.advance,  # breaks the generation, so that what follows goes on without it
    generations.advance,  # a generation forms, trains, is closed: its VMs are needed no more
    stragglers.advance,  # marks slow VMs whose spares have come, for ``fleet`` to return
    moves.advance,  # begins or ends a move, whose VMs ``fleet`` returns
    planning.advance,  # opens a generation or stops one, which ``generations`` takes further
    shutdown.advance,  # once the last checkpoint is there: closes, returns all, ends
)
"""The parts of the core, which look at a state until none changes it any more.

Each may undo what another has decided, which looks again in the next round. So their order
counts only where several have something to do at the same moment: the earlier has its way.
"""


def _settle(transition: Transition, *, rents: bool) -> None:
    """Advance the state to a fixed point: there what is wanted is rented."""
    if transition.state.phase not in (JobPhase.ACTIVE, JobPhase.ENDING):
        return
    for _ in range(MAX_ROUNDS):
        before = transition.state
        transition.wake_at_s = None
        for part in PARTS:
            part(transition)
        if rents and transition.state is before and before.phase is JobPhase.ACTIVE:
            launches.launch_more(transition)
        if transition.state is before:
            break
    else:
        raise AssertionError(f"no fixed point reached after {MAX_ROUNDS} rounds")
    _finish(transition)


def _finish(transition: Transition) -> None:
    """Describe the state for people, and set the timer."""
    state, wake_at_s = transition.state, transition.wake_at_s
    activity = _activity(state)
    if wake_at_s != state.timer_at_s:
        transition.emit(SetTimer(at_s=wake_at_s))
    if (activity, wake_at_s) != (state.activity, state.timer_at_s):
        transition.state = replace(state, activity=activity, timer_at_s=wake_at_s)


# --- The activity: one line for people ----------------------------------------------------


def _activity(state: State) -> str:
    """Return what the job does or waits for, and why."""
    outcome = state.outcome
    match state.phase:
        case JobPhase.NEW:
            return "new"
        case JobPhase.ENDED:
            return f"over: {outcome.reason}{_saved(state)}" if outcome else "over"
        case JobPhase.ENDING if not state.ending_checkpoint:
            return f"returning VMs: {outcome.reason}" if outcome else "returning VMs"
        case JobPhase.ENDING:
            return "writing a last checkpoint"
        case _:
            generation = state.training.generation
            return _training(state, generation) if generation else _waiting(state)


def _saved(state: State) -> str:
    """Return which weights of a job that has failed are kept."""
    newest, outcome = state.newest_checkpoint, state.outcome
    if outcome is None or outcome.kind != "failed" or newest is None:
        return ""
    return f"; the state of step {newest.step} is saved"


def _training(state: State, generation: records.Generation) -> str:
    number, shape = generation.number, generation.plan.shape
    match generation.phase:
        case records.GenerationPhase.OPENING | records.GenerationPhase.STARTING:
            return f"starting generation {number} ({shape}): {generation.reason}"
        case records.GenerationPhase.STOPPING:
            return f"leaving generation {number} ({shape}): {state.training.plan_reason}"
        case records.GenerationPhase.BREAKING:
            return f"recovering: {generation.break_reason}"
        case _:
            return f"training at {shape}"


def _waiting(state: State) -> str:
    """Return what training waits for."""
    coming = sum(vm.is_coming for vm in state.fleet.vms.values())
    asked = sum(intent.missing for intent in state.launches.intents.values())
    usable = sum(vm.is_usable for vm in state.fleet.vms.values())
    if usable and (round_ := state.preparation.round) is not None:
        writes = round_.purpose == "first weights"
        what = "writing the first weights" if writes else "measuring the model's sections"
        return what + (f" ({round_.done} of {round_.total})" if round_.done else "")
    if usable and state.training.plan_asked is not None:
        return "choosing a plan"
    if (why := planning.blocked_by(state)) is not None:
        return why
    waiting_for = []
    if coming:
        waiting_for.append(f"{counted(coming, 'VM')} to boot")
    if asked:
        waiting_for.append(f"{counted(asked, 'VM')} to be rented{_in_queues(state)}")
    if not waiting_for:
        waiting_for.append(_capacity(state))
    answer = state.training.answer
    why = f" ({answer.why_not})" if usable and answer and answer.why_not else ""
    return f"waiting for {' and '.join(waiting_for)}{why}"


def _in_queues(state: State) -> str:
    """Return how many of the VMs asked for wait in queues, and why."""
    waiting = queued(state)
    if not waiting:
        return ""
    return f" ({len(waiting)} in the queue: {', '.join(sorted(set(waiting.values())))})"


def _capacity(state: State) -> str:
    """Return what keeps the job from renting."""
    if state.launches.folder_trouble:
        return f"the job's folder: {state.launches.folder_trouble}"
    failing = state.launches.failing
    if failing is not None and state.now_s < failing.opens_at_s:
        row = "" if failing.times == 1 else f" {failing.times} times in a row"
        return f"a pause, as {failing.vm_id} never trained{row}: {failing.reason}"
    if not state.fleet.reconciled:
        return "the provider's list of VMs"
    if allocation.room(state) <= 0:
        return "a plan that fits (the fleet is at its maximum size)"
    wanted = [o for o in state.market.offers if o.spot or state.job.resources.allow_on_demand]
    if not wanted:
        return "offers"
    if why := allocation.why_unlike(state):
        return why
    count_of = allocation.affordable(state)
    if all(count_of(offer) == 0 for offer in wanted):
        return "a price within the caps"
    return "capacity"
