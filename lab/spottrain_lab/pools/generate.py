"""Workloads drawn as Gavel describes its own (section 5.7): the same distributions, not the
same jobs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.simulation.workload import Measured, SimulatedJob, gavel_job


def gavel_jobs(
    seed: int,
    count: int,
    *,
    measured: Measured,
    kinds: Sequence[str],
    per_hour: float = math.inf,
    has_several: bool = True,
) -> list[SimulatedJob]:
    """Return jobs of Gavel's distribution.

    Args:
        seed: Of the draws.
        count: Jobs.
        measured: Steps per second.
        kinds: Of the cluster, the fastest first: lengths are those on it.
        per_hour: Arrivals; infinite for all at the start.
        has_several: A quarter of jobs has 2 to 4 workers, one in twenty 8; else all have one.
    """
    draw = random.Random(seed)
    types = sorted({t for kind, t, n in measured if kind == kinds[0] and n == 1})
    jobs: list[SimulatedJob] = []
    at_s = 0.0
    while len(jobs) < count:
        share = draw.random()
        size = 1
        if has_several and share >= 0.7:
            size = draw.choice((2, 4)) if share < 0.95 else 8
        minutes = 10 ** (draw.uniform(1.5, 3) if draw.random() < 0.8 else draw.uniform(3, 4))
        able = [t for t in types if measured.get((kinds[0], t, size), 0.0) > 0]
        job_type = draw.choice(able)
        jobs.append(
            gavel_job(
                f"job{len(jobs)}",
                job_type,
                size=size,
                measured=measured,
                kinds=kinds,
                arrived_s=at_s,
                work=minutes * 60 * measured[kinds[0], job_type, size],
            )
        )
        at_s += draw.expovariate(per_hour / HOUR_S) if per_hour < math.inf else 0.0
    return jobs


def gavel_costs(
    seed: int,
    count: int,
    *,
    measured: Measured,
    kinds: Sequence[str],
    per_hour: float = math.inf,
) -> list[SimulatedJob]:
    """Return jobs as of the cost policies (section 5.7.3): ResNet-50 and A3C with deadlines."""
    draw = random.Random(seed)
    types = sorted({t for kind, t, n in measured if n == 1 and t.startswith(("ResNet-50", "A3C"))})
    resnets = [t for t in types if t.startswith("ResNet-50")]
    jobs: list[SimulatedJob] = []
    at_s = 0.0
    for m in range(count):
        job_type = draw.choice(resnets) if draw.random() < 0.5 else "A3C"
        days, slo = draw.choice((0.5, 1, 2, 4, 8)), draw.choice((1.2, 2.0, 10.0))
        jobs.append(
            gavel_job(
                f"job{m}",
                job_type,
                size=1,
                measured=measured,
                kinds=kinds,
                arrived_s=at_s,
                work=days * 86400 * measured[kinds[0], job_type, 1],
                slo=slo,
            )
        )
        at_s += draw.expovariate(per_hour / HOUR_S) if per_hour < math.inf else 0.0
    return jobs
