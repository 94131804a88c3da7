"""The deadline policy on synthetic markets, and what limits it on traces.

``python -m lab.bench.bench_deadlines [TRACE ...]``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spottrain_lab.commands.deadlines import deadlines, on_traces
from spottrain_lab.markets.baselines import (
    CostOptimal,
    OnDemandOnly,
    SpotOnlyWait,
)
from spottrain_lab.markets.evaluate import offline_optimum_usd, online_bound_usd
from spottrain_lab.markets.replay import ON_DEMAND, MarketView, play
from spottrain_lab.markets.scenarios import Scenario


class Mixed(SpotOnlyWait):
    """A fixed number of on-demand VMs, spot VMs for the rest."""

    name = "mixed"

    def __init__(self, on_demand: int) -> None:
        self.on_demand = on_demand

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return both."""
        fleet = replace(
            view.scenario.fleet,
            examples_per_s=view.scenario.fleet.rates[
                : view.scenario.fleet.max_vms - self.on_demand + 1
            ],
        )
        smaller = replace(view, scenario=replace(view.scenario, fleet=fleet))
        return {**super().wanted(smaller), ON_DEMAND: self.on_demand}


def hindsight(scenario: Scenario) -> tuple[int, float]:
    """Return the fewest on-demand VMs with which the job is in time, and the cost."""
    for on_demand in range(scenario.fleet.max_vms):
        outcome = play(scenario, Mixed(on_demand))
        if outcome.in_time:
            return on_demand, outcome.usd
    return scenario.fleet.max_vms, play(scenario, OnDemandOnly()).usd


def in_the_way(scenario: Scenario) -> str:
    """Return the policy's cost beside that of others."""
    bound, online = offline_optimum_usd(scenario), online_bound_usd(scenario) or 0.0
    on_demand, usd = hindsight(scenario)
    smooth = replace(scenario, fleet=replace(scenario.fleet, morph_s=0.0, lost_s=0.0))
    unpaused = play(smooth, CostOptimal()).usd / offline_optimum_usd(smooth)
    return (
        f"{scenario.name}: policy {play(scenario, CostOptimal()).usd / bound:.3f}, online "
        f"bound {online / bound:.3f}, the best fixed number on demand in hindsight "
        f"({on_demand}) {usd / bound:.3f}; policy without pauses {unpaused:.3f}"
    )


def main() -> None:
    """Print both, and how long the table took."""
    traces = [Path(name) for name in sys.argv[1:]]
    started_s = time.perf_counter()
    deadlines(trace=traces)
    print(f"{time.perf_counter() - started_s:.0f} s")
    for trace in traces:
        for scenario in on_traces([trace]):
            print(in_the_way(scenario))


if __name__ == "__main__":
    main()
