"""The rule of Parcae (Duan et al., NSDI 2024): plans for a forecast of the next 12 minutes.

The number of VMs is forecast minute by minute by an ARIMA(1, 1, 0) model of the last 12
minutes. Dynamic programming over these minutes finds the shapes that train most, with what
every change of shape costs, and every loss that hits a VM of the plan (those that are lost
are drawn from all). The first of them is what runs until the next decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

from spottrain_lab.traces.replay import FleetView
from spottrain_lab.traces.shapes import Shape, Shapes

INTERVAL_S = 60.0
"""Time between two of the numbers that are forecast."""
PAST = 12
FUTURE = 12
"""Numbers that a forecast is made from, and that it has."""

Counts = Sequence[tuple[float, int]]
"""A number of VMs and the time since which it holds, ascending."""


def sampled(counts: Counts, now_s: float) -> list[int]:
    """Return the numbers at the last ``PAST`` intervals, the present one last."""
    found: list[int] = []
    at = len(counts) - 1
    for number in range(PAST):
        at_s = now_s - number * INTERVAL_S
        while at > 0 and counts[at][0] > at_s:
            at -= 1
        if counts[at][0] > at_s:
            break
        found.append(counts[at][1])
    return found[::-1]


def predicted(samples: Sequence[int]) -> list[int]:
    """Return the numbers to expect at the next ``FUTURE`` intervals.

    Differences are a share of those before them, by least squares, without a trend that
    goes on for ever. No number is below 0 or above the largest sample.

    Args:
        samples: At equal intervals; the last one is the present.
    """
    steps = [after - before for before, after in pairwise(samples)]
    squares = sum(step * step for step in steps[:-1])
    share = sum(a * b for a, b in pairwise(steps)) / squares if squares else 0.0
    share = max(-1.0, min(1.0, share))
    level, step, most = (
        float(samples[-1]),
        float(steps[-1] if steps else 0),
        max(samples),
    )
    found = []
    for _ in range(FUTURE):
        step *= share
        level = max(0.0, min(float(most), level + step))
        found.append(round(level))
    return found


class LookAhead:
    """Trains most within the forecast of the next 12 minutes."""

    name = "12-minute look-ahead"
    restarts = False

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def recover(self, view: FleetView) -> Shape | None:
        """Return the shape to begin with."""
        return self._first(view, None)

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return the shape to begin with if it is another one."""
        first = self._first(view, view.shape)
        return None if first == view.shape else first

    def _first(self, view: FleetView, present: Shape | None) -> Shape | None:
        now = view.usable
        counts = [now, *predicted(sampled(view.counts, view.now_s))]
        best = self.shapes.best(now)
        if best is None or (best == present and set(counts) == {now}):
            return best
        sizes = {self.shapes.best(count) for count in counts if count <= now}
        shapes = {*sizes, present} - {None}
        profile = self.shapes.workload.profile
        pauses = {
            shape: view.costs.pause_s(shape, profile, moves=True)
            for shape in shapes
            if shape is not None
        }
        return _best_first(counts, pauses, present) or best


def _best_first(
    counts: Sequence[int], pauses_s: Mapping[Shape, float], present: Shape | None
) -> Shape | None:
    """Return the first of the shapes that together train most.

    Args:
        counts: VMs now, and at the end of every interval.
        pauses_s: The shapes to choose from, and what changing to each costs.
        present: The one that runs.
    """

    @cache
    def most(interval: int, before: Shape | None) -> tuple[float, Shape | None]:
        """Return the mini-batches from an interval on, and the shape that begins."""
        if interval == len(counts) - 1:
            return 0.0, None
        found: tuple[float, Shape | None] = most(interval + 1, None)[0], None
        had, has = counts[interval], counts[interval + 1]
        for shape, pause_s in pauses_s.items():
            if shape.slots > had:
                continue
            hit = _chance_of_hit(had, max(0, had - has), shape.slots)
            paused_s = pause_s * ((shape != before) + hit)
            trains_s = max(0.0, INTERVAL_S - paused_s)
            stays = shape if shape.slots <= has else None
            done = trains_s / shape.step_s + most(interval + 1, stays)[0]
            if done > found[0]:
                found = done, shape
        return found

    return most(0, present)[1]


def _chance_of_hit(vms: int, lost: int, used: int) -> float:
    """Return the probability that some of the lost VMs are of those that a plan uses."""
    return 1 - math.comb(vms - used, lost) / math.comb(vms, lost)
