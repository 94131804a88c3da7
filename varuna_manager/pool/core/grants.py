"""What managers are told: VMs and dollars until a time, within what others may still hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.core.decide import decided, renewal_s
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    Hand,
    HandedOver,
    Limits,
    PoolJob,
    PoolJobPhase,
    PoolState,
    Promise,
    Vms,
)

ENDING_S = 60.0
"""A job that ends so soon is told who gets its VMs then."""


def regrant(state: PoolState) -> tuple[PoolState, tuple[Grant, ...]]:
    """Return the state with grants on their way to the targets, and what managers are told."""
    grants = []
    hands = wanted_hands(state)
    names = [
        name
        for name, job in state.jobs.items()
        if _is_open(state, job) or _is_other(hands.get(name, job.hands), job.hands)
    ]
    names.sort(key=lambda name: _grows(state.jobs[name]))
    free = _free(state)
    for name in names:
        job = state.jobs[name]
        vms = _within(state, job, free)
        wanted = _affordable(state, job, vms)
        if wanted is None:
            if not _is_other(hands.get(name, job.hands), job.hands):
                continue
            wanted = job.until_s, job.allowance
        until_s, allowance = wanted
        if until_s <= state.now_s:
            vms = (0,) * len(vms)
        resized = vms != job.granted
        before = job.counts
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
            hands=hands.get(name, ()),
            may_hand=(*job.may_hand, *hands.get(name, ())),
        )
        state = state.with_job(job)
        free = [f + b - a for f, b, a in zip(free, before, job.counts, strict=True)]
        grants.append(last_grant(job))
    return state, tuple(grants)


def last_grant(job: PoolJob) -> Grant:
    """Return what a job was told last."""
    return Grant(
        job=job.request.name,
        serial=job.serial,
        vms=job.granted,
        until_s=job.until_s,
        allowance=job.allowance,
        hands=job.hands,
        arriving=job.arriving,
    )


def with_arriving(state: PoolState) -> PoolState:
    """Return the state with what is on its way to each job, as givers and receivers say."""
    arriving: dict[str, list[HandedOver]] = {}
    promised: dict[str, list[Promise]] = {}
    coming: Counter[str] = Counter()
    for name, giver in state.jobs.items():
        given = Counter((one.serial, one.supply, one.to) for one in giver.handed)
        for hand in giver.may_hand:
            left = hand.number - given[hand.serial, hand.supply, hand.to]
            left = min(left, giver.counts[hand.supply])
            if left > 0:
                promise = Promise(by=name, supply=hand.supply, number=left)
                promised.setdefault(hand.to, []).append(promise)
                coming[hand.to] += _reserve(state, hand.supply) * left
        for one in giver.handed:
            receiver = state.jobs.get(one.to)
            if receiver is not None and one.intent not in receiver.received:
                arriving.setdefault(one.to, []).append(one)
                coming[one.to] += _reserve(state, one.supply)
    for name, job in state.jobs.items():
        on_way = tuple(arriving.get(name, ())), tuple(promised.get(name, ()))
        if (job.arriving, job.promised, job.coming) != (*on_way, coming[name]):
            job = replace(
                job, arriving=on_way[0], promised=on_way[1], coming=coming[name]
            )
            state = state.with_job(job)
    return state


def _reserve(state: PoolState, supply: int) -> int:
    """Return what a VM may cost that is given to a job which is granted nothing for it: its
    manager, or else the VM by its lease, ends that."""
    rate = state.supplies[supply].microusd_per_hour
    return math.ceil(rate * 2 * state.settings.shortest_grant_s / HOUR_S)


def wanted_hands(state: PoolState) -> dict[str, tuple[Hand, ...]]:
    """Return where the VMs of jobs go that shrink, or will soon have ended.

    A job that is left out shrinks still, as it was told before.
    """
    needs = {name: _needs(job) for name, job in state.jobs.items()}
    found: dict[str, tuple[Hand, ...]] = {}
    for name, job in state.jobs.items():
        if not job.request.machine or not any(job.granted):
            continue
        gives = [max(0, g - t) for g, t in zip(job.granted, job.target, strict=True)]
        if any(gives):
            found[name] = tuple(_shared_out(state, job, gives, needs))
        elif any(h > g for h, g in zip(job.held, job.granted, strict=True)):
            continue
        elif _is_ending(state, job):
            after = _needs_without(state, name)
            found[name] = tuple(_shared_out(state, job, list(job.granted), after))
        else:
            found[name] = ()
    return found


def _is_other(new: tuple[Hand, ...], old: tuple[Hand, ...]) -> bool:
    return new != tuple(replace(one, serial=new[0].serial if new else 0) for one in old)


def _needs(job: PoolJob, by: str = "") -> list[int]:
    """Return the VMs of each supply that a job is to have beside those that it may have.

    Args:
        job: The job.
        by: A job whose promises do not count.
    """
    have = list(map(max, job.granted, job.counts))
    for promise in job.promised:
        have[promise.supply] += promise.number * (promise.by != by)
    return [max(0, t - n) for t, n in zip(job.target, have, strict=True)]


def _needs_without(state: PoolState, name: str) -> dict[str, list[int]]:
    """Return what jobs will need once one of them has ended."""
    job = state.jobs[name]
    over = replace(job, phase=PoolJobPhase.ENDED)
    after = decided(state.with_job(over))
    jobs = after.jobs.items()
    return {other: _needs(one, name) for other, one in jobs if other != name}


def _is_ending(state: PoolState, job: PoolJob) -> bool:
    rate = job.rate(job.held)
    left = job.request.examples - job.examples_done
    return rate > 0 and left / rate <= ENDING_S and state.takes_part(job)


def _shared_out(
    state: PoolState, job: PoolJob, gives: list[int], needs: dict[str, list[int]]
) -> Iterator[Hand]:
    """Yield what goes to whom, and take it from what they need."""
    receivers = [
        other
        for other in state.jobs.values()
        if other.request.machine == job.request.machine
        and other is not job
        and state.takes_part(other)
    ]
    receivers.sort(key=_grows)
    for k in range(len(gives)):
        for other in receivers:
            need = needs.get(other.request.name)
            number = min(gives[k], need[k]) if need else 0
            number = min(number, _paid_for(state, other, k))
            number = next(
                (n for n in range(number, 0, -1) if _may_get(state, job, other, k, n)),
                0,
            )
            if need and number > 0:
                gives[k] -= number
                need[k] -= number
                serial = job.serial + 1
                name = other.request.name
                yield Hand(supply=k, to=name, number=number, serial=serial)


def _may_get(
    state: PoolState, job: PoolJob, other: PoolJob, supply: int, number: int
) -> bool:
    """Return whether another job may get VMs of a job within its team's caps and its own."""
    size = list(other.counts)
    size[supply] += number
    caps = [(state.team(other).limits, _team_mates(state, other))]
    caps = [one for one in caps if not any(mate is job for mate in one[1])]
    own = [p for p in other.promised if p.by != job.request.name]
    given = replace(other, promised=tuple(own))
    return _fits(state, given, tuple(size), [*caps, (other.request.limits, [])])


