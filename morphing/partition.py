"""Cutting a row of things into runs: sections into stages, virtual nodes over replicas.

Bounds are written as in ``wire.Plan``: part ``i`` holds ``bounds[i]`` up to
``bounds[i + 1]``, and no part is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from spottrain.morphing.errors import PlanError

Costs = npt.NDArray[np.float64]
Fits = Callable[[int, int, int], bool]


def partition(
    costs_s: Sequence[float],
    stages: int,
    fits: Fits | None = None,
    last_costs_s: Sequence[float] | None = None,
) -> tuple[int, ...] | None:
    """Cut sections into stages so that the costliest stage costs the least.

    Of all such cuts, return one whose squared stage costs sum to the least: where the
    bottleneck is given, the most even one. The same input gives the same cut.

    Args:
        costs_s: Time of each section for one micro-batch, 0 or more.
        stages: Number of stages.
        fits: Called as ``fits(stage, start, end)``: whether that stage can hold the
            sections from ``start`` up to ``end``; all can if not given.
        last_costs_s: Time of each section where it is in the last stage, which may
            differ because that stage never recomputes; ``costs_s`` if not given.

    Returns:
        Bounds of the stages, or ``None`` if no cut fits.

    Raises:
        PlanError: There are fewer sections than stages, no stage, or a cost that is
            negative or not finite.
    """
    count = len(costs_s)
    last_costs_s = costs_s if last_costs_s is None else last_costs_s
    if not 1 <= stages <= count:
        raise PlanError(
            f"every stage needs a section: got {stages} stages for {count} sections; "
            f"ask for 1 to {count} stages"
        )
    if not all(cost >= 0 and math.isfinite(cost) for cost in [*costs_s, *last_costs_s]):
        raise PlanError(
            f"section times must be finite and not negative: got {list(costs_s)} and "
            f"{list(last_costs_s)} in the last stage; calibrate again"
        )
    run_costs = [_run_costs(costs_s)] * (stages - 1) + [_run_costs(last_costs_s)]
    if fits is not None:
        run_costs = [_forbid(r, stages, p, fits) for p, r in enumerate(run_costs)]
    bottleneck = _cheapest(run_costs, np.maximum)[0]
    if bottleneck == np.inf:
        return None
    squares = [np.where(runs <= bottleneck, runs**2, np.inf) for runs in run_costs]
    return _cheapest(squares, np.add)[1]


def spread(virtual_nodes: int, replicas: int) -> tuple[int, ...]:
    """Share virtual nodes out over replicas, as evenly as can be, larger shares first.

    Returns:
        Bounds of the replicas' runs of virtual nodes.

    Raises:
        PlanError: A replica would have none.
    """
    if not 1 <= replicas <= virtual_nodes:
        raise PlanError(
            f"every replica needs a virtual node: got {replicas} replicas for "
            f"{virtual_nodes}; ask for 1 to {virtual_nodes} replicas"
        )
    share, larger = divmod(virtual_nodes, replicas)
    return tuple(share * i + min(i, larger) for i in range(replicas + 1))


def _run_costs(costs_s: Sequence[float]) -> Costs:
    """Return the cost of every run [start, end), infinite where it is empty."""
    sums = np.array([math.fsum(costs_s[:i]) for i in range(len(costs_s) + 1)])
    starts, ends = np.ix_(range(len(sums)), range(len(sums)))
    return np.where(starts < ends, sums[ends] - sums[starts], np.inf)


def _forbid(runs: Costs, stages: int, stage: int, fits: Fits) -> Costs:
    """Return ``runs`` with those infinite that ``stage`` cannot hold."""
    allowed = runs.copy()
    count = len(runs) - 1
    # The stages before and after need a section each.
    for start in range(stage, count - (stages - stage) + 1):
        for end in range(start + 1, count - (stages - stage - 1) + 1):
            if not fits(stage, start, end):
                allowed[start, end] = np.inf
    return allowed


def _cheapest(
    run_costs: Sequence[Costs], combine: np.ufunc
) -> tuple[float, tuple[int, ...]]:
    """Return the least combined cost of one run a stage, and the bounds that give it."""
    count = run_costs[0].shape[0] - 1
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    starts = []
    for runs in run_costs:
        totals = combine(best[:, None], runs)
        starts.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    bounds = [count]
    for start_of in reversed(starts):
        bounds.append(int(start_of[bounds[-1]]))
    return float(best[count]), tuple(reversed(bounds))
