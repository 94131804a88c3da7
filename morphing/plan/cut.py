"""The best cut of a row of sections into runs, by dynamic programming."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spottrain.morphing.schedules.types import Numbers


def cut(run_costs: NDArray[np.float64], which: Numbers) -> tuple[float, Numbers]:
    """Cut so that the costliest run costs the least, and then as evenly as can be.

    Args:
        run_costs: Of each run [start, end), infinite where it is not allowed: matrices.
        which: For each run in turn, the number of its matrix.

    Returns:
        The bottleneck, infinite if there is no cut; and the bounds of the runs.
    """
    runs, count = len(which), run_costs.shape[1] - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    for run in range(runs):
        costs, before = run_costs[which[run]], best.copy()
        best[:] = np.inf
        # The runs before and after need a section each.
        for end in range(run + 1, count - (runs - run - 1) + 1):
            for start in range(run, end):
                best[end] = min(best[end], max(before[start], costs[start, end]))
    bottleneck = float(best[count])
    bounds = np.zeros(runs + 1, np.int64)
    bounds[runs] = count
    if bottleneck == np.inf:
        return bottleneck, bounds
    came = np.zeros((runs, count + 1), np.int64)
    best[:] = np.inf
    best[0] = 0.0
    for run in range(runs):
        costs, before = run_costs[which[run]], best.copy()
        best[:] = np.inf
        for end in range(run + 1, count - (runs - run - 1) + 1):
            for start in range(run, end):
                cost = costs[start, end]
                if cost <= bottleneck and before[start] + cost * cost < best[end]:
                    best[end] = before[start] + cost * cost
                    came[run, end] = start
    for run in range(runs - 1, 0, -1):
        bounds[run] = came[run, bounds[run + 1]]
    return bottleneck, bounds
