"""Who is to have which VMs, and when that is decided anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from spottrain.eventlog.changed import replace
from spottrain.pricing.sharing.policies import POLICIES
from spottrain.pricing.sharing.problem import AllocationProblem
from spottrain.varuna_manager.pool.core.demands import admitted_deadline_s, problem_of
from spottrain.varuna_manager.pool.core.model import (
    PoolJob,
    PoolJobPhase,
    PoolState,
    Vms,
)
from spottrain.varuna_manager.pool.core.sizes import fill_leftover, round_to_vms

PROMISED = frozenset({"fair", "hierarchical"})
"""Policies whose shares are promised; those of others are aims."""
PAST_S = 1e-3
"""Later than an end, whatever the clock's resolution."""


def with_time(state: PoolState, now_s: float) -> PoolState:
    """Return the state at a time, with what jobs were due and got until then."""
    past_s = now_s - state.now_s
    if past_s <= 0:
        return state
    jobs = {}
    is_monthly = state.settings.budget_per == "month"
    renews = is_monthly and now_s >= _next_month_s(state.now_s)
    for name, job in state.jobs.items():
        if renews:
            job = replace(job, spent_before=job.spent)
        if job.phase is PoolJobPhase.ACTIVE:
            rate, best = job.rate(job.granted), job.best
            job = replace(
                job,
                received_s=job.received_s + rate / best * past_s,
                entitled_s=job.entitled_s + job.target_rate / best * past_s,
            )
        jobs[name] = job
    return replace(state, now_s=now_s, jobs=jobs)


def decided(state: PoolState, *, is_wanted: bool = False) -> PoolState:
    """Return the state with new targets, if they are worth the change.

    Args:
        state: Of the pool.
        is_wanted: A person has changed what they follow from: they are the targets now.
    """
    state = replace(state, considered_s=state.now_s)
    taking_part = [job for job in state.jobs.values() if state.takes_part(job)]
    problem, jobs = problem_of(state, taking_part)
    none: Vms = (0,) * len(state.supplies)
    if not jobs:
        cleared = {
            name: replace(job, target=none, target_rate=0.0) for name, job in state.jobs.items()
        }
        return replace(state, jobs=cleared)
    allocation = POLICIES[state.settings.policy](problem)
    round_s = state.settings.round_s
    owed = [not any(job.granted) and job.deficit_due_in_s(round_s) <= 0 for job in jobs]
    keeps = [
        any(job.granted)
        and state.now_s - _kept_from_s(state, job) < round_s
        and not (any(owed) and job.received_s > job.entitled_s)
        for job in jobs
    ]
    order = sorted(range(len(jobs)), key=lambda m: jobs[m].arrived_s)
    starved_s = [_waited_s(state, job) for job in jobs]
    sizes = round_to_vms(problem, allocation, jobs, keeps, owed, starved_s)
    if state.settings.policy != "cheapest":  # there what is idle is idle for its price
        sizes = fill_leftover(problem, sizes, jobs, order)
    if not is_wanted and not _is_worth_it(state, problem, jobs, sizes):
        sizes = [job.target for job in jobs]
    changed = any(job.target != size for job, size in zip(jobs, sizes, strict=True))
    found = dict(state.jobs)
    for name, job in found.items():
        found[name] = replace(job, target=none, target_rate=0.0)
    for job, size, rate in zip(jobs, sizes, allocation.examples_per_s, strict=True):
        found[job.request.name] = replace(job, target=size, target_rate=rate)
    decided_s = state.now_s if changed else state.decided_s
    return replace(state, jobs=found, decided_s=decided_s)


def with_shortages(state: PoolState) -> PoolState:
    """Return the state with since when jobs have been short of their shares."""
    changed = {}
    for name, job in state.jobs.items():
        since_s = min(job.short_since_s, state.now_s) if job.is_short else math.inf
        if since_s != job.short_since_s:
            changed[name] = replace(job, short_since_s=since_s)
    return replace(state, jobs={**state.jobs, **changed}) if changed else state


def _are_promised(state: PoolState) -> bool:
    return state.settings.policy in PROMISED


def _kept_from_s(state: PoolState, job: PoolJob) -> float:
    """Return from when a job keeps what it has for a round."""
    return job.began_s if _are_promised(state) else job.resized_s


def _waited_s(state: PoolState, job: PoolJob) -> float:
    """Return for how long a job waits that comes before others because it does; else 0.

    In the order of what jobs had so far, one that is far behind would displace others for as
    long, and one whose smallest size leaves others no room might never have it.

    Returns:
        Seconds since a turn was owed, if that is a round or more. Infinite for a job that has
        been short of its share for a round, and takes no turns: it waits for one turn only.
    """
    round_s = state.settings.round_s
    if not _are_promised(state):
        return 0.0
    if job.is_time_sliced:
        owed_s = 0.0 if any(job.granted) else -job.deficit_due_in_s(round_s)
        return owed_s if owed_s >= round_s else 0.0
    return math.inf if state.now_s - job.short_since_s >= round_s else 0.0


