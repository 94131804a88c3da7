"""Why a job is not taken into a pool: what cannot be promised is refused at once."""

from __future__ import annotations

import math

import numpy as np

from spottrain.errors import ConfigError
from spottrain.pricing.sharing.filling import ContestProgram
from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.core.contests import contest_of
from spottrain.varuna_manager.pool.core.model import (
    JobRequest,
    PoolJob,
    PoolJobPhase,
    PoolState,
    RefusalKind,
    Refuse,
)

_TOLERANCE = 1e-6


def objection(state: PoolState, request: JobRequest) -> Refuse | None:
    """Return why a job cannot be taken; None if it can."""
    reason, kind = _objection(state, request)
    return Refuse(job=request.name, reason=reason, kind=kind) if reason else None


def _objection(state: PoolState, request: JobRequest) -> tuple[str, RefusalKind]:
    """Return why a job cannot be taken, empty if it can, and what is wrong."""
    if reason := _wrong(state, request):
        return reason, "request"
    none = (0,) * len(state.supplies)
    job = PoolJob(
        request=request,
        arrived_s=state.now_s,
        heard_s=state.now_s,
        target=none,
        granted=none,
        may_hold=none,
        held=none,
    )
    try:
        _, fitting = contest_of(state, [job])
    except ConfigError as error:
        return str(error), "request"
    if not fitting:
        reason = (
            f"{request.name}: larger than the pool at its smallest size; give it a "
            "smaller one, or enlarge the pool"
        )
        return reason, "capacity"
    return _too_late(state, job) or _too_dear(state, job) or "", "limits"


def _wrong(state: PoolState, request: JobRequest) -> str:
    """Return what is wrong with a request whatever the pool has."""
    known = state.jobs.get(request.name)
    if state.is_closed:
        return f"{request.name}: the pool is being taken down; submit it to another"
    if known is not None and known.phase is not PoolJobPhase.ENDED:
        return f"{request.name}: the pool has a job of that name; give it another name"
    if request.team and request.team not in state.settings.teams:
        teams = ", ".join(state.settings.teams) or "none"
        return f"{request.name}: team: got {request.team}; the pool has {teams}"
    if len(request.throughputs) != len(state.supplies):
        return (
            f"{request.name}: throughputs: got {len(request.throughputs)}; give one for "
            f"each of the {len(state.supplies)} kinds of VM"
        )
    return ""


def _too_late(state: PoolState, job: PoolJob) -> str | None:
    """Return why a deadline cannot be promised beside those that have been."""
    request = job.request
    if request.deadline_s == math.inf:
        return None
    others = [j for j in state.jobs.values() if state.takes_part(j)]
    contest, promised = contest_of(state, others)
    floor = ContestProgram(contest).floors() if promised else np.zeros(0)
    contest, fitting = contest_of(state, [*promised, job])
    program, m = ContestProgram(contest), len(fitting) - 1
    floor = np.append(floor, 0.0)
    slope = np.zeros(len(fitting))
    slope[m] = 1.0
    best, _ = program.highest(slope * 0, slope, floor)
    needed_s = request.examples / max(best * contest.best[m], 1e-9)
    given_s = request.deadline_s - state.now_s
    if given_s >= needed_s * (1 - _TOLERANCE):
        return None
    return (
        f"{request.name}: deadline: got {given_s / HOUR_S:.4g} h from now; beside the "
        f"deadlines that were promised the pool needs {needed_s / HOUR_S:.4g} h; allow that, "
        "or enlarge the pool"
    )


def _too_dear(state: PoolState, job: PoolJob) -> str | None:
    """Return why a job's money is less than its work costs at today's lowest price."""
    cap = min(job.request.limits.max_microusd, state.settings.limits.max_microusd)
    least = min(
        supply.microusd_per_hour * n / (rate * HOUR_S)
        for supply, table in zip(state.supplies, job.request.throughputs, strict=True)
        for n, rate in table
        if rate > 0
    )
    cost = least * job.request.examples
    if cost <= cap:
        return None
    return (
        f"{job.request.name}: budget: got {cap / 1e6:.2f} USD; its work costs at least "
        f"{cost / 1e6:.2f} USD at today's prices; allow that, or give it less to do"
    )
