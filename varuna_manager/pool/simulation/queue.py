"""VirtualFlow's baseline: a queue by priority of jobs that never change size (section 6.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.core.model import Supply, Vms
from spottrain.varuna_manager.pool.simulation.outcome import JobOutcome, PoolOutcome
from spottrain.varuna_manager.pool.simulation.workload import SimulatedJob


def simulate(supplies: Sequence[Supply], jobs: Iterable[SimulatedJob]) -> PoolOutcome:
    """Return what comes of jobs in a queue by priority that never change size.

    Whoever is first in the queue waits for its VMs, and others behind it; nobody is stopped.
    Each job is on the kind where it trains most.
    """
    vms: Vms = tuple(supply.vms for supply in supplies)
    free = list(vms)
    arriving = sorted(jobs, key=lambda job: job.arrived_s)
    outcomes = [JobOutcome(job) for job in arriving if _kind(job, vms) is not None]
    refused = [job.name for job in arriving if _kind(job, vms) is None]
    coming, waiting = outcomes[::-1], list[JobOutcome]()
    running: list[tuple[float, int, JobOutcome]] = []
    now_s = 0.0
    while coming or running:
        now_s = min(
            coming[-1].job.arrived_s if coming else math.inf,
            min((ends_s for ends_s, _, _ in running), default=math.inf),
        )
        for ended in [each for each in running if each[0] <= now_s]:
            running.remove(ended)
            _, held_kind, one = ended
            free[held_kind] += one.job.size
            one.ended_s = now_s
            one.holds(now_s, (0,) * len(vms))
        while coming and coming[-1].job.arrived_s <= now_s:
            waiting.append(coming.pop())
        waiting.sort(key=lambda one: (-one.job.weight, one.job.arrived_s))
        while waiting and (kind := _kind(waiting[0].job, free)) is not None:
            one = waiting.pop(0)
            free[kind] -= one.job.size
            lasts_s = one.job.work / one.job.throughputs[kind][one.job.size]
            one.started_s = now_s
            held = tuple(one.job.size * (k == kind) for k in range(len(vms)))
            one.holds(now_s, held)
            usd_per_hour = supplies[kind].microusd_per_hour * one.job.size / 1e6
            one.usd = usd_per_hour * lasts_s / HOUR_S
            running.append((now_s + lasts_s, kind, one))
    return PoolOutcome(
        kinds=tuple(supply.name for supply in supplies),
        vms=vms,
        jobs=tuple(outcomes),
        refused=tuple((name, f"{name}: larger than the pool") for name in refused),
    )


def _kind(job: SimulatedJob, free: Sequence[int]) -> int | None:
    rates = [
        (table[job.size], kind)
        for kind, table in enumerate(job.throughputs)
        if table.get(job.size) and free[kind] >= job.size
    ]
    return max(rates)[1] if rates else None
