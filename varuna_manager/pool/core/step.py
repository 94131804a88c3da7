"""The pool's decisions, with no I/O: ``step(state, event) -> (state, commands)``.

The rules of ``varuna_manager.core`` hold: time arrives in events, events are facts, commands
are requests that may be performed twice. And those of a pool:

1. A grant is what a job's manager may hold and spend, until a time. It returns its VMs by
   then whatever happens, so that what is granted is bounded when the pool is dead.
2. A manager may follow any grant since the last that it reported. What counts against a cap
   is the most that any of these allows (``held_upper_bound``, ``spend_upper_bound``), and what it
   is known to hold: so shrinking is acknowledged before others grow.
3. A dead manager's VMs count until the clouds say that they are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from spottrain.eventlog.changed import replace
from spottrain.varuna_manager.pool.core import decide
from spottrain.varuna_manager.pool.core.admission import idle_for_s, objection
from spottrain.varuna_manager.pool.core.grants import last_grant, regrant, rented
from spottrain.varuna_manager.pool.core.model import (
    RECEIVE_S,
    Grant,
    HoldingsListed,
    HoldingsReported,
    JobRequested,
    Order,
    PoolClosed,
    PoolCommand,
    PoolCreated,
    PoolEvent,
    PoolJob,
    PoolJobEnded,
    PoolJobPaused,
    PoolJobPhase,
    PoolSettings,
    PoolSettingsChanged,
    PoolStarted,
    PoolState,
    PoolTimerFired,
    PriorityChanged,
    ReturnVms,
    SuppliesChanged,
    Vms,
)


def step(state: PoolState, event: PoolEvent) -> tuple[PoolState, tuple[PoolCommand, ...]]:
    """Return the state after ``event``, and the commands that it calls for."""
    state = decide.with_time(state, event.at_s)
    state, is_reset, commands = _fold(state, event)
    if is_reset or decide.is_due(state):
        is_wanted = isinstance(event, PriorityChanged | PoolSettingsChanged)
        state = decide.decided(state, is_wanted=is_wanted)
    state, granted = regrant(state)
    state = decide.with_shortages(state)
    state = replace(state, timer_s=decide.next_s(state))
    return state, (*commands, *granted, *_returns(state))


def _fold(state: PoolState, event: PoolEvent) -> tuple[PoolState, bool, tuple[PoolCommand, ...]]:
    """Fold a fact into the state.

    Returns:
        The state; whether shares have to be computed anew (a reset event); commands.
    """
    match event:
        case PoolTimerFired():
            return state, False, ()
        case PoolCreated():
            settings, supplies = event.settings, event.supplies
            return replace(state, settings=settings, supplies=supplies), False, ()
        case PoolStarted():
            return _heard(state), True, _again(state)
        case JobRequested():
            return _requested(state, event)
        case HoldingsReported():
            return _reported(state, event)
        case HoldingsListed():
            return _listed(state, event)
        case PoolJobEnded():
            return _with_phase(state, event.job, PoolJobPhase.ENDED)
        case PoolJobPaused():
            if event.is_paused:
                return _with_phase(state, event.job, PoolJobPhase.PAUSED)
            return _resumed(state, event.job)
        case PriorityChanged(job=name, weight=weight):
            return _with_weight(state, name, weight), True, ()
        case SuppliesChanged():
            return replace(state, supplies=event.supplies), True, ()
        case PoolSettingsChanged():
            return _with_settings(state, event.settings), True, ()
        case PoolClosed():
            return replace(state, is_closed=True), True, ()
        case _:
            assert_never(event)  # type: ignore[arg-type]  # PoolEvent is their base


def _requested(
    state: PoolState, event: JobRequested
) -> tuple[PoolState, bool, tuple[PoolCommand, ...]]:
    request = event.request
    if refusal := objection(state, request):
        return state, False, (refusal,)
    state = _with_free_name(state, request.name)
    return state.with_job(state.new_job(request)), True, ()


def _with_free_name(state: PoolState, name: str) -> PoolState:
    """Return the state with an ended job of a name under ``<name>.1``, …: its dollars count."""
    if name not in state.jobs:
        return state
    number = 1
    while (free := f"{name}.{number}") in state.jobs:
        number += 1
    former = state.jobs[name]
    former = replace(former, request=replace(former.request, name=free))
    others = {k: job for k, job in state.jobs.items() if k != name}
    return replace(state, jobs={**others, free: former})


def _reported(
    state: PoolState, event: HoldingsReported
) -> tuple[PoolState, bool, tuple[PoolCommand, ...]]:
    job = state.jobs.get(event.job)
    if job is None:
        return state, False, ()
    was_silent = state.is_silent(job)
    follows = event.serial == job.serial
    spent = event.spent  # an end that a cloud confirms late makes it less
    was_ending = job.is_ending
    before = job
    job, taken = _with_answers(job, event)
    job = _with_held(job, event)
    loss = any(now < old for now, old in zip(job.held, before.held, strict=True))
    # What it has yet to return, or keeps for others, it still pays for.
    is_over = any(n > vms for n, vms in zip(job.held, job.granted, strict=True))
    job = replace(
        job,
        heard_s=state.now_s,
        spent=spent,
        examples_done=max(job.examples_done, event.examples_done),
        held_upper_bound=_may_hold(job) if follows else job.held_upper_bound,
        until_upper_bound_s=job.until_s if follows else job.until_upper_bound_s,
        spend_upper_bound=max(spent, job.allowance)
        if follows and not is_over
        else job.spend_upper_bound,
    )
    state = _without_taken(state, taken)
    measured = event.throughputs
    corrected = measured is not None and measured != job.request.throughputs
    if corrected and any(measured or ()):
        job = replace(job, request=replace(job.request, throughputs=measured or ()))
    # A manager that has not heard of the last grant has lost nothing of it.
    unexpected = (follows and loss) and any(
        held < granted for held, granted in zip(job.held, job.granted, strict=True)
    )
    idle_s = idle_for_s(state, job, event.idle_asked_s)
    if idle_s != job.idle_s:
        job, follows = replace(job, idle_s=idle_s, serial=job.serial + 1), False
    told = () if follows else (last_grant(job),)  # it may have been lost
    is_reset = was_silent or corrected or unexpected or job.is_ending != was_ending
    return state.with_job(job), is_reset, told


def _with_answers(job: PoolJob, event: HoldingsReported) -> tuple[PoolJob, list[Order]]:
    """Return a job without the orders of which its journal says what came of them, and those
    by which it got VMs.

    The place of a VM that it got is as good as any other; where it got none there is no place
    until it is granted one.
    """
    taken, left = [], []
    granted, held_upper_bound, refused = (
        list(job.granted),
        list(job.held_upper_bound),
        set(job.refused),
    )
    for order in job.orders:
        if order.name in event.taken:
            taken.append(order)
            held_upper_bound[order.supply] += 1
        elif order.serial > event.serial or order.name in event.open:
            left.append(order)
        else:
            granted[order.supply] -= granted[order.supply] > 0
            refused.add(order.vm_id)
    job = replace(
        job,
        orders=tuple(left),
        granted=tuple(granted),
        held_upper_bound=tuple(held_upper_bound),
        refused=frozenset(refused),
    )
    return job, taken


def _with_held(job: PoolJob, event: HoldingsReported) -> PoolJob:
    """Return a job with what it holds, without what others say they have of it."""
    gone = job.gone & {vm.vm_id for vm in event.kept}
    held = list(event.held)
    for vm in event.kept:
        held[vm.supply] -= vm.vm_id in gone
    kept = tuple(vm for vm in event.kept if vm.vm_id not in gone)
    return replace(job, held=tuple(held), kept=kept, gone=gone, is_ending=event.is_ending)


def _may_hold(job: PoolJob) -> Vms:
    """Return what a job may hold that follows its last grant, beside orders and what it keeps
    for others."""
    held = list(job.held)
    for vm in job.kept:
        held[vm.supply] -= 1
    return _most(rented(job.granted, job.orders), tuple(held))


def _without_taken(state: PoolState, taken: Iterable[Order]) -> PoolState:
    """Return the state in which VMs that a job has got are not others' any more."""
    for order in taken:
        for job in state.jobs.values():
            kept = tuple(vm for vm in job.kept if vm.vm_id != order.vm_id)
            if kept == job.kept:
                continue
            held = list(job.held)
            held[order.supply] -= 1
            gone = job.gone | {order.vm_id}
            state = state.with_job(replace(job, kept=kept, held=tuple(held), gone=gone))
    return state


