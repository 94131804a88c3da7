"""Partitions sections into stages and virtual nodes over replicas.

Bounds are written as in ``wire.Plan``: part ``i`` holds ``bounds[i]`` up to
``bounds[i + 1]``, and no part is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.types import Numbers

Costs = npt.NDArray[np.float64]
Farthest = Callable[[int, int], int]


def partition(
    costs_s: Sequence[float],
    stages: int,
    farthest: Farthest | None = None,
    last_costs_s: Sequence[float] | None = None,
    max_s: float = math.inf,
) -> tuple[int, ...] | None:
    """Cut sections into stages so that the slowest stage is as fast as possible.

    Of all such cuts, return the one with the smallest sum of squared stage costs: the
    most even one. The same input gives the same cut.

    Args:
        costs_s: Time of each section for one micro-batch, 0 or more. Embedding and head
            are sections like all others, as long as they were measured.
        stages: Number of stages.
        farthest: Called as ``farthest(stage, start)``: up to which end that stage can hold
            the sections from ``start`` on, ``start`` if not even one; any if not given.
        last_costs_s: Time of each section where it is in the last stage, which may
            differ because that stage never recomputes; ``costs_s`` if not given.
        max_s: Maximum of every stage.

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
    run_costs = [_run_costs(costs_s, max_s), _run_costs(last_costs_s, max_s)]
    which = [0] * (stages - 1) + [1]
    if farthest is not None:
        by_stage = enumerate(which)
        run_costs = [_allowed(run_costs[w], stages, p, farthest) for p, w in by_stage]
        which = list(range(stages))
    bottleneck, bounds = _cut(np.stack(run_costs), which)
    return None if bottleneck == math.inf else tuple(bounds.tolist())


def join(count: int, spans: Iterable[tuple[int, int]], stages: int) -> tuple[int, ...]:
    """Return bounds of groups of sections that keep spans in one piece.

    The shortest span first, as long as there are enough groups for the stages.

    Args:
        count: Sections.
        spans: The first and the last section of each.
        stages: Minimum number of groups.
    """
    bounds = set(range(count + 1))
    for first, last in sorted(spans, key=lambda span: (span[1] - span[0], span)):
        rest = bounds.difference(range(first + 1, last + 1))
        if len(rest) > stages:
            bounds = rest
    return tuple(sorted(bounds))


def spread(virtual_nodes: int, replicas: int) -> tuple[int, ...]:
    """Share virtual nodes out evenly over replicas, larger shares first.

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


def _run_costs(costs_s: Sequence[float], max_s: float) -> Costs:
    """Return the cost of every run [start, end), infinite where it is not allowed."""
    sums = np.concatenate(([0.0], np.cumsum(costs_s)))
    runs = sums[None, :] - sums[:, None]
    allowed = np.triu(np.ones_like(runs, bool), 1) & (runs <= max_s)
    return np.where(allowed, runs, np.inf)


def _allowed(runs: Costs, stages: int, stage: int, farthest: Farthest) -> Costs:
    """Return ``runs`` with those infinite that ``stage`` cannot hold."""
    allowed = np.full_like(runs, np.inf)
    count = len(runs) - 1
    # The stages before and after need a section each.
    for start in range(stage, count - (stages - stage) + 1) if stage else [0]:
        end = min(farthest(stage, start), count - (stages - stage - 1))
        allowed[start, : end + 1] = runs[start, : end + 1]
    return allowed


def _cut(run_costs: Costs, which: Sequence[int]) -> tuple[float, Numbers]:
    """Cut so that the slowest run is as fast as possible, then as evenly as possible.

    Args:
        run_costs: Of each run [start, end), infinite where it is not allowed: matrices.
        which: For each run in turn, the number of its matrix.

    Returns:
        The bottleneck, infinite if there is no cut; and the bounds of the runs.
    """
    runs, count = len(which), run_costs.shape[1] - 1
    at_start = np.full(count + 1, np.inf)
    at_start[0] = 0.0
    best = at_start
    for matrix in which:
        best = np.maximum(best[:, None], run_costs[matrix]).min(axis=0)
    bottleneck = float(best[count])
    bounds = np.zeros(runs + 1, np.int64)
    bounds[runs] = count
    if bottleneck == np.inf:
        return bottleneck, bounds
    squares = np.where(run_costs <= bottleneck, run_costs**2, np.inf)
    best, came = at_start, []
    for matrix in which:
        sums = best[:, None] + squares[matrix]
        came.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    for run in range(runs - 1, 0, -1):
        bounds[run] = came[run][bounds[run + 1]]
    return bottleneck, bounds