def _is_worth_it(
    state: PoolState,
    problem: AllocationProblem,
    jobs: Sequence[PoolJob],
    sizes: Sequence[Vms],
) -> bool:
    """Return whether targets are to change.

    They are where a job begins that waited, where the present ones are not allowed any more,
    where a deadline needs it, where no job loses by it, and where a job gains that has been
    below its share for a round. Else a stay has passed since the last change, and in another
    one more is trained than the changes cost.

    Args:
        problem: The pool, and the jobs as demands.
        jobs: Who takes part.
        sizes: Their new targets.
    """
    gains = [
        (job.rate(size) - job.rate(job.target)) / job.best
        for job, size in zip(jobs, sizes, strict=True)
    ]
    begins = any(any(size) and not any(job.target) for job, size in zip(jobs, sizes, strict=True))
    behind = any(
        job.rate(job.target) < min(needed * (1 - 1e-9), job.rate(size))
        for job, size, needed in zip(jobs, sizes, problem.needed, strict=True)
    )
    if begins or behind or not _is_allowed(state, jobs) or min(gains) >= 0:
        return True
    # Less may be trained then: what a job has beyond its share is another's.
    round_s = state.settings.round_s
    is_round_over = state.now_s >= state.decided_s + round_s
    if (is_round_over or _are_promised(state)) and any(
        gain > 0 and state.now_s - job.short_since_s >= round_s
        for job, gain in zip(jobs, gains, strict=True)
    ):
        return True
    if state.now_s < state.decided_s + state.settings.min_stay_s:
        return False
    cost_s = sum(
        job.request.morph_s * job.rate(job.target) / job.best
        for job, size in zip(jobs, sizes, strict=True)
        if size != job.target
    )
    return sum(gains) * state.settings.min_stay_s > cost_s


def _is_allowed(state: PoolState, jobs: Sequence[PoolJob]) -> bool:
    """Return whether the present targets are within VMs and caps."""
    problem, fitting = problem_of(state, jobs)
    if len(fitting) < len(jobs):
        return False
    held = [sum(job.target[k] for job in jobs) for k in range(len(problem.vms))]
    within = all(n <= vms for n, vms in zip(held, problem.vms, strict=True))
    return within and all(
        sum(each * n for m in cap.jobs for each, n in zip(cap.per_vm, jobs[m].target, strict=True))
        <= cap.at_most + 1e-9
        for cap in problem.caps
    )


def is_due(state: PoolState) -> bool:
    """Return whether a round is over, a manager has died, or a stay has passed."""
    return any(state.considered_s < entitled_s <= state.now_s for entitled_s in _moments(state))


def next_s(state: PoolState) -> float:
    """Return when the core is to be woken; infinite for never."""
    later = [entitled_s for entitled_s in _moments(state) if entitled_s > state.now_s]
    jobs = state.jobs.values()
    for job in jobs:
        ends: list[float] = []
        if any(job.granted):
            later += [t for t in [renewal_s(state, job)] if t > state.now_s]
            ends.append(job.until_s)
        if job.runs:
            ends.append(job.until_upper_bound_s)
        later += [t + PAST_S for t in ends if t >= state.now_s]
    if state.settings.budget_per == "month" and any(map(state.takes_part, jobs)):
        later.append(_next_month_s(state.now_s))
    return min(later, default=math.inf)


def _next_month_s(now_s: float) -> float:
    """Return when the next calendar month begins, in UTC."""
    at = datetime.fromtimestamp(now_s, UTC)
    year, month = divmod(at.year * 12 + at.month, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


def renewal_s(state: PoolState, job: PoolJob) -> float:
    """Return when a job's grant is renewed."""
    return job.until_s - state.settings.grant_s / 4


def _is_behind(state: PoolState, job: PoolJob) -> bool:
    """Return whether a job's target is less than its deadline needs."""
    if job.request.deadline_s == math.inf:
        return False
    left = job.request.examples - job.examples_done
    needed = min(left / admitted_deadline_s(state, job.request), job.best)
    return job.rate(job.target) < needed * (1 - 1e-9)


def _moments(state: PoolState) -> list[float]:
    """Return when sizes are to be decided anew, past or to come."""
    settings = state.settings
    moments = [state.decided_s + settings.min_stay_s]
    for job in state.jobs.values():
        if job.runs:
            moments.append(job.heard_s + settings.silent_s + PAST_S)
    parts = [job for job in state.jobs.values() if state.takes_part(job)]
    if any(_is_behind(state, job) for job in parts):
        moments.append(state.considered_s + settings.min_stay_s)
    short_s = [job.short_since_s for job in parts if job.short_since_s < math.inf]
    if short_s:
        moments += [since_s + settings.round_s for since_s in short_s]
        moments.append(state.decided_s + settings.round_s)
        moments.append(state.considered_s + settings.round_s)
    are_promised = _are_promised(state)
    if (short_s and are_promised) or any(not any(job.target) for job in parts):
        # Rounds end together, as far as a stay allows, and not each by itself.
        step_s = max(settings.min_stay_s, PAST_S)
        ends_s = (_kept_from_s(state, j) + settings.round_s for j in parts if any(j.granted))
        moments += [math.ceil(end_s / step_s) * step_s for end_s in ends_s]
        waiting = (job for job in parts if are_promised and not any(job.granted))
        deficit_due_in_s = (job.deficit_due_in_s(settings.round_s) for job in waiting)
        moments += [state.now_s + in_s + PAST_S for in_s in deficit_due_in_s if in_s < math.inf]
    return moments
