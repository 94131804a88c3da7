"""The table of the promise on seeded markets, and what stands in its way on traces.

``python -m tests.bench.bench_promise [TRACE ...]``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spottrain.pricing.simulation.baselines import (
    CostOptimal,
    OnDemandOnly,
    SpotOnlyWait,
)
from spottrain.pricing.simulation.evaluate import offline_optimum_usd, online_bound_usd
from spottrain.pricing.simulation.replay import ON_DEMAND, MarketView, play
from spottrain.pricing.simulation.scenarios import Scenario
from spottrain.varuna_manager.cli.simulate.deadlines import on_trace, promise


class Mixed(SpotOnlyWait):
    """So many on-demand VMs throughout, spot VMs for the rest."""

    name = "mixed"

    def __init__(self, dear: int) -> None:
        self.dear = dear

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return both."""
        fleet = replace(
            view.scenario.fleet,
            examples_per_s=view.scenario.fleet.rates[
                : view.scenario.fleet.most - self.dear + 1
            ],
        )
        smaller = replace(view, scenario=replace(view.scenario, fleet=fleet))
        return {**super().wanted(smaller), ON_DEMAND: self.dear}


def hindsight(scenario: Scenario) -> tuple[int, float]:
    """Return the fewest on-demand VMs with which it is in time, and dollars."""
    for dear in range(scenario.fleet.most):
        outcome = play(scenario, Mixed(dear))
        if outcome.in_time:
            return dear, outcome.usd
    return scenario.fleet.most, play(scenario, OnDemandOnly()).usd


def in_the_way(scenario: Scenario) -> str:
    """Return what the promise takes, beside what others would."""
    bound, blind = offline_optimum_usd(scenario), online_bound_usd(scenario) or 0.0
    dear, usd = hindsight(scenario)
    smooth = replace(scenario, fleet=replace(scenario.fleet, morph_s=0.0, lost_s=0.0))
    unpaused = play(smooth, CostOptimal()).usd / offline_optimum_usd(smooth)
    return (
        f"{scenario.name}: promise {play(scenario, CostOptimal()).usd / bound:.3f}, not knowing "
        f"which VMs go {blind / bound:.3f}, the best fixed number on demand in hindsight "
        f"({dear}) {usd / bound:.3f}; promise without pauses {unpaused:.3f}"
    )


def main() -> None:
    """Print both, and how long the table took."""
    traces = [Path(name) for name in sys.argv[1:]]
    started_s = time.perf_counter()
    promise(trace=traces)
    print(f"{time.perf_counter() - started_s:.0f} s")
    for trace in traces:
        for scenario in on_trace(trace):
            print(in_the_way(scenario))


if __name__ == "__main__":
    main()
