"""What managers are told: VMs and dollars until a time, within what others may still hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.core.decide import renewal_s
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    Limits,
    PoolJob,
    PoolState,
    Vms,
)


def regrant(state: PoolState) -> tuple[PoolState, tuple[Grant, ...]]:
    """Return the state with grants on their way to the targets, and what managers are told."""
    grants = []
    names = [name for name, job in state.jobs.items() if _is_open(state, job)]
    names.sort(key=lambda name: _grows(state.jobs[name]))
    free = _free(state)
    for name in names:
        job = state.jobs[name]
        vms = _within(state, job, free)
        wanted = _affordable(state, job, vms)
        if wanted is None:
            continue
        until_s, allowance = wanted
        if until_s <= state.now_s:
            vms = (0,) * len(vms)
        resized = vms != job.granted
        has_less = job.is_short or not any(job.granted)
        begins = has_less and job.rate(vms) > job.rate(job.granted)
        before = _counts(job)
        job = replace(
            job,
            granted=vms,
            until_s=until_s,
            serial=job.serial + 1,
            allowance=allowance,
            may_hold=tuple(map(max, job.may_hold, vms)),
            may_until_s=max(job.may_until_s, until_s),
            may_spend=max(job.may_spend, allowance),
            heard_s=job.heard_s if any(job.may_hold) else state.now_s,
            resized_s=state.now_s if resized else job.resized_s,
            began_s=state.now_s if begins else job.began_s,
        )
        state = state.with_job(job)
        after = _counts(job)
        free = [f + b - a for f, b, a in zip(free, before, after, strict=True)]
        grants.append(
            Grant(
                job=name,
                serial=job.serial,
                vms=vms,
                until_s=until_s,
                allowance=allowance,
            )
        )
    return state, tuple(grants)


def _is_open(state: PoolState, job: PoolJob) -> bool:
    """Return whether a job's grant could be another now."""
    if job.target != job.granted or state.now_s >= renewal_s(state, job):
        return any(job.target) or any(job.granted)
    return job.rate(job.granted) <= 0 and any(job.granted)


def _grows(job: PoolJob) -> tuple[bool, bool, float]:
    """Return the order of grants: who shrinks, who has nothing, who has waited longest."""
    more = any(t > g for t, g in zip(job.target, job.granted, strict=True))
    return (more, any(job.granted), -(job.due_s - job.got_s))


def _within(state: PoolState, job: PoolJob, free: list[int]) -> Vms:
    """Return as much of a job's target as what others may hold leaves room for.

    A size is granted whole or not at all if the job would train no more with a part of it.
    """
    vms = tuple(map(min, job.granted, job.target))
    caps = [*_shared_caps(state, job), (job.request.limits, [])]
    for k, wanted in enumerate(job.target):
        for n in range(wanted, vms[k], -1):
            larger = (*vms[:k], n, *vms[k + 1 :])
            if n > job.may_hold[k] + free[k] or not _fits(state, job, larger, caps):
                continue
            if job.rate(larger) > job.rate(vms):
                vms = larger
                break
    return vms if job.rate(vms) > 0 else (0,) * len(vms)


def _counts(job: PoolJob) -> Vms:
    """Return the VMs of each supply that count as a job's: what it holds or may hold."""
    return tuple(map(max, job.may_hold, job.held))


def _free(state: PoolState) -> list[int]:
    """Return the VMs of each supply that nobody may hold."""
    free = [supply.vms for supply in state.supplies]
    for job in state.jobs.values():
        free = [f - n for f, n in zip(free, _counts(job), strict=True)]
    return free


def _shared_caps(
    state: PoolState, job: PoolJob
) -> Iterator[tuple[Limits, list[PoolJob]]]:
    """Yield the caps of pool and team that bind a job, with the other jobs that they count."""
    others = [j for j in state.jobs.values() if j.request.name != job.request.name]
    yield state.settings.limits, others
    team = job.request.team
    yield state.team(job).limits, [j for j in others if j.request.team == team]


def _fits(
    state: PoolState, job: PoolJob, vms: Vms, caps: list[tuple[Limits, list[PoolJob]]]
) -> bool:
    """Return whether a job may hold VMs beside what it and others may hold already."""
    own = tuple(map(max, job.may_hold, vms))
    for limits, others in caps:
        if limits == Limits():
            continue
        held = [own, *map(_counts, others)]
        if sum(map(sum, held)) > limits.max_vms:
            return False
        rate = sum(state.microusd_per_hour(each) for each in held)
        if rate > limits.max_microusd_per_hour:
            return False
    return True


def _affordable(state: PoolState, job: PoolJob, vms: Vms) -> tuple[float, int] | None:
    """Return until when VMs are granted, and the job's allowance in micro-dollars.

    Returns:
        None if the last grant stays as it is.
    """
    settings, now_s = state.settings, state.now_s
    if not any(vms):
        return (now_s, job.spent) if any(job.granted) else None
    renews = now_s >= renewal_s(state, job)
    if vms == job.granted and not renews:
        return None
    left = job.request.limits.max_microusd
    for limits, others in _shared_caps(state, job):
        if limits.max_microusd < math.inf:
            by_others = sum(j.committed_now for j in others)
            left = min(left, limits.max_microusd - by_others + job.spent_before)
    per_hour = state.microusd_per_hour(tuple(map(max, job.may_hold, vms)))
    for_s = settings.grant_s
    wanted = job.spent + math.ceil(per_hour * for_s / HOUR_S)
    if wanted > left:
        for_s = (left - job.spent) * HOUR_S / per_hour
        wanted = math.floor(left)
    if for_s < settings.shortest_grant_s:
        if now_s < job.until_s and vms == job.granted:
            return None  # it ends by itself
        return (now_s, job.spent) if any(job.granted) else None
    until_s = now_s + for_s
    if vms == job.granted and until_s <= job.until_s + settings.shortest_grant_s:
        return None
    return until_s, wanted
