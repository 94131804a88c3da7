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
            view.world.fleet,
            examples_per_s=view.world.fleet.rates[
                : view.world.fleet.most - self.dear + 1
            ],
        )
        smaller = replace(view, world=replace(view.world, fleet=fleet))
        return {**super().wanted(smaller), ON_DEMAND: self.dear}


def hindsight(world: Scenario) -> tuple[int, float]:
    """Return the fewest on-demand VMs with which it is in time, and dollars."""
    for dear in range(world.fleet.most):
        outcome = play(world, Mixed(dear))
        if outcome.in_time:
            return dear, outcome.usd
    return world.fleet.most, play(world, OnDemandOnly()).usd


def in_the_way(world: Scenario) -> str:
    """Return what the promise takes, beside what others would."""
    bound, blind = offline_optimum_usd(world), online_bound_usd(world) or 0.0
    dear, usd = hindsight(world)
    smooth = replace(world, fleet=replace(world.fleet, morph_s=0.0, lost_s=0.0))
    unpaused = play(smooth, CostOptimal()).usd / offline_optimum_usd(smooth)
    return (
        f"{world.name}: promise {play(world, CostOptimal()).usd / bound:.3f}, not knowing "
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
        for world in on_trace(trace):
            print(in_the_way(world))


if __name__ == "__main__":
    main()
