"""Workloads drawn as the papers describe theirs: the same distributions, not the same jobs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from spottrain.errors import ConfigError
from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.simulation.workload import (
    Measured,
    SimulatedJob,
    Table,
    gavel_job,
)

# --- VirtualFlow, sections 6.1 and 6.4 -------------------------------------------------------

PRIORITIES = (1.0, 5.0, 10.0)
SERVER_VMS = 16
"""Two servers of eight V100 (6.1)."""
MIX: Sequence[tuple[str, Sequence[int], Sequence[int], int]] = (
    ("ResNet-56 cifar10", (64, 128), (1,), 64),
    ("ResNet-50 ImageNet", (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4), 256),
    ("BERT-base CoLA", (8, 16, 32, 64, 128), (1, 2), 8),
    ("BERT-base SST-2", (8, 16, 32, 64, 128), (1, 2), 8),
    ("Transformer WMT", (4096, 8192, 16384, 32768, 65536), (1, 2), 4096),
)
"""Table 3: model, batch sizes, virtual nodes on a GPU; and the batch of a virtual node, with which
the number of GPUs follows (Tables 1 and 2; for the others the smallest batch)."""
MINUTES = (10.0, 60.0)
"""Assumed: lengths are not published, only that jobs are shortened. Uniform, at a job's size."""
DOUBLING = 0.95
"""Assumed: throughput of twice the VMs, over twice the throughput."""


def scaled(most: int) -> Table:
    """Return throughput by VMs, 1 on one."""
    return {n: n * DOUBLING ** math.log2(n) for n in range(1, most + 1)}


def virtualflow_three(seed: int) -> list[SimulatedJob]:
    """Return three jobs as of VirtualFlow's Figure 10, for four VMs of one kind.

    Priorities and sizes are published, lengths and arrivals are not: the second job arrives
    while the first runs and the third while the second does, if nobody changes size.
    """
    draw = random.Random(seed)
    lengths_s = [draw.uniform(*MINUTES) * 60 for _ in range(3)]
    arrivals_s = [
        0.0,
        draw.uniform(0, lengths_s[0]),
        lengths_s[0] + draw.uniform(0, lengths_s[1]),
    ]
    return [
        _job(f"job{m}", at_s, lasts_s, size, weight)
        for m, (at_s, lasts_s, size, weight) in enumerate(
            zip(arrivals_s, lengths_s, (4, 2, 4), PRIORITIES, strict=True)
        )
    ]


def virtualflow_twenty(seed: int, count: int = 20) -> list[SimulatedJob]:
    """Return jobs as of VirtualFlow's Figures 11 and 12, for 16 VMs of one kind.

    Twelve an hour, drawn from Table 3 with priorities of 1, 5 and 10.
    """
    draw = random.Random(seed)
    jobs, at_s = [], 0.0
    for m in range(count):
        _, batches, nodes, of_node = draw.choice(MIX)
        size = draw.choice(batches) // (draw.choice(nodes) * of_node)
        size = min(SERVER_VMS, max(1, size))
        lasts_s = draw.uniform(*MINUTES) * 60
        jobs.append(_job(f"job{m}", at_s, lasts_s, size, draw.choice(PRIORITIES)))
        at_s += draw.expovariate(12 / HOUR_S)
    return jobs


def _job(name: str, at_s: float, lasts_s: float, size: int, weight: float) -> SimulatedJob:
    table = scaled(size)
    return SimulatedJob(
        name=name,
        arrived_s=at_s,
        work=lasts_s * table[size],
        size=size,
        throughputs=(table,),
        weight=weight,
    )


# --- Gavel, section 5.7.1 ---------------------------------------------------------------------


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


GENERATED: Mapping[str, Callable[[int], list[SimulatedJob]]] = {
    "virtualflow-three": virtualflow_three,
    "virtualflow-twenty": virtualflow_twenty,
}
"""Workloads that ``simulate pool`` knows by name, for one kind of VM."""


def generated(name: str, seed: int, kinds: int) -> list[SimulatedJob]:
    """Return a workload by its name.

    Raises:
        ConfigError: it is for another number of kinds.
    """
    if kinds != 1:
        raise ConfigError(f"{name}: a workload for one kind of VM: got {kinds}; give --cluster one")
    return GENERATED[name](seed)
