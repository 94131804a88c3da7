"""Why a job is not taken into a pool: what cannot be promised is refused at once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from spottrain.errors import ConfigError
from spottrain.pricing.sharing.filling import ContestProgram
from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.core.contests import (
    RESERVE,
    RESERVED_MORPHS,
    contest_of,
    promised_s,
)
from spottrain.varuna_manager.pool.core.model import JobRequest, PoolJob, PoolState
from spottrain.varuna_manager.pool.core.sizes import promised_vms

_TOLERANCE = 1e-6
_STRETCHES = (1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10)
"""Of a deadline that is too early by whole VMs only, to find one that would do."""
_LOOKS = 64
"""Times that a promise is looked at again before the last deadline."""


def objection(state: PoolState, request: JobRequest) -> str | None:
    """Return why a job cannot be taken; None if it can."""
    if state.is_closed:
        return f"{request.name}: the pool is being taken down; submit it to another"
    if request.name in state.jobs:
        return f"{request.name}: the pool has a job of that name; give it another name"
    if request.team and request.team not in state.settings.teams:
        known = ", ".join(state.settings.teams) or "none"
        return f"{request.name}: team: got {request.team}; the pool has {known}"
    if len(request.throughputs) != len(state.supplies):
        return (
            f"{request.name}: throughputs: got {len(request.throughputs)} for "
            f"{len(state.supplies)} kinds of VM; give one for each"
        )
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
        return str(error)
    if not fitting:
        return (
            f"{request.name}: larger than the pool at its smallest size; give it a "
            "smaller one, or enlarge the pool"
        )
    return _too_late(state, job) or _too_dear(state, job)


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
    if promised_s(state, request) >= needed_s * (1 - _TOLERANCE):
        if not _breaks(state, promised, job):
            return None
        stretched = (
            replace(job, request=replace(request, deadline_s=state.now_s + given_s * f))
            for f in _STRETCHES
        )
        enough = (j for j in stretched if not _breaks(state, promised, j))
        if (longer := next(enough, None)) is None:
            return (
                f"{request.name}: deadline: the pool's whole VMs are promised to others"
            )
        needed_s = longer.request.deadline_s - state.now_s
    else:
        needed_s = (needed_s + RESERVED_MORPHS * request.morph_s) / (1 - RESERVE)
    return (
        f"{request.name}: deadline: got {given_s / HOUR_S:.4g} h from now; beside the "
        f"deadlines that were promised the pool needs {needed_s / HOUR_S:.4g} h; allow that, "
        "or enlarge the pool"
    )


def _breaks(state: PoolState, promised: list[PoolJob], job: PoolJob) -> bool:
    """Return whether a job's deadline breaks a promise, its own included, on whole VMs."""
    others = [each for each in promised if each.request.deadline_s < math.inf]
    return _is_late(state, [*others, job]) and not _is_late(state, others)


def _is_late(state: PoolState, jobs: list[PoolJob]) -> bool:
    """Return whether one of the jobs would be late if each had only what promises need.

    The rule that gives out VMs is followed in time, without anybody else.
    """
    now_s = state.now_s
    while jobs:
        contest, jobs = contest_of(replace(state, now_s=now_s), jobs)
        sizes = promised_vms(contest, jobs)
        rates = [job.rate(size) for job, size in zip(jobs, sizes, strict=True)]
        lost_s = [
            job.request.morph_s if any(job.granted) and job.granted != size else 0.0
            for job, size in zip(jobs, sizes, strict=True)
        ]
        lasts_s = min(
            lost + (job.request.examples - job.examples_done) / rate
            if rate
            else math.inf
            for job, rate, lost in zip(jobs, rates, lost_s, strict=True)
        )
        last_s = max(job.request.deadline_s for job in jobs)
        if any(r < n * (1 - 1e-9) for r, n in zip(rates, contest.needed, strict=True)):
            # Who is behind gets more once others are ahead.
            again_s = max(state.settings.min_stay_s, (last_s - now_s) / _LOOKS)
            lasts_s = min(lasts_s, again_s)
        now_s += lasts_s
        going_on = []
        for job, size, rate, lost in zip(jobs, sizes, rates, lost_s, strict=True):
            done = job.examples_done + rate * max(0.0, lasts_s - lost)
            is_over = done >= job.request.examples * (1 - _TOLERANCE)
            if now_s > job.request.deadline_s:
                return True
            if not is_over:
                going_on.append(replace(job, examples_done=done, granted=size))
        jobs = going_on
    return False


def _too_dear(state: PoolState, job: PoolJob) -> str | None:
    """Return why a job's money is less than its work costs at today's lowest price."""
    cap = job.request.limits.max_microusd
    if state.settings.budget_per == "life":
        cap = min(cap, state.settings.limits.max_microusd)
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
