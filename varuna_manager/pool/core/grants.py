"""What managers are told: VMs and dollars until a time, within what others may still hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from spottrain.eventlog.changed import replace
from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.core.decide import renewal_s
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    Limits,
    Order,
    PoolJob,
    PoolState,
    Vms,
)


def regrant(state: PoolState) -> tuple[PoolState, tuple[Grant, ...]]:
    """Return the state with grants on their way to the targets, and what managers are told."""
    grants = []
    names = sorted(state.jobs, key=lambda name: _grows(state.jobs[name]))
    # Then those again that keep what others have been granted just now.
    keepers = [name for name in names if state.jobs[name].kept]
    for name in (*names, *keepers):
        job = state.jobs[name]
        if not _is_open(state, job):
            continue
        vms, orders = _within(state, job)
        wanted = _affordable(state, job, vms)
        reservation_s = reservation_ttl_s(state, job)
        if wanted is None:
            if not _reservation_changed(state, job):
                continue
            wanted, vms, orders = (job.until_s, job.allowance), job.granted, job.orders
        until_s, allowance = wanted
        if until_s <= state.now_s:
            vms, orders = (0,) * len(vms), job.orders
        resized = vms != job.granted
        has_less = job.is_short or not any(job.granted)
        # While it goes from one kind to another it is granted nothing, and holds what it had.
        had = max(job.rate(job.granted), job.rate(job.held))
        begins = has_less and job.rate(vms) > had
        job = replace(
            job,
            granted=vms,
            orders=orders,
            reservation_s=reservation_s,
            until_s=until_s,
            serial=job.serial + 1,
            allowance=allowance,
            held_upper_bound=tuple(map(max, job.held_upper_bound, rented(vms, orders))),
            until_upper_bound_s=max(job.until_upper_bound_s, until_s),
            spend_upper_bound=max(job.spend_upper_bound, allowance),
            heard_s=job.heard_s if job.runs else state.now_s,
            resized_s=state.now_s if resized else job.resized_s,
            began_s=state.now_s if begins else job.began_s,
        )
        state = state.with_job(job)
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
        orders=job.orders,
        reservation_s=job.reservation_s,
        idle_s=job.idle_s,
    )


def rented(vms: Vms, orders: Iterable[Order]) -> Vms:
    """Return VMs without those that are taken from other jobs."""
    left = list(vms)
    for order in orders:
        left[order.supply] -= left[order.supply] > 0
    return tuple(left)


def _is_open(state: PoolState, job: PoolJob) -> bool:
    """Return whether a job's grant could be another now."""
    if job.target != job.granted or state.now_s >= renewal_s(state, job):
        return any(job.target) or any(job.granted)
    if _reservation_changed(state, job):
        return True
    return job.rate(job.granted) <= 0 and any(job.granted)


def _reservation_changed(state: PoolState, job: PoolJob) -> bool:
    """Return whether a job with VMs is to keep them for others for another time now."""
    has_some = any(job.granted) or bool(job.kept)
    return has_some and reservation_ttl_s(state, job) != job.reservation_s


def _grows(job: PoolJob) -> tuple[bool, bool, float]:
    """Return the order of grants: who shrinks, who has nothing, who has waited longest."""
    more = any(t > g for t, g in zip(job.target, job.granted, strict=True))
    return (more, any(job.granted), -(job.entitled_s - job.received_s))


def _within(state: PoolState, job: PoolJob) -> tuple[Vms, tuple[Order, ...]]:
    """Return as much of a job's target as what others may hold leaves room for, and the
    orders among it.

    A size is granted whole or not at all if the job would train no more with a part of it.
    VMs that others keep come before those of the cloud.
    """
    vms, orders = tuple(map(min, job.granted, job.target)), job.orders
    for k, wanted in enumerate(job.target):
        kept = _takable(state, job, k) if wanted > vms[k] else []
        for n in range(wanted, vms[k], -1):
            larger = (*vms[:k], n, *vms[k + 1 :])
            new = (*orders, *kept[: max(0, n - job.granted[k])])
            if job.rate(larger) > job.rate(vms) and _fits(state, job, larger, new, k):
                vms, orders = larger, new
                break
    return (vms if job.rate(vms) > 0 else (0,) * len(vms)), orders