def _team_mates(state: PoolState, job: PoolJob) -> list[PoolJob]:
    team, name = job.request.team, job.request.name
    return [
        one
        for one in state.jobs.values()
        if one.request.team == team and one.request.name != name
    ]


def _paid_for(state: PoolState, job: PoolJob, supply: int) -> int:
    """Return how many VMs more could be given to a job within the dollars of pool and team."""
    left = job.request.limits.max_microusd - job.committed
    for limits, others in _shared_caps(state, job):
        if limits.max_microusd < math.inf:
            by_all = sum(j.committed_now for j in [*others, job])
            left = min(left, limits.max_microusd - by_all)
    rate = _reserve(state, supply)
    return int(min(max(0.0, left) / max(rate, 1), 1e6))


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
            if n > job.counts[k] + free[k] or not _fits(state, job, larger, caps):
                continue
            if job.rate(larger) > job.rate(vms):
                vms = larger
                break
    return vms if job.rate(vms) > 0 else (0,) * len(vms)


def _free(state: PoolState) -> list[int]:
    """Return the VMs of each supply that nobody may hold."""
    free = [supply.vms for supply in state.supplies]
    for job in state.jobs.values():
        free = [f - n for f, n in zip(free, job.counts, strict=True)]
    return free


def _shared_caps(
    state: PoolState, job: PoolJob
) -> Iterator[tuple[Limits, list[PoolJob]]]:
    """Yield the caps of pool and team that bind a job, with the other jobs that they count."""
    others = [j for j in state.jobs.values() if j.request.name != job.request.name]
    yield state.settings.limits, others
    yield state.team(job).limits, _team_mates(state, job)


def _fits(
    state: PoolState, job: PoolJob, vms: Vms, caps: list[tuple[Limits, list[PoolJob]]]
) -> bool:
    """Return whether a job may hold VMs beside what it and others may hold already."""
    own = tuple(map(max, job.counts, vms))
    for limits, others in caps:
        if limits == Limits():
            continue
        held = [own, *(other.counts for other in others)]
        held.append(_promised_from_outside(state, [job, *others]))
        if sum(map(sum, held)) > limits.max_vms:
            return False
        rate = sum(state.microusd_per_hour(each) for each in held)
        if rate > limits.max_microusd_per_hour:
            return False
    return True


def _promised_from_outside(state: PoolState, group: list[PoolJob]) -> Vms:
    """Return the VMs that jobs of a group may still get from jobs that are not in it."""
    found, names = [0] * len(state.supplies), {job.request.name for job in group}
    for job in group:
        for promise in job.promised:
            found[promise.supply] += promise.number * (promise.by not in names)
    return tuple(found)


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
