"""How the 90 % intervals of cost-optimal jobs hold, by the size of the fleet.

python -m lab.bench.bench_forecasts TRACE...

Traces of single VMs are also zones, two by two, for a job on one VM. Of each trace, and of each of
its first six stretches of three days, jobs with 1.1, 1.5 and 2 times the time; forecasts with 90, 60
and 30 % of the work left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from spottrain_lab.commands.deadlines import TRACE_SLACKS, trace_job
from spottrain_lab.commands.trace import read_traces
from spottrain_lab.markets.baselines import CostOptimal
from spottrain_lab.markets.coverage import LEVEL, Foretold, coverage
from spottrain_lab.markets.evaluate import watch
from spottrain_lab.markets.scenarios import Scenario, prolonged
from spottrain_lab.traces.traces import Trace

STRETCH_S = 3 * 86400.0
STRETCHES = 6


def stretches(zones: Sequence[Trace]) -> Iterator[list[Trace]]:
    """Yield the traces, and their stretches."""
    end_s = min(zone.end_s for zone in zones)
    yield list(zones)
    for number in range(min(STRETCHES, int(end_s // STRETCH_S))):
        yield [_stretch(zone, number * STRETCH_S) for zone in zones]


def _stretch(trace: Trace, from_s: float) -> Trace:
    until_s = from_s + STRETCH_S
    lives = tuple(
        replace(vm, from_s=max(0.0, vm.from_s - from_s), until_s=min(vm.until_s, until_s) - from_s)
        for vm in trace.lives
        if vm.until_s > from_s and vm.from_s < until_s
    )
    return replace(trace, lives=lives, end_s=STRETCH_S)


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
        for part in stretches([read_traces([zone]) for zone in zones]):
            for slack in TRACE_SLACKS:
                yield kind, name, trace_job(name, part, size, slack)


def main() -> None:
    """Print a row for each kind of jobs."""
    found: dict[tuple[str, str], list[Foretold]] = {}
    for kind, market, job in jobs([Path(name) for name in sys.argv[1:]]):
        _, forecasts = watch(prolonged(job), CostOptimal())
        for one in forecasts:
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
