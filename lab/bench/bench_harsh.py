"""Deadlines, budgets and what attempts at spot VMs waste, on harsh markets and tight limits.

python -m lab.bench.bench_harsh [FIRST_SEED JOBS]
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

from spottrain.pricing.deadline.tuning import SMALL_FLEET, WASTE
from spottrain.units import HOUR_S
from spottrain_lab.markets.baselines import CostOptimal, TimeOptimal
from spottrain_lab.markets.replay import SimulatedRun, play
from spottrain_lab.markets.scenarios import (
    Scenario,
    harsh,
    prolonged,
    synthetic,
)


def tight(seed: int) -> Scenario:
    """A market of ``synthetic`` with a deadline or a budget next to what on demand takes."""
    draw, job = random.Random(f"tight/{seed}"), synthetic(10**6 + seed)
    takes_s, usd = job.on_demand()
    time = 0.5 * draw.random() * draw.random()
    money = draw.choice((0.0, 0.001, 0.01, 0.05)) * draw.random()
    return replace(job, deadline_s=takes_s * (1 + time), max_usd=usd * (1 + money))


def bound_usd(job: Scenario) -> float:
    """On-demand VMs alone, and 1 %; of larger fleets one attempt with the whole fleet, if
    that is more."""
    fleet, (_, alone_usd) = job.fleet, job.on_demand()
    if fleet.max_vms <= SMALL_FLEET:
        return alone_usd * (1 + WASTE)
    attempt_s = fleet.boot_s + 2 * fleet.morph_s + fleet.lost_s
    attempt_usd = fleet.max_vms * job.on_demand_usd_per_hour * attempt_s / HOUR_S
    return alone_usd + max(WASTE * alone_usd, attempt_usd)


def row(title: str, runs: list[tuple[Scenario, SimulatedRun]]) -> str:
    late = sum(not run.in_time for _, run in runs)
    over = sum(not run.in_budget for _, run in runs)
    above = sum(run.usd > bound_usd(job) * (1 + 1e-9) for job, run in runs)
    costs = [run.usd / job.on_demand()[1] for job, run in runs]
    return (
        f"| {title} | {len(runs)} | {late} | {over} | {above} | "
        f"{sum(costs) / len(costs):.3f} | {max(costs):.3f} |"
    )


def kind(job: Scenario) -> str:
    """Return the group that a job belongs to."""
    if not job.name.startswith("harsh"):
        return "tight limits"
    return "harsh, 1 to 3 VMs" if job.fleet.max_vms < 4 else "harsh, 4 and more"


def main(first: int = 0, count: int = 100) -> None:
    """Print a row for each kind of job and rule."""
    print("| jobs | | late | over budget | above the bound | cost / on demand | at most |")
    print("|---|---|---|---|---|---|---|")
    for rule in (CostOptimal, TimeOptimal):
        runs: dict[str, list[tuple[Scenario, SimulatedRun]]] = {}
        for seed in range(first, first + count):
            job = harsh(seed) if seed % 8 else tight(seed)
            runs.setdefault(kind(job), []).append((job, play(prolonged(job), rule())))
        for title in sorted(runs):
            print(row(f"{rule.name}: {title}", runs[title]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