def _takable(state: PoolState, job: PoolJob, supply: int) -> list[Order]:
    """Return orders for VMs of a supply that other jobs keep, and that nobody may take."""
    if not job.request.machine:
        return []
    ordered = _ordered(state)
    return [
        Order(
            serial=job.serial + 1,
            vm_id=vm.vm_id,
            supply=supply,
            by=name,
            until_s=state.now_s + state.settings.take_s,
        )
        for name, other in state.jobs.items()
        if other is not job and other.request.machine == job.request.machine
        for vm in other.kept
        if vm.supply == supply and vm.vm_id not in ordered | job.refused
    ]


def reservation_ttl_s(state: PoolState, job: PoolJob) -> float:
    """Return for how long a job is to keep what it returns: not if nobody has use for it, and
    until one that may take some of it has asked or cannot any more."""
    if not job.request.machine:
        return 0.0
    others = [
        other
        for other in state.jobs.values()
        if other is not job
        and other.request.machine == job.request.machine
        and state.takes_part(other)
    ]
    if job.kept:
        ordered = _ordered(state)
        if any(vm.vm_id in ordered for vm in job.kept):
            return state.settings.reservation_s + state.settings.take_s
        is_wanted = any(
            one.target[vm.supply] > one.granted[vm.supply] for vm in job.kept for one in others
        )
    else:
        is_wanted = any(one.rate(one.granted) < one.best for one in others)
    return state.settings.reservation_s if is_wanted else 0.0


def _ordered(state: PoolState) -> frozenset[str]:
    """Return the VMs that are to go from one job to another."""
    orders = (order for job in state.jobs.values() for order in job.orders)
    return frozenset(order.vm_id for order in orders)


def _counts(job: PoolJob, ordered: Collection[str]) -> Vms:
    """Return the VMs of each supply that count as a job's beside those under order: what it
    holds or may hold."""
    if not ordered or not job.kept:
        return tuple(map(max, job.held_upper_bound, job.held))
    held = list(job.held)
    for vm in job.kept:
        held[vm.supply] -= vm.vm_id in ordered
    return tuple(map(max, job.held_upper_bound, held))


def _held(group: Iterable[PoolJob], orders: Collection[Order]) -> list[int]:
    """Return the most VMs of each supply that a group of jobs can hold together.

    A VM under order is held by the job that keeps it or by the one that takes it: it counts
    once where either is in the group.
    """
    ordered = {order.vm_id for order in orders}
    total: list[int] = []
    under: dict[str, int] = {}
    for job in group:
        counts = _counts(job, ordered)
        total = [n + m for n, m in zip(total or [0] * len(counts), counts, strict=True)]
        under |= {order.vm_id: order.supply for order in job.orders}
        under |= {vm.vm_id: vm.supply for vm in job.kept if vm.vm_id in ordered}
    for supply in under.values():
        total[supply] += 1
    return total


def _fits(state: PoolState, job: PoolJob, vms: Vms, orders: tuple[Order, ...], supply: int) -> bool:
    """Return whether a job may hold VMs of a supply more beside what others may hold."""
    held_upper_bound = tuple(map(max, job.held_upper_bound, rented(vms, orders)))
    after = state.with_job(replace(job, held_upper_bound=held_upper_bound, orders=orders))
    jobs = [one for one in after.jobs.values() if one.runs]
    team = [one for one in jobs if one.request.team == job.request.team]
    every = [order for one in jobs for order in one.orders]
    own = [after.jobs[job.request.name]]
    of_all = _held(jobs, every)
    if of_all[supply] > state.supplies[supply].vms:
        return False
    for limits, group in (
        (state.settings.limits, jobs),
        (state.team(job).limits, team),
        (job.request.limits, own),
    ):
        if limits == Limits():
            continue
        held = of_all if group is jobs else _held(group, every)
        if sum(held) > limits.max_vms:
            return False
        if state.microusd_per_hour(tuple(held)) > limits.max_microusd_per_hour:
            return False
    return True


def _shared_caps(state: PoolState, job: PoolJob) -> Iterator[tuple[Limits, list[PoolJob]]]:
    """Yield the caps of pool and team that bind a job, with the other jobs that they count."""
    others = [j for j in state.jobs.values() if j.request.name != job.request.name]
    yield state.settings.limits, others
    team = job.request.team
    yield state.team(job).limits, [j for j in others if j.request.team == team]


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
    per_hour = state.microusd_per_hour(tuple(map(max, job.held_upper_bound, vms)))
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
