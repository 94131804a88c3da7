"""The manager's decisions, with no I/O: ``step(state, event) -> (state, commands)``.

Rules: nothing here reads a clock, a file or a socket; time arrives in events. Commands
are wishes, events are facts: the shell journals an event, then performs the commands
that follow from it and feeds their outcomes back.

An event is first taken in as a fact (``_take_in``); then every part of the core looks at
the state and takes it further where nothing is missing, until nothing changes
(``_settle``). So a decision depends on what is the case, not on the order in which it
became so, and a restarted manager decides the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from spottrain.varuna_manager.core import (
    allocation,
    calibration,
    deadline,
    fleet,
    launches,
    limits,
    planning,
    reports,
    shutdown,
    spending,
    stragglers,
)
from spottrain.varuna_manager.core import generation as generations
from spottrain.varuna_manager.core.activity import activity_of
from spottrain.varuna_manager.core.model.commands import Command, Outcome, SetTimer
from spottrain.varuna_manager.core.model.events import (
    AgentRegistered,
    AgentStarting,
    CheckpointsListed,
    ClockSet,
    CommandFailed,
    Event,
    FleetRated,
    JobMoved,
    JobReleased,
    JobSubmitted,
    LaunchIntended,
    LaunchRefused,
    LimitsChanged,
    ManagerStarted,
    OffersRanked,
    OffersSeen,
    PlanComputed,
    ProfilesListed,
    ProviderAnswered,
    ReportReceived,
    SetupFailed,
    StopRequested,
    TimerFired,
    VmHeard,
    VmLost,
    VmSilent,
    VmsLaunched,
    VmsListed,
    VmsReturned,
)
from spottrain.varuna_manager.core.model.records import GenerationPhase, VmPhase
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire import Initialise, MinibatchCommitted

MAX_ROUNDS = 20
"""Rounds after which a state that still changes is a bug."""


def step(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
    """Return the state after ``event``, and the commands that it calls for."""
    if state.phase is JobPhase.NEW and not isinstance(event, JobSubmitted):
        return state, ()
    if state.phase is JobPhase.ENDED and isinstance(event, LimitsChanged):
        return limits.with_limits(state, event), ()
    if state.phase is JobPhase.ENDED and isinstance(event, VmsListed):
        return spending.settled(state, event), ()
    if state.phase is JobPhase.ENDED and not isinstance(
        event, ManagerStarted | JobMoved
    ):
        return state, ()
    transition = Transition(state, event.at_s)
    _take_in(transition, event)
    # A commit changes hardly any decision: with thousands of slots it must stay cheap.
    if transition.decides or not _is_commit(event):
        _settle(transition)
    return transition.state, tuple(transition.commands)


def _is_commit(event: Event) -> bool:
    return isinstance(event, ReportReceived) and isinstance(
        event.report, MinibatchCommitted
    )


def _take_in(transition: Transition, event: Event) -> None:
    """Note a fact."""
    match event:
        case JobSubmitted():
            _job_submitted(transition, event)
        case ManagerStarted():
            _manager_started(transition)
        case JobMoved():
            fleet.job_moved(transition, event)
        case StopRequested():
            shutdown.stop_requested(transition, event)
        case LimitsChanged():
            limits.limits_changed(transition, event)
        case ClockSet(by_s=by_s):
            way = "forward" if by_s > 0 else "back"
            transition.log(
                f"the wall clock was set {abs(by_s):.0f} s {way}: it is not followed"
            )
        case TimerFired():
            transition.state = replace(transition.state, timer_at_s=None)
        case CheckpointsListed(checkpoints=checkpoints):
            reports.checkpoints_listed(transition, checkpoints)
        case ProfilesListed(profiles=profiles):
            transition.state = replace(transition.state, known_profiles=profiles)
        case ReportReceived():
            reports.report_received(transition, event)
        case PlanComputed():
            planning.plan_computed(transition, event)
        case SetupFailed(reason=reason, output=output):
            transition.end(
                Outcome(kind="failed", exit_code=3, reason=reason, traceback=output)
            )
        case CommandFailed(command="compute_plan"):
            planning.plan_failed(transition, event)
        case CommandFailed(command="release_job"):
            shutdown.release_failed(transition, event)
        case JobReleased():
            shutdown.job_released(transition)
        case _:
            _take_in_fleet(transition, event)


FleetEvent = (
    OffersSeen
    | OffersRanked
    | FleetRated
    | LaunchIntended
    | VmsLaunched
    | LaunchRefused
    | VmsListed
    | ProviderAnswered
    | VmsReturned
    | VmLost
    | AgentStarting
    | AgentRegistered
    | VmSilent
    | VmHeard
    | CommandFailed
)


def _take_in_fleet(transition: Transition, event: FleetEvent) -> None:
    """Note a fact about VMs."""
    match event:
        case OffersSeen():
            launches.offers_seen(transition, event)
        case OffersRanked(worths=worths):
            known = {worth.offer: worth for worth in worths}
            transition.state = replace(transition.state, worths=known)
        case FleetRated():
            deadline.fleet_rated(transition, event)
        case LaunchIntended():
            launches.launch_intended(transition, event)
        case VmsLaunched():
            launches.vms_launched(transition, event)
        case LaunchRefused():
            launches.launch_refused(transition, event)
        case VmsListed():
            fleet.vms_listed(transition, event)
        case ProviderAnswered():
            fleet.provider_answered(transition, event)
        case VmsReturned():
            fleet.vms_returned(transition, event)
        case VmLost(vm_id=vm_id, reason=reason):
            if vm := transition.state.vms.get(vm_id):
                fleet.remove_vm(transition, vm, reason)
        case AgentStarting():
            fleet.agent_starting(transition, event)
        case AgentRegistered():
            fleet.agent_registered(transition, event)
        case VmSilent(vm_id=vm_id):
            if vm_id in transition.state.vms:
                generations.suspect(transition, vm_id)
        case VmHeard(vm_id=vm_id):
            fleet.vm_heard(transition, vm_id)
        case CommandFailed():
            fleet.command_failed(transition, event)
        case _:
            assert_never(event)


def _job_submitted(transition: Transition, event: JobSubmitted) -> None:
    if transition.state.phase is JobPhase.NEW:
        transition.state = replace(
            transition.state,
            phase=JobPhase.ACTIVE,
            settings=event.settings,
            profile=event.settings.profile,
            submitted_at_s=event.at_s,
        )
        transition.log("submitted")


def _manager_started(transition: Transition) -> None:
    """Issue again whatever is not answered: the manager that asked is gone."""
    shutdown.reopen(transition)
    state = transition.state
    transition.state = replace(
        state,
        reconciled=False,
        timer_at_s=None,
        plan_asked=None,
        launch_wished=False,
        prepare_since_s=transition.now_s,
        release=None,
        intents={
            k: replace(v, retry_at_s=None, asked_at_s=transition.now_s)
            for k, v in state.intents.items()
        },
    )
    for intent in transition.state.intents.values():
        launches.launch(transition, intent)
    for vm in tuple(transition.state.vms.values()):
        # Silence counts from now on: nobody listened in between.
        transition.put_vm(replace(vm, silent_since_s=None, retry_at_s=None))
        if vm.phase in (VmPhase.BOOTING, VmPhase.RETURNING):
            fleet.ask_again(transition, vm)
    if transition.state.calibration is not None:
        calibration.send(transition, transition.state.calibration)
    if transition.state.initialiser is not None:
        transition.send((transition.state.initialiser,), Initialise())
    _resume_generation(transition)


def _resume_generation(transition: Transition) -> None:
    """Repeat the commands of the generation's phase; supervisors ignore doubles."""
    generation = transition.state.generation
    if generation is None:
        return
    if generation.phase is not GenerationPhase.RUNNING:
        generation = replace(generation, since_s=transition.now_s, abandoned=False)
        transition.put_generation(generation)
    match generation.phase:
        case GenerationPhase.OPENING:
            generations.open_store(transition, generation)
        case GenerationPhase.STARTING:
            generations.invite(transition, generation)
        case GenerationPhase.STOPPING:
            generations.send_stop(transition, generation)
        case GenerationPhase.RUNNING:
            stragglers.send_share(transition, generation)
        case GenerationPhase.BREAKING:
            pass  # its ranks are told to give up when it is due
        case _:
            assert_never(generation.phase)


def _settle(transition: Transition) -> None:
    """Take the state further until nothing changes, then look what to rent and when
    to look again."""
    if transition.state.phase not in (JobPhase.ACTIVE, JobPhase.ENDING):
        return
    for _ in range(MAX_ROUNDS):
        before = transition.state
        transition.wake_at_s = None
        spending.advance(transition)
        shutdown.watch_limits(transition)
        limits.advance(transition)
        deadline.advance(transition)
        launches.advance(transition)
        fleet.advance(transition)
        generations.advance(transition)
        stragglers.advance(transition)
        planning.advance(transition)
        shutdown.advance(transition)
        if transition.state is before:
            break
    else:
        raise AssertionError(f"the core does not come to rest: {transition.state}")
    if transition.state.phase is JobPhase.ACTIVE:
        allocation.launch_more(transition)
    _finish_turn(transition)


def _finish_turn(transition: Transition) -> None:
    """Describe the state for people, and set the timer."""
    if transition.wake_at_s != transition.state.timer_at_s:
        transition.emit(SetTimer(at_s=transition.wake_at_s))
    transition.state = replace(
        transition.state,
        activity=activity_of(transition.state),
        timer_at_s=transition.wake_at_s,
    )
