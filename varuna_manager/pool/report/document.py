"""The status of a pool: who should have what, who has what, and why."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from spottrain.errors import SpottrainError
from spottrain.morphing.plan.profiles import remark, spread_of
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.format import duration
from spottrain.varuna_manager.jobs.follow import folder_of, read_state
from spottrain.varuna_manager.pool.core.decide import with_time
from spottrain.varuna_manager.pool.core.demands import too_large_for
from spottrain.varuna_manager.pool.core.model import (
    PoolJob,
    PoolJobPhase,
    PoolState,
    Vms,
)
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.pool.store.journal import PoolJournal

SCHEMA_VERSION = 1
_GOES_ON = ("queued", "stopped")
"""Outcomes of a job's manager; those of a job are others, unless a person took it down."""


def read_pool(pool: PoolDir) -> PoolState:
    """Return the present state of a pool.

    Raises:
        JournalError: The journal is missing or damaged.
    """
    with closing(PoolJournal(pool.journal, read_only=True)) as journal:
        return journal.replay()


def status(pool: PoolDir) -> dict[str, Any]:
    """Return a pool's status; its daemon need not run.

    Raises:
        JournalError: The journal is missing or damaged.
    """
    state = read_pool(pool)
    states: dict[str, State] = {}
    for name, job in state.jobs.items():
        if job.request.uid or "." not in name:
            with contextlib.suppress(SpottrainError):
                states[name] = read_state(folder_of(name, job.request.uid))
    return document(
        pool.name,
        state,
        states,
        time.time(),
        is_served=pool.is_managed(),
        is_down=pool.is_down,
    )


def document(
    name: str,
    state: PoolState,
    states: Mapping[str, State],
    now_s: float,
    *,
    is_served: bool,
    is_down: bool = False,
) -> dict[str, Any]:
    """Return a pool's status as JSON data.

    Args:
        name: Of the pool.
        state: Of the pool.
        states: Of its jobs, as far as they are known.
        now_s: Seconds since the epoch.
        is_served: Whether its daemon runs.
        is_down: Whether it was taken down.
    """
    jobs = [_job(name, state, job, states.get(key), now_s) for key, job in state.jobs.items()]
    limits = state.settings.limits
    held = [sum(job.held[k] for job in state.jobs.values()) for k in _kinds(state)]
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "state": _pool_state(state, is_served, is_down),
        "policy": state.settings.policy,
        "max_vms": limits.max_vms,
        "max_usd": _usd(limits.max_microusd),
        "usd_spent": sum(job["usd_spent"] for job in jobs),
        "usd_spent_this_month": _usd_this_month(state, now_s),
        "usd_per_hour": state.microusd_per_hour(tuple(held)) / 1e6,
        "max_usd_per_hour": _usd(limits.max_microusd_per_hour),
        "kinds": [
            {
                "name": supply.name,
                "vms": supply.vms,
                "held": held[k],
                "usd_per_hour": supply.microusd_per_hour / 1e6,
            }
            for k, supply in enumerate(state.supplies)
        ],
        "teams": [
            {"name": team, "weight": one.weight, "vms": _of_team(state, team)}
            for team, one in state.settings.teams.items()
        ],
        "jobs": jobs,
    }


def _pool_state(state: PoolState, is_served: bool, is_down: bool) -> str:
    if is_down:
        return "down"
    if not is_served:
        return "unserved"
    return "closing" if state.is_closed else "running"


def _kinds(state: PoolState) -> range:
    return range(len(state.supplies))


def _usd(microusd: float) -> float | None:
    return None if math.isinf(microusd) else microusd / 1e6


def _usd_this_month(state: PoolState, now_s: float) -> float | None:
    """Return the part of the dollars spent that counts against the month's; None: all do."""
    if state.settings.budget_per != "month":
        return None
    state = with_time(state, now_s)  # a month may have begun since
    return sum(job.spent - job.spent_before for job in state.jobs.values()) / 1e6


def _of_team(state: PoolState, team: str) -> int:
    return sum(sum(j.held) for j in state.jobs.values() if j.request.team == team)


