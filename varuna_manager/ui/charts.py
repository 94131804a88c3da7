"""What the charts of a job's page are drawn from, as JSON data: the lines of its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from spottrain.varuna_manager.reporting.html.charts import (
    MAX_HEADROOM,
    MAX_POINTS,
    Scene,
    budget_line,
    money_lines,
    predicted,
    throughput_line,
)
from spottrain.varuna_manager.reporting.html.curves import Curves
from spottrain.varuna_manager.reporting.series import Point, downsampled

Chart = dict[str, Any]
"""``title``, ``axis`` (``step``, or ``time``: seconds since the submission) and ``lines``: each
has a ``name``, a ``colour`` (number of a CSS variable), ``x``, ``y``, and ``steps`` if a value
holds until the next one."""

_GAP_S = 1e-3
"""After which a line that has ended is no more."""


def charts(scene: Scene, curves: Curves) -> list[Chart]:
    """Return the charts of a job that have something to show."""
    found = [_loss(curves), _throughput(scene), _money(scene)]
    return [chart for chart in found if any(line["x"] for line in chart["lines"])]


def _loss(curves: Curves) -> Chart:
    lines = [_line("training", 0, [(one.step, one.mean) for one in curves.loss])]
    for number, (name, points) in enumerate(curves.heldout.items(), start=1):
        lines.append(_line(name, number, points))
    return {"title": "Loss", "axis": "step", "lines": lines}


def _throughput(scene: Scene) -> Chart:
    points = downsampled(throughput_line(scene), MAX_POINTS)
    lines = [_line("measured", 0, _since(scene, points))]
    for number, name in enumerate(("predicted", "predicted, fastest")):
        if line := list(_predictions(scene, number)):
            lines.append(_line(name, 1, _since(scene, line), steps=True))
    return {"title": "Examples per second", "axis": "time", "lines": lines}


def _predictions(scene: Scene, number: int) -> Iterator[tuple[float, float | None]]:
    """Yield what was predicted for each plan, and nothing where one ended.

    Args:
        number: 0: all that was predicted, or the lower end of a range; 1: the upper end.
    """
    for plan in scene.plans:
        speeds = predicted(scene, plan)
        if number < len(speeds):
            end_s = plan["started_at_s"] + plan["ran_s"]
            yield plan["started_at_s"], speeds[number]
            yield end_s, speeds[number]
            yield end_s + _GAP_S, None


def _money(scene: Scene) -> Chart:
    spent, on_demand = money_lines(scene)
    lines = [
        _line("spent", 0, _since(scene, spent)),
        _line("same on demand", 2, _since(scene, on_demand)),
    ]
    budgets = budget_line(scene)
    most = max((usd for line in (spent, on_demand) for _, usd in line), default=0.0)
    if budgets and max(usd for _, usd in budgets) < MAX_HEADROOM * most:
        last = [(scene.to_s, budgets[-1][1])]
        lines.append(_line("budget", 1, _since(scene, [*budgets, *last]), steps=True))
    return {"title": "Dollars", "axis": "time", "lines": lines}


def _since(
    scene: Scene, points: Iterable[tuple[float, float | None]]
) -> list[tuple[float, float | None]]:
    return [(at_s - scene.from_s, value) for at_s, value in points]


def _line(
    name: str,
    colour: int,
    points: Sequence[tuple[float, float | None]] | Sequence[Point],
    *,
    steps: bool = False,
) -> dict[str, Any]:
    # A chart has one value at a place: of several the last.
    by_x = dict(points)
    return {
        "name": name,
        "colour": colour,
        "steps": steps,
        "x": list(by_x),
        "y": list(by_x.values()),
    }
