"""Why a job is not taken into a pool: what cannot be promised is refused at once."""

from __future__ import annotations

import math
from dataclasses import replace

from spottrain.errors import ConfigError
from spottrain.units import HOUR_S
from spottrain.varuna_manager.format import duration
from spottrain.varuna_manager.pool.core.demands import (
    admitted_deadline_s,
    problem_of,
    too_large_for,
)
from spottrain.varuna_manager.pool.core.model import (
    JobRequest,
    PoolJob,
    PoolJobPhase,
    PoolState,
    RefusalKind,
    Refuse,
)
from spottrain.varuna_manager.pool.core.sizes import reserved_vms

_TOLERANCE = 1e-6
_WITHIN = 0.005
"""How exactly the deadline is found that would do."""
_LONGEST_S = 1e9
_LOOKS = 64
"""Times that a promise is looked at again before the last deadline."""


def objection(state: PoolState, request: JobRequest) -> Refuse | None:
    """Return why a job cannot be taken; None if it can."""
    reason, kind = _objection(state, request)
    return Refuse(job=request.name, reason=reason, kind=kind) if reason else None


def _objection(state: PoolState, request: JobRequest) -> tuple[str, RefusalKind]:
    """Return why a job cannot be taken, empty if it can, and what is wrong."""
    if reason := _wrong(state, request):
        return reason, "request"
    job = state.new_job(request)
    try:
        problem_of(state, [job])
    except ConfigError as error:
        return str(error), "request"
    if what := too_large_for(state, job):
        reason = (
            f"{request.name}: larger than {what} at its smallest size; give it a "
            f"smaller one, or {'enlarge the pool' if what == 'the pool' else 'raise them'}"
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
    promised = _promised(state)
    late = _late(state, promised)  # by faults; that is no reason to refuse
    given_s = request.deadline_s - state.now_s

    def breaks(after_s: float) -> bool:
        later = replace(request, deadline_s=state.now_s + after_s)
        # Its own, with changes of size to spare: these have not been needed yet.
        tight = replace(later, deadline_s=later.deadline_s - 2 * later.morph_s)
        tried = [*promised, replace(job, request=tight)]
        return not late >= _late(state, tried)

    if not breaks(given_s):
        return None
    low_s, high_s = given_s, max(given_s, request.examples / job.best)
    while breaks(high_s):
        low_s, high_s = high_s, 2 * high_s
        if high_s > _LONGEST_S:
            return (
                f"{request.name}: deadline: no time is enough beside the deadlines that "
                "were promised; enlarge the pool, or leave it out"
            )
    while high_s - low_s > high_s * _WITHIN:
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if breaks(middle_s) else (low_s, middle_s)
    return (
        f"{request.name}: deadline: got {duration(given_s)} from now; beside the deadlines "
        f"that were promised the pool needs {duration(60 * math.ceil(high_s / 60))}; "
        "allow that, or enlarge the pool"
    )


def idle_for_s(state: PoolState, job: PoolJob, asked_s: float) -> float:
    """Return for how long a job may train nothing: as long as it asks, or not at all.

    Not if a deadline that was promised, its own or another's, would not be kept, or only with what
    is kept in reserve for changes of size. The job keeps its VMs, or the room for them, meanwhile.
    """
    if asked_s <= job.idle_s or job.request.deadline_s == math.inf:
        return asked_s
    others = [one for one in _promised(state) if one.request.name != job.request.name]
    tight = []
    for one in (*others, replace(job, idle_s=asked_s)):
        deadline_s = state.now_s + admitted_deadline_s(state, one.request)
        tight.append(replace(one, request=replace(one.request, deadline_s=deadline_s)))
    return 0.0 if _late(state, tight) else asked_s


def _promised(state: PoolState) -> list[PoolJob]:
    """Return the jobs with deadlines that the pool has room for."""
    promised = [
        each
        for each in state.jobs.values()
        if state.takes_part(each) and each.request.deadline_s < math.inf
    ]
    return problem_of(state, promised)[1]


def _late(state: PoolState, jobs: list[PoolJob]) -> frozenset[str]:
    """Return which of the jobs would be late if each had only what promises need.

    The rule that gives out VMs is followed in time, without anybody else. A job that may train
    nothing for a while does so first.
    """
    now_s = state.now_s
    idle_until_s = {job.request.name: now_s + job.idle_s for job in jobs}
    late: set[str] = set()
    while any(job.request.name not in late for job in jobs) and now_s < math.inf:
        problem, jobs = problem_of(replace(state, now_s=now_s), jobs)
        sizes = reserved_vms(problem, jobs)
        rates = [job.rate(size) for job, size in zip(jobs, sizes, strict=True)]
        lost_s = [
            max(0.0, idle_until_s[job.request.name] - now_s)
            + (job.request.morph_s if any(job.granted) and job.granted != size else 0.0)
            for job, size in zip(jobs, sizes, strict=True)
        ]
        lasts_s = min(
            lost + (job.request.examples - job.examples_done) / rate if rate else math.inf
            for job, rate, lost in zip(jobs, rates, lost_s, strict=True)
        )
        # Who has trained nothing for a while needs more from then on.
        lasts_s = min([lasts_s, *(end - now_s for end in idle_until_s.values() if end > now_s)])
        last_s = max(now_s, *(job.request.deadline_s for job in jobs))
        if any(r < n * (1 - 1e-9) for r, n in zip(rates, problem.needed, strict=True)):
            # Who is behind gets more once others are ahead.
            again_s = max(state.settings.min_stay_s, (last_s - now_s) / _LOOKS)
            lasts_s = min(lasts_s, again_s)
        now_s += lasts_s
        going_on = []
        for job, size, rate, lost in zip(jobs, sizes, rates, lost_s, strict=True):
            done = job.examples_done + rate * max(0.0, lasts_s - lost)
            is_over = done >= job.request.examples * (1 - _TOLERANCE)
            if now_s > job.request.deadline_s:
                late.add(job.request.name)
            if not is_over:
                going_on.append(replace(job, examples_done=done, granted=size))
        jobs = going_on
    return frozenset(late)


def _too_dear(state: PoolState, job: PoolJob) -> str | None:
    """Return why a job's money is less than its work costs at today's lowest price, or than
    the smallest grant."""
    request, settings = job.request, state.settings
    is_monthly, jobs = settings.budget_per == "month", state.jobs.values()
    team = [one for one in jobs if one.request.team == request.team]
    caps = [("budget", request.limits.max_microusd, False)]
    for whose, limits, members in (
        ("budget of the pool", settings.limits, jobs),
        (f"budget of team {request.team}", state.team(job).limits, team),
    ):
        spent = 0 if is_monthly else sum(one.spent for one in members)
        caps.append((whose, limits.max_microusd - spent, is_monthly))
    pairs = zip(state.supplies, request.throughputs, strict=True)
    sizes = [(s.microusd_per_hour * n, rate) for s, table in pairs for n, rate in table]
    cost = min(price / rate for price, rate in sizes if rate > 0) * request.examples
    begin = min(price for price, _ in sizes) * settings.shortest_grant_s
    for whose, cap, renews in caps:
        needed = begin if renews else max(begin, cost)
        if needed / HOUR_S > cap:
            what = "to begin costs" if needed == begin else "its work costs at least"
            return (
                f"{request.name}: {whose}: got {_usd(max(0.0, cap))} USD; {what} "
                f"{_usd(needed / HOUR_S)} USD at today's prices; allow that, or give it "
                "less to do"
            )
    return None


def _usd(microusd: float) -> str:
    return f"{microusd / 1e6:.2f}" if microusd >= 1e4 else f"{microusd / 1e6:.6f}"
