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
    release,
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
    turn = Transition(state, event.at_s)
    _take_in(turn, event)
    # A commit changes hardly any decision: with thousands of slots it must stay cheap.
    if turn.decides or not _is_commit(event):
        _settle(turn)
    return turn.state, tuple(turn.commands)


def _is_commit(event: Event) -> bool:
    return isinstance(event, ReportReceived) and isinstance(
        event.report, MinibatchCommitted
    )


def _take_in(turn: Transition, event: Event) -> None:
    """Note a fact."""
    match event:
        case JobSubmitted():
            _job_submitted(turn, event)
        case ManagerStarted():
            _manager_started(turn)
        case JobMoved():
            fleet.job_moved(turn, event)
        case StopRequested():
            shutdown.stop_requested(turn, event)
        case LimitsChanged():
            limits.limits_changed(turn, event)
        case ClockSet(by_s=by_s):
            way = "forward" if by_s > 0 else "back"
            turn.say(
                f"the wall clock was set {abs(by_s):.0f} s {way}: it is not followed"
            )
        case TimerFired():
            turn.state = replace(turn.state, timer_at_s=None)
        case CheckpointsListed(checkpoints=checkpoints):
            reports.checkpoints_listed(turn, checkpoints)
        case ProfilesListed(profiles=profiles):
            turn.state = replace(turn.state, known_profiles=profiles)
        case ReportReceived():
            reports.report_received(turn, event)
        case PlanComputed():
            planning.plan_computed(turn, event)
        case SetupFailed(reason=reason, output=output):
            turn.end(
                Outcome(kind="failed", exit_code=3, reason=reason, traceback=output)
            )
        case CommandFailed(command="compute_plan"):
            planning.plan_failed(turn, event)
        case CommandFailed(command="release_job"):
            release.release_failed(turn, event)
        case JobReleased():
            release.job_released(turn)
        case _:
            _take_in_fleet(turn, event)


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


def _take_in_fleet(turn: Transition, event: FleetEvent) -> None:
    """Note a fact about VMs."""
    match event:
        case OffersSeen():
            launches.offers_seen(turn, event)
        case OffersRanked(worths=worths):
            known = {worth.offer: worth for worth in worths}
            turn.state = replace(turn.state, worths=known)
        case FleetRated():
            deadline.fleet_rated(turn, event)
        case LaunchIntended():
            launches.launch_intended(turn, event)
        case VmsLaunched():
            launches.vms_launched(turn, event)
        case LaunchRefused():
            launches.launch_refused(turn, event)
        case VmsListed():
            fleet.vms_listed(turn, event)
        case ProviderAnswered():
            fleet.provider_answered(turn, event)
        case VmsReturned():
            fleet.vms_returned(turn, event)
        case VmLost(vm_id=vm_id, reason=reason):
            if vm := turn.state.vms.get(vm_id):
                fleet.remove_vm(turn, vm, reason)
        case AgentStarting():
            fleet.agent_starting(turn, event)
        case AgentRegistered():
            fleet.agent_registered(turn, event)
        case VmSilent(vm_id=vm_id):
            if vm_id in turn.state.vms:
                generations.suspect(turn, vm_id)
        case VmHeard(vm_id=vm_id):
            fleet.vm_heard(turn, vm_id)
        case CommandFailed():
            fleet.command_failed(turn, event)
        case _:
            assert_never(event)


def _job_submitted(turn: Transition, event: JobSubmitted) -> None:
    if turn.state.phase is JobPhase.NEW:
        turn.state = replace(
            turn.state,
            phase=JobPhase.ACTIVE,
            settings=event.settings,
            profile=event.settings.profile,
            submitted_at_s=event.at_s,
        )
        turn.say("submitted")


def _manager_started(turn: Transition) -> None:
    """Issue again whatever is not answered: the manager that asked is gone."""
    shutdown.reopen(turn)
    state = turn.state
    turn.state = replace(
        state,
        reconciled=False,
        timer_at_s=None,
        plan_asked=None,
        launch_wished=False,
        prepare_since_s=turn.now_s,
        release=None,
        intents={
            k: replace(v, retry_at_s=None, asked_at_s=turn.now_s)
            for k, v in state.intents.items()
        },
    )
    for intent in turn.state.intents.values():
        launches.launch(turn, intent)
    for vm in tuple(turn.state.vms.values()):
        # Silence counts from now on: nobody listened in between.
        turn.put_vm(replace(vm, silent_since_s=None, retry_at_s=None))
        if vm.phase in (VmPhase.BOOTING, VmPhase.RETURNING):
            fleet.ask_again(turn, vm)
    if turn.state.calibration is not None:
        calibration.send(turn, turn.state.calibration)
    if turn.state.initialiser is not None:
        turn.send((turn.state.initialiser,), Initialise())
    _resume_generation(turn)


def _resume_generation(turn: Transition) -> None:
    """Repeat the commands of the generation's phase; supervisors ignore doubles."""
    generation = turn.state.generation
    if generation is None:
        return
    if generation.phase is not GenerationPhase.RUNNING:
        generation = replace(generation, since_s=turn.now_s, abandoned=False)
        turn.put_generation(generation)
    match generation.phase:
        case GenerationPhase.OPENING:
            generations.open_store(turn, generation)
        case GenerationPhase.STARTING:
            generations.invite(turn, generation)
        case GenerationPhase.STOPPING:
            generations.send_stop(turn, generation)
        case GenerationPhase.RUNNING:
            stragglers.send_share(turn, generation)
        case GenerationPhase.BREAKING:
            pass  # its ranks are told to give up when it is due
        case _:
            assert_never(generation.phase)


def _settle(turn: Transition) -> None:
    """Take the state further until nothing changes, then look what to rent and when
    to look again."""
    if turn.state.phase not in (JobPhase.ACTIVE, JobPhase.ENDING):
        return
    for _ in range(MAX_ROUNDS):
        before = turn.state
        turn.wake_at_s = None
        spending.advance(turn)
        shutdown.watch_limits(turn)
        limits.advance(turn)
        deadline.advance(turn)
        launches.advance(turn)
        fleet.advance(turn)
        generations.advance(turn)
        stragglers.advance(turn)
        planning.advance(turn)
        shutdown.advance(turn)
        if turn.state is before:
            break
    else:
        raise AssertionError(f"the core does not come to rest: {turn.state}")
    if turn.state.phase is JobPhase.ACTIVE:
        allocation.launch_more(turn)
    _finish_turn(turn)


def _finish_turn(turn: Transition) -> None:
    """Describe the state for people, and set the timer."""
    if turn.wake_at_s != turn.state.timer_at_s:
        turn.do(SetTimer(at_s=turn.wake_at_s))
    turn.state = replace(
        turn.state, activity=activity_of(turn.state), timer_at_s=turn.wake_at_s
    )
