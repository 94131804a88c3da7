"""Cost over the offline optimum with little slack, on markets of 16 VMs that are mostly there.

python -m lab.bench.bench_caution FIRST_SEED MARKETS [SLACK]
"""

from __future__ import annotations

import sys
from statistics import fmean

from spottrain_lab.commands.deadlines import trace_job
from spottrain_lab.markets.baselines import CostOptimal, UniformProgress
from spottrain_lab.markets.evaluate import offline_optimum_usd
from spottrain_lab.markets.replay import play
from spottrain_lab.markets.scenarios import mostly_there, prolonged

VMS = 16


def main() -> None:
    """Print the mean of both rules, and how often each is the cheaper one."""
    first, count, *more = sys.argv[1:]
    slack = float(more[0]) if more else 1.1
    pairs = []
    for seed in range(int(first), int(first) + int(count)):
        job = trace_job(f"seed {seed}", [mostly_there(seed)], VMS, slack)
        runs = [play(prolonged(job), rule()) for rule in (CostOptimal, UniformProgress)]
        bound = offline_optimum_usd(job)
        assert all(run.in_time and run.in_budget for run in runs)
        pairs.append([run.usd / bound for run in runs])
    ours, theirs = zip(*pairs, strict=True)
    cheaper = sum(a < b for a, b in pairs)
    print(
        f"{count} markets, {slack:g} times the time: cost-optimal {fmean(ours):.3f}, uniform "
        f"progress {fmean(theirs):.3f}; cost-optimal is the cheaper one in {cheaper}"
    )


if __name__ == "__main__":
    main()
