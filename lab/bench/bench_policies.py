"""Seconds that the allocation policies take for 2,048 jobs on three offer types."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

from spottrain_lab.pools.market import Demand, OfferType
from spottrain_lab.pools.policies import (
    cheapest,
    fairest,
    max_examples_per_usd,
    max_throughput,
    shortest,
)

JOBS, TYPES, QUOTA, TIMES = 2048, 3, 700, 5
SHORT = 40
"""A quota that the cheapest hours do not fit in without being moved about."""
WITHIN_S = 0.5


def market(draw: random.Random) -> tuple[list[OfferType], list[Demand]]:
    types = [
        OfferType(name=f"type{j}", usd_per_hour=draw.uniform(0.5, 3.0), quota=QUOTA)
        for j in range(TYPES)
    ]
    jobs = [
        Demand(
            name=f"job{m}",
            examples=draw.uniform(1, 1e6),
            examples_per_s=tuple(draw.uniform(1, 10) for _ in range(TYPES)),
            deadline_h=draw.choice([200.0, 400.0, 800.0]),
        )
        for m in range(JOBS)
    ]
    return types, jobs


def main() -> None:
    draw = random.Random(0)
    types, jobs = market(draw)
    short = [replace(kind, quota=SHORT) for kind in types]
    endless = [replace(kind, quota=float("inf")) for kind in types]
    apart = [replace(job, deadline_h=draw.uniform(300, 900)) for job in jobs]
    max_usd = shortest(types, jobs).usd
    policies: dict[str, Callable[[], object]] = {
        "cheapest, no quotas": lambda: cheapest(endless, jobs),
        "cheapest, quotas, 3 deadlines": lambda: cheapest(types, jobs),
        "cheapest, quotas, 2,048 deadlines": lambda: cheapest(types, apart),
        "cheapest, short quotas, 2,048 deadlines": lambda: cheapest(short, apart),
        "shortest": lambda: shortest(types, jobs),
        "shortest within a budget": lambda: shortest(types, jobs, max_usd=max_usd),
        "most for money, by deadlines": lambda: max_examples_per_usd(types, jobs),
        "most throughput": lambda: max_throughput(types, jobs),
        "fairest": lambda: fairest(types, jobs),
    }
    print(f"{JOBS} jobs, {TYPES} types; least of {TIMES}, wanted within {WITHIN_S} s")
    print(f"{'policy':<40} {'seconds':>8} {'of the CPU':>11}")
    for name, policy in policies.items():
        wall_s, cpu_s = map(min, zip(*(timed(policy) for _ in range(TIMES)), strict=True))
        print(f"{name:<40} {wall_s:8.3f} {cpu_s:11.3f}")


def timed(policy: Callable[[], object]) -> tuple[float, float]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    policy()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


if __name__ == "__main__":
    main()