def _listed(
    state: PoolState, event: HoldingsListed
) -> tuple[PoolState, bool, tuple[PoolCommand, ...]]:
    """Fold what a dead manager's job holds; what it may hold ends with its grant."""
    job = state.jobs.get(event.job)
    if job is None or not _is_lost(state, job):
        return state, False, ()
    spent = event.spent  # an end that a cloud confirms late makes it less
    job = replace(
        job,
        held=event.held,
        held_upper_bound=event.held,
        spent=spent,
        kept=(),
        gone=frozenset(),
        orders=(),
        is_ending=False,
    )
    if not any(event.held):
        job = replace(job, spend_upper_bound=spent)
    return state.with_job(job), True, ()


def _with_phase(
    state: PoolState, name: str, phase: PoolJobPhase
) -> tuple[PoolState, bool, tuple[PoolCommand, ...]]:
    job = state.jobs.get(name)
    if job is None or job.phase in (phase, PoolJobPhase.ENDED):
        return state, False, ()
    return state.with_job(replace(job, phase=phase)), True, ()


def _resumed(state: PoolState, name: str) -> tuple[PoolState, bool, tuple[PoolCommand, ...]]:
    job = state.jobs.get(name)
    if job is None or job.phase is PoolJobPhase.ACTIVE:
        return state, False, ()
    job = replace(job, phase=PoolJobPhase.ACTIVE, resumed_s=state.now_s)
    return state.with_job(job), True, ()


