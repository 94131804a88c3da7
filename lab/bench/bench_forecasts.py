"""How the 90 % intervals of cost-optimal jobs hold, by the size of the fleet.

python -m lab.bench.bench_forecasts TRACE...

Traces of single VMs are also zones, two by two, for a job on one VM. Jobs have 1.1, 1.5 and 2 times
the time that on-demand VMs need; forecasts are made with 90, 60 and 30 % of the work left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from spottrain_lab.commands.deadlines import on_traces
from spottrain_lab.markets.baselines import CostOptimal
from spottrain_lab.markets.coverage import LEVEL, Foretold, coverage
from spottrain_lab.markets.evaluate import ForecastOutcome, watch
from spottrain_lab.markets.scenarios import Scenario, prolonged


def jobs(files: Sequence[Path]) -> Iterator[tuple[str, str, Scenario]]:
    """Yield the kind of each job, the market it meets, and the job."""
    single = [file for file in files if "-1-node" in file.name]
    markets = [("1 VM", [file], 1) for file in single]
    markets += [("zones", list(pair), 1) for pair in pairwise(single)]
    markets += [
        (f"{size} VMs", [file], size) for size in (4, 16) for file in files if file not in single
    ]
    for kind, zones, size in markets:
        name = ", ".join(zone.name for zone in zones)
        for job in on_traces(zones, [size]):
            yield kind, name, job


def forecasts(job: Scenario) -> tuple[ForecastOutcome, ...]:
    return watch(prolonged(job), CostOptimal())[1]


def main() -> None:
    """Print a row for each kind of jobs."""
    found: dict[tuple[str, str], list[Foretold]] = {}
    kinds, markets, all_jobs = zip(*jobs([Path(name) for name in sys.argv[1:]]), strict=True)
    with ProcessPoolExecutor() as pool:
        played = list(pool.map(forecasts, all_jobs))
    for kind, market, made in zip(kinds, markets, played, strict=True):
        for one in made:
            finish, now_s = one.forecast.finish_s, one.now_s
            left = replace(
                finish,
                low=finish.low - now_s,
                expected=finish.expected - now_s,
                high=finish.high - now_s,
            )
            for of, interval, actual in (
                ("time left", left, one.finished_s - now_s),
                ("cost", one.forecast.usd, one.usd),
            ):
                told = Foretold(market=market, interval=interval, actual=actual)
                found.setdefault((kind, of), []).append(told)
    print("| jobs | of | hold | below | interval score | expected is off by |")
    print("|---|---|---|---|---|---|")
    for (kind, of), rows in found.items():
        row = coverage(rows, LEVEL)
        assert row is not None
        below = fmean(one.actual < one.interval.low - 1e-6 for one in rows)
        off = fmean(abs(one.interval.expected / one.actual - 1) for one in rows)
        print(
            f"| {kind} | {of} | {row.kept:.1%} ({row.kept_low:.1%} to {row.kept_high:.1%}) of "
            f"{row.forecasts} | {below:.1%} | {row.score:.3f} | {off:.1%} |"
        )


if __name__ == "__main__":
    main()