def _job(
    name: str, pool: PoolState, job: PoolJob, state: State | None, now_s: float
) -> dict[str, Any]:
    request = job.request
    takes_part = job.phase is PoolJobPhase.ACTIVE
    steps = None if state is None else state.job.spec.steps
    done = None if state is None else state.history.progress.step
    finish_s = _finish_s(pool, job, state, now_s)
    deadline_s = None if math.isinf(request.deadline_s) else request.deadline_s
    supplied = sum(supply.vms for supply in pool.supplies)
    total = min(supplied, pool.settings.limits.max_vms)
    return {
        "name": request.name,
        "team": request.team or None,
        "state": _state_of(job, state),
        "priority": request.weight,
        "share_due": _vms_due(job) / total if takes_part else 0.0,
        "share": sum(job.held) / total,
        "vms": {supply.name: n for supply, n in zip(pool.supplies, job.held, strict=True) if n},
        "vms_granted": sum(job.granted),
        "examples_per_s": _measured(state),
        "believed": _believed(pool, job, state),
        "steps_done": done,
        "steps": steps,
        "usd_spent": job.spent / 1e6,
        "arrived_s": job.arrived_s,
        "finish_s": finish_s,
        "deadline_s": deadline_s,
        "deadline_kept": None
        if deadline_s is None
        else finish_s is not None
        and finish_s <= deadline_s
        and (takes_part or _state_of(job, state) in ("succeeded", "paused")),
        "why": why(name, pool, job, state),
        "rents_because": apart(pool, job) or None,
    }


def _believed(pool: PoolState, job: PoolJob, state: State | None) -> dict[str, Any]:
    """Return what the pool divides its VMs by, and what that rests on."""
    known = None if state is None else state.preparation
    profile = None if known is None else known.profile
    return {
        "examples_per_s": {
            supply.name: {str(vms): rate for vms, rate in table}
            for supply, table in zip(pool.supplies, job.request.throughputs, strict=True)
        },
        "measured_at_s": None if known is None or profile is None else known.profile_at_s or None,
        "spread": None if profile is None else spread_of(profile),
    }


def _state_of(job: PoolJob, state: State | None) -> str:
    if job.phase is PoolJobPhase.ENDED:
        outcome = None if state is None else state.outcome
        if outcome is None:
            return "ended"
        return "down" if _goes_on(outcome) else outcome.kind
    if job.phase is PoolJobPhase.PAUSED:
        return "paused"
    if state is not None and _is_ending(state):
        if state.outcome is not None and state.phase is JobPhase.ENDED:
            return state.outcome.kind
        return "ending"
    if not any(job.held) and not any(job.granted):
        return "queued"
    generation = None if state is None else state.training.generation
    return "starting" if generation is None else "running"


def _is_ending(state: State) -> bool:
    """Return whether a job will train no more, though it may hold VMs yet."""
    if state.outcome is not None:
        return not _goes_on(state.outcome)
    return state.training.generation is None and (
        state.history.progress.step >= state.job.spec.steps
    )


def _goes_on(outcome: Outcome) -> bool:
    """Return whether only a job's manager ended, not the job."""
    return outcome.kind in _GOES_ON


def _vms_due(job: PoolJob) -> float:
    """Return how many VMs the policy gives a job on average, where it trains best."""
    best = 0.0
    for table in job.request.throughputs:
        before = (0, 0.0)
        for size, rate in table:
            if rate >= job.target_rate:
                part = (job.target_rate - before[1]) / (rate - before[1])
                return before[0] + part * (size - before[0])
            before = (size, rate)
        best = max(best, before[0])
    return best


def _measured(state: State | None) -> float | None:
    if state is None or state.phase is JobPhase.ENDED or state.training.generation is None:
        return None
    step_s = state.training.generation.measured_step_s
    return state.job.spec.minibatch_size / step_s if step_s else None


def _finish_s(pool: PoolState, job: PoolJob, state: State | None, now_s: float) -> float | None:
    """Return when a job will have ended, or has; None if that is not known."""
    if job.phase is PoolJobPhase.ENDED:
        return None if state is None else state.now_s
    rate = job.rate(job.held) or job.target_rate
    if not rate or not pool.takes_part(job):
        return None
    done = job.examples_done
    if state is not None:
        done = max(done, float(state.history.progress.step * state.job.spec.minibatch_size))
    return now_s + max(0.0, job.request.examples - done) / rate


