"""Where the ends of the intervals of forecasts come from (``deadline.tuning``), and how they
hold on each recorded trace when that trace has no part in them.

python -m lab.bench.bench_intervals FIRST_SEED MARKETS [TRACE...]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spottrain.pricing.deadline.forecast import forecast
from spottrain.pricing.deadline.model import Interval
from spottrain.pricing.deadline.rolling import Rolling, drift, is_due, note, width
from spottrain_lab.commands.deadlines import on_traces
from spottrain_lab.markets.baselines import CostOptimal, TimeOptimal, job_status
from spottrain_lab.markets.coverage import Foretold, coverage
from spottrain_lab.markets.replay import MarketView, play
from spottrain_lab.markets.scenarios import Scenario, prolonged, synthetic

SHARES = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)
"""Of the work that is left when a forecast is looked at."""
ENDS = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A forecast of a cost, or of the time left, with what came of it."""

    market: str
    expected: float
    """Drift included."""
    wide: float
    most: float
    """By what on-demand VMs alone cost, or the deadline."""
    actual: float

    @property
    def error(self) -> float:
        return math.log(self.actual / self.expected) / self.wide

    def told(self, ends: tuple[float, float]) -> Foretold:
        low, high = (self.expected * math.exp(end * self.wide) for end in ends)
        high = min(high, self.most)
        kept = Interval(low=min(low, high), expected=self.expected, high=high)
        return Foretold(market=self.market, interval=kept, actual=self.actual)


class Watched:
    """A policy whose forecasts are kept as they were before the ends."""

    def __init__(self, rule: CostOptimal) -> None:
        self.rule, self.name = rule, rule.name
        self.rolling: Rolling | None = None
        self.kept: list[tuple[MarketView, dict[str, tuple[float, float, float]]]] = []

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        wanted = self.rule.wanted(view)
        number, share = len(self.kept), view.examples_left / view.scenario.examples
        due = number < len(SHARES) and share <= SHARES[number]
        if not due and not is_due(self.rolling, view.examples_left):
            return wanted
        plain = forecast(
            job_status(view),
            view.scenario.fleet,
            view.supplies,
            view.holdings,
            self.rule.outlook,
            cost_optimal=self.rule.cost_optimal,
        )
        left, spent = view.examples_left, view.usd_spent
        if is_due(self.rolling, left):
            self.rolling = note(self.rolling, plain, left, view.now_s, spent)
        if due:
            usd, left_s = plain.usd.expected, plain.finish_s.expected - view.now_s
            alone = view.scenario.on_demand()[1] * share
            found = {
                "cost": (
                    usd * drift(self.rolling, spent),
                    width(self.rolling, "usd", usd),
                    max(usd, alone),
                ),
                "finish": (
                    left_s,
                    width(self.rolling, "time_s", left_s),
                    view.scenario.deadline_s - view.now_s,
                ),
            }
            self.kept.append((view, found))
        return wanted


def seen(market: str, job: Scenario) -> Iterator[tuple[str, Seen]]:
    """Yield the forecasts of a job under both policies, each with its kind."""
    for rule in (CostOptimal(), TimeOptimal()):
        watched = Watched(rule)
        run = play(prolonged(job), watched)
        for view, found in watched.kept:
            actual = {
                "cost": run.usd - view.usd_spent,
                "finish": run.finished_s - view.now_s,
            }
            for of, (expected, wide, most) in found.items():
                if 0 < expected < math.inf and actual[of] > 0:
                    yield (
                        f"{rule.name}, {of}",
                        Seen(
                            market=market,
                            expected=expected,
                            wide=wide,
                            most=most,
                            actual=actual[of],
                        ),
                    )


def ends_of(some: list[Seen]) -> tuple[float, float]:
    """Return the quantiles of the errors."""
    errors = sorted(one.error for one in some)
    low, high = (errors[round(end * (len(errors) - 1))] for end in ENDS)
    return low, high


def main() -> None:
    """Print the ends, and the coverage of each trace by the ends of all others."""
    first, count, *files = sys.argv[1:]
    jobs = [(f"seed {n}", synthetic(n)) for n in range(int(first), int(first) + int(count))]
    traces = {Path(file).name for file in files}
    for file in files:
        path = Path(file)
        sizes = (1,) if "-1-node" in path.name else (4, 16)
        jobs += [(path.name, job) for job in on_traces([path], sizes, (1.1, 1.5, 2.0))]
    by_kind: dict[str, list[Seen]] = {}
    for market, job in jobs:
        for kind, one in seen(market, job):
            by_kind.setdefault(kind, []).append(one)
    print("| of | ends | traces, each by the others | interval score |")
    print("|---|---|---|---|")
    for kind, some in sorted(by_kind.items()):
        if kind == "cost-optimal, finish":
            continue  # between the earliest finish and the deadline, see deadline.availability
        low, high = ends_of(some)
        left_out = [
            one.told(ends_of([other for other in some if other.market != trace]))
            for trace in sorted(traces)
            for one in some
            if one.market == trace
        ]
        row = coverage(left_out)
        held = "-" if row is None else f"{row.kept:.1%} ({row.kept_low:.1%} to "
        held += "" if row is None else f"{row.kept_high:.1%}) of {row.forecasts}"
        score = "-" if row is None else f"{row.score:.3f}"
        print(f"| {kind} | {low:.2f} to {high:.2f} | {held} | {score} |")


if __name__ == "__main__":
    main()
