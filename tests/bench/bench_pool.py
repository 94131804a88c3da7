"""Seconds that a pool's decisions take: policies with 2,048 jobs, and the core with 200.

``python -m tests.bench.bench_pool [POLICY ...]``
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Sequence

from spottrain.pricing.sharing.policies import POLICIES
from spottrain.pricing.sharing.problem import AllocationProblem, JobDemand, elastic_configurations
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    HoldingsReported,
    JobRequest,
    JobRequested,
    PoolEvent,
    PoolJobEnded,
    PoolSettings,
    PoolState,
    PoolTimerFired,
    SuppliesChanged,
    Supply,
    Team,
)
from spottrain.varuna_manager.pool.core.step import step

KINDS, VMS = ("v100", "p100", "k80"), (667, 667, 666)
MANY, JOBS = 2048, 200
SMALLEST, LARGEST = 96, 192
"""Of the core's jobs: 20 run at once."""
TEAMS = {f"t{t}": Team(weight=t + 1.0) for t in range(8)}


def tables(draw: random.Random, smallest: int, largest: int) -> list[dict[int, float]]:
    """Return throughputs by kind, the first the fastest: more VMs train less each."""
    power = draw.choice([0.6, 0.9, 1.0])
    speeds = [draw.uniform(1, 3) * times for times in (4, 2, 1)]
    return [{n: s * n**power for n in range(smallest, largest + 1)} for s in speeds]


def problem(draw: random.Random) -> AllocationProblem:
    demands = tuple(
        JobDemand(
            name=f"j{m}",
            options=elastic_configurations(tables(draw, 1, 8)),
            examples=draw.uniform(1e3, 1e6),
            weight=draw.choice([1.0, 5.0, 10.0]),
            arrived_s=float(m),
            team=f"t{m % 8}",
            age_s=draw.uniform(0, 1e4),
        )
        for m in range(MANY)
    )
    return AllocationProblem(
        kinds=KINDS, vms=(512,) * 3, demands=demands, usd_per_hour=(3.0, 1.7, 0.5)
    )


def request(draw: random.Random, name: str) -> JobRequest:
    throughputs = tuple(tuple(table.items()) for table in tables(draw, SMALLEST, LARGEST))
    return JobRequest(
        name=name,
        throughputs=throughputs,
        examples=draw.uniform(1e6, 1e8),
        team=f"t{draw.randrange(8)}",
        weight=draw.choice([1.0, 5.0, 10.0]),
    )


class Pool:
    """The core, and managers that do at once what they are told."""

    def __init__(self, policy: str) -> None:
        supplies = tuple(
            Supply(name=kind, vms=n, microusd_per_hour=(3 - k) * 1_000_000)
            for k, (kind, n) in enumerate(zip(KINDS, VMS, strict=True))
        )
        settings = PoolSettings(policy=policy, teams=TEAMS)
        self.state = PoolState(settings=settings, supplies=supplies)
        self.slowest_s = 0.0

    def tell(self, event: PoolEvent) -> None:
        begun = time.process_time()
        self.state, commands = step(self.state, event)
        self.slowest_s = max(self.slowest_s, time.process_time() - begun)
        for command in commands:
            if isinstance(command, Grant):
                self.tell(
                    HoldingsReported(
                        at_s=event.at_s,
                        job=command.job,
                        serial=command.serial,
                        held=command.vms,
                        spent=0,
                        examples_done=0.0,
                    )
                )


def decisions(policy: str) -> tuple[float, int]:
    """Return the seconds of the slowest decision, and how many jobs run."""
    draw = random.Random(0)
    pool = Pool(policy)
    for m in range(JOBS):
        pool.tell(JobRequested(at_s=float(m), request=request(draw, f"j{m}")))
    pool.slowest_s = 0.0
    at_s = float(JOBS)
    pool.tell(JobRequested(at_s=at_s, request=request(draw, "one more")))
    running = [name for name, job in pool.state.jobs.items() if any(job.granted)]
    pool.tell(PoolJobEnded(at_s=at_s + 10, job=running[0]))
    pool.tell(SuppliesChanged(at_s=at_s + 20, supplies=pool.state.supplies))
    pool.tell(PoolTimerFired(at_s=at_s + 400))
    running = [name for name, job in pool.state.jobs.items() if any(job.granted)]
    return pool.slowest_s, len(running)


def main(names: Sequence[str]) -> None:
    shared = problem(random.Random(0))
    print(f"{'policy':<22} {f'{MANY} jobs, s':>14} {f'core, {JOBS} jobs, s':>18} run")
    for name in names or POLICIES:
        begun = time.process_time()
        POLICIES[name](shared)
        many_s = time.process_time() - begun
        core_s, running = decisions(name)
        print(f"{name:<22} {many_s:14.2f} {core_s:18.2f} {running:3}", flush=True)
    most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"seconds of CPU; at most {most_mib:.0f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