def why(name: str, pool: PoolState, job: PoolJob, state: State | None) -> str:
    """Return in a line why a job has what it has."""
    request = job.request
    if job.phase is PoolJobPhase.ENDED:
        outcome = None if state is None else state.outcome
        return "it has ended" if outcome is None or _goes_on(outcome) else outcome.reason
    if job.phase is PoolJobPhase.PAUSED:
        return f"paused; 'spottrain pool resume {name} {request.name}' lets it go on"
    if state is not None and _is_ending(state):
        return "all is trained" if state.outcome is None else state.outcome.reason
    if pool.is_closed:
        return "the pool is being taken down"
    if pool.is_silent(job):
        return "its manager is silent: it is granted nothing until it has reported"
    if sum(job.held) > sum(job.granted):
        return "gives VMs back: others hold them next"
    if sum(job.granted) < sum(job.target):
        return _why_less(pool, job)
    if not any(job.target):
        return _why_nothing(pool, job)
    return _why_so_much(pool, job, state)


def apart(pool: PoolState, job: PoolJob) -> str:
    """Return in a line why no other job's VMs become this one's without a boot.

    Empty if some can, or if there is no other job that may have any.
    """
    others = [x for x in pool.jobs.values() if x is not job and pool.takes_part(x)]
    if not pool.takes_part(job) or not others:
        return ""
    ours = job.request.machine
    if not ours:
        return "VMs of its provider do not go from one job to another"
    if any(other.request.machine == ours for other in others):
        return ""
    told = (
        f"{other.request.name} has another {_differs(ours, other.request.machine)}"
        for other in others
    )
    return f"its VMs are rented: {', '.join(told)}"


def _differs(ours: str, theirs: str) -> str:
    """Return which parts of what VMs are made of are not the same."""
    parts = zip(ours.split(), theirs.split() or ["none"], strict=False)
    names = (a.partition(":")[0] for a, b in parts if a != b)
    return " and ".join("provider" if name == ours.split()[0] else name for name in names)


def _why_less(pool: PoolState, job: PoolJob) -> str:
    returning = [
        other.request.name
        for other in pool.jobs.values()
        if any(h > t for h, t in zip(_may(other), other.target, strict=True)) and other is not job
    ]
    if returning:
        return f"waits for {', '.join(returning)} to give VMs back"
    return "waits: the pool's or its team's dollars do not pay for more"


def _may(job: PoolJob) -> Vms:
    return tuple(map(max, job.held_upper_bound, job.held))


def _why_nothing(pool: PoolState, job: PoolJob) -> str:
    if what := too_large_for(pool, job):
        return f"larger than {what} at its smallest size"
    ahead = [j.request.name for j in pool.jobs.values() if any(j.target)]
    return f"waits its turn ({pool.settings.policy}): {', '.join(ahead) or 'nobody'} first"


def _doubt(pool: PoolState, state: State | None) -> str:
    """Return how old a job's profile is, and whether a busy machine measured it."""
    if state is None or state.preparation.profile is None:
        return ""
    at_s = state.preparation.profile_at_s
    age = f" of {duration(max(0.0, pool.now_s - at_s))} ago" if at_s else ""
    return age + remark(state.preparation.profile)


def _why_so_much(pool: PoolState, job: PoolJob, state: State | None) -> str:
    jobs = [j for j in pool.jobs.values() if pool.takes_part(j)]
    size = sum(job.target)
    if size < pool.settings.limits.max_vms:
        if size >= job.request.limits.max_vms:
            return f"its own resources.max_vms is {size}"
        if job.rate(job.target) >= job.best * (1 - 1e-6):
            return f"more VMs would train it no faster, by its profile{_doubt(pool, state)}"
    if len(jobs) == 1:
        return "it has the pool for itself"
    weights = sum(j.request.weight for j in jobs)
    return (
        f"{pool.settings.policy}: priority {job.request.weight:g} of {weights:g} in "
        f"{len(jobs)} jobs"
    )
