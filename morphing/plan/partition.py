"""Partitions sections into stages and virtual nodes over replicas.

Bounds are written as in ``wire.Plan``: part ``i`` holds ``bounds[i]`` up to
``bounds[i + 1]``, and no part is empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from spottrain.morphing.errors import PlanError

Costs = npt.NDArray[np.float64]
Farthest = Callable[[int, int], int]
FEW, MANY = 32, 4096
"""Models, and cuts of these, that are remembered: those of a ranking, for which many fleets are
planned."""


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
    first, last = tuple(costs_s), tuple(last_costs_s)
    if farthest is None and max_s == math.inf:
        return _evenly(first, last, stages)
    able = farthest or (lambda stage, start: count)
    costs = [_run_costs(first)] * (stages - 1) + [_run_costs(last)]
    every = [_allowed(runs, stages, p, able, max_s) for p, runs in enumerate(costs)]
    slowest_s = _none_yet(count)
    for runs in every:
        slowest_s = _slowest_s(slowest_s, runs)
    bottleneck_s = float(slowest_s[count])
    return None if bottleneck_s == math.inf else _most_even(every, bottleneck_s)


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


@lru_cache(maxsize=MANY)
def _evenly(
    costs_s: tuple[float, ...], last_costs_s: tuple[float, ...], stages: int
) -> tuple[int, ...]:
    """Return the bounds of ``partition`` where any run may be in any stage."""
    before_s, last = _Slowest.of(costs_s)(stages - 1), _run_costs(last_costs_s)
    bottleneck_s = float(_slowest_s(before_s, last)[-1])
    return _most_even([_run_costs(costs_s)] * (stages - 1) + [last], bottleneck_s)


@lru_cache(maxsize=FEW)
def _run_costs(costs_s: tuple[float, ...]) -> Costs:
    """Return the cost of every run [start, end), infinite where there is none."""
    sums = np.concatenate(([0.0], np.cumsum(costs_s)))
    costs = sums[None, :] - sums[:, None]
    return np.where(np.triu(np.ones_like(costs, bool), 1), costs, np.inf)


class _Slowest:
    """How fast the slowest of so many runs from the first section on can be, by the end of the
    last: pipelines of all depths ask for it."""

    def __init__(self, runs: Costs) -> None:
        self._runs, self._known = runs, [_none_yet(len(runs) - 1)]

    @staticmethod
    @lru_cache(maxsize=FEW)
    def of(costs_s: tuple[float, ...]) -> _Slowest:
        """Return that of runs of sections."""
        return _Slowest(_run_costs(costs_s))

    def __call__(self, count: int) -> Costs:
        while len(self._known) <= count:
            self._known.append(_slowest_s(self._known[-1], self._runs))
        return self._known[count]


def _none_yet(count: int) -> Costs:
    """Return what no runs of ``count`` sections cost, by their end."""
    none = np.full(count + 1, np.inf)
    none[0] = 0.0
    return none


def _slowest_s(before_s: Costs, runs: Costs) -> Costs:
    """Return by the end of one more run how fast the slowest can be."""
    slowest: Costs = np.maximum(before_s[:, None], runs).min(axis=0)
    return slowest


def _allowed(runs: Costs, stages: int, stage: int, farthest: Farthest, max_s: float) -> Costs:
    """Return ``runs`` with those infinite that ``stage`` cannot hold, or takes too long for."""
    allowed = np.full_like(runs, np.inf)
    count = len(runs) - 1
    # The stages before and after need a section each.
    for start in range(stage, count - (stages - stage) + 1) if stage else [0]:
        end = min(farthest(stage, start), count - (stages - stage - 1))
        allowed[start, : end + 1] = runs[start, : end + 1]
    return np.where(allowed <= max_s, allowed, np.inf)


def _most_even(every: Sequence[Costs], bottleneck_s: float) -> tuple[int, ...]:
    """Return the bounds of runs with the smallest sum of squared costs.

    Args:
        every: For each run in turn, what all possible ones cost.
        bottleneck_s: None may cost more.
    """
    count = len(every[0]) - 1
    ends = np.arange(count + 1)
    which = {id(runs): runs for runs in every}
    longest = max(int((runs <= bottleneck_s).sum(axis=1).max()) for runs in which.values())
    # Rows are lengths, the longest first: most runs are too slow.
    starts = ends - np.arange(longest, 0, -1)[:, None]

    def squared(runs: Costs) -> Costs:
        costs = np.where(starts >= 0, runs[starts, ends], np.inf)
        return np.where(costs <= bottleneck_s, costs**2, np.inf)

    squares = {number: squared(runs) for number, runs in which.items()}
    padded = np.full(longest + count + 1, np.inf)
    by_start = np.lib.stride_tricks.sliding_window_view(padded, count + 1)[:longest]
    padded[longest] = 0.0
    lengths = []
    for runs in every:
        sums = by_start + squares[id(runs)]
        lengths.append(longest - sums.argmin(axis=0))
        padded[longest:] = sums.min(axis=0)
    bounds = [count]
    for chosen in reversed(lengths):
        bounds.append(bounds[-1] - int(chosen[bounds[-1]]))
    return tuple(reversed(bounds))