def _with_weight(state: PoolState, name: str, weight: float) -> PoolState:
    job = state.jobs.get(name)
    if job is None:
        return state
    return state.with_job(replace(job, request=replace(job.request, weight=weight)))


def _with_settings(state: PoolState, settings: PoolSettings) -> PoolState:
    if settings.budget_per == "life":  # what was spent in earlier months counts again
        jobs = {k: replace(job, spent_before=0) for k, job in state.jobs.items()}
        state = replace(state, jobs=jobs)
    return replace(state, settings=settings)


def _is_lost(state: PoolState, job: PoolJob) -> bool:
    """Return whether a manager is dead and may not rent any more."""
    if not state.is_silent(job):
        return False
    over_s = max((order.until_s + RECEIVE_S for order in job.orders), default=0.0)
    return state.now_s >= max(job.until_upper_bound_s, over_s)


def _returns(state: PoolState) -> tuple[ReturnVms, ...]:
    return tuple(ReturnVms(job=name) for name, job in state.jobs.items() if _is_lost(state, job))


def _heard(state: PoolState) -> PoolState:
    """Return the state in which managers have not been silent while the pool was dead."""
    jobs = {
        name: replace(job, heard_s=state.now_s) if state.now_s < job.until_upper_bound_s else job
        for name, job in state.jobs.items()
    }
    return replace(state, jobs=jobs)


def _again(state: PoolState) -> tuple[Grant, ...]:
    """Return the last grants; a pool that has died may not have told them."""
    jobs = state.jobs.values()
    return tuple(last_grant(job) for job in jobs if job.runs)


def _most(a: Vms, b: Vms) -> Vms:
    return tuple(map(max, a, b))
