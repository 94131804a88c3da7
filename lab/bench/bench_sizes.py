"""Costs over the offline optimum by size of the fleet and time, on recorded traces.

python -m lab.bench.bench_sizes TRACE...
"""

from __future__ import annotations

import sys
from pathlib import Path

from spottrain_lab.commands.deadlines import TRACE_SLACKS, on_traces
from spottrain_lab.markets.baselines import (
    CostOptimal,
    TimeOptimal,
    UniformProgress,
)
from spottrain_lab.markets.evaluate import offline_optimum_usd
from spottrain_lab.markets.replay import play
from spottrain_lab.markets.scenarios import prolonged

SIZES = (4, 8, 16)
RULES = (CostOptimal, TimeOptimal, UniformProgress)


def main() -> None:
    """Print a row for each trace and size, with three times after one another."""
    times = ", ".join(f"{slack:g}" for slack in TRACE_SLACKS)
    print(f"| trace ({times} times) | VMs | {' | '.join(r.name for r in RULES)} |")
    print("|---|---|---|---|---|")
    for file in map(Path, sys.argv[1:]):
        for size in SIZES:
            jobs = on_traces([file], [size])
            bounds = [offline_optimum_usd(job) for job in jobs]
            cells = (
                ", ".join(
                    f"{play(prolonged(job), rule()).usd / bound:.3f}"
                    for job, bound in zip(jobs, bounds, strict=True)
                )
                for rule in RULES
            )
            print(f"| {file.name} | {size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
