"""Workloads drawn as VirtualFlow describes its own (sections 6.1 and 6.4): the same
distributions, not the same jobs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from spottrain.errors import ConfigError
from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.simulation.workload import SimulatedJob, Table

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
