"""Charts of what jobs have measured, over mini-batches: of one job, or several overlaid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spottrain.varuna_manager.jobs.measurements import CurvePoint, Measurements
from spottrain.varuna_manager.reporting.html import plot
from spottrain.varuna_manager.reporting.html.charts import COLOURS
from spottrain.varuna_manager.reporting.html.plot import Frame, Point
from spottrain.varuna_manager.reporting.series import downsampled

MAX_POINTS = 600
"""Of a curve: a page of a million mini-batches is as small as one of a thousand."""
_TICKS = 8
_FEW = 2
"""Points that are too few for a line."""
_DASH = 0.01
"""Length of what is drawn for each of them instead, as a share of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """What one job has measured, downsampled."""

    loss: Sequence[CurvePoint] = ()
    grad_norm: Sequence[CurvePoint] = ()
    learning_rate: Sequence[CurvePoint] = ()
    heldout: Mapping[str, Sequence[Point]]
    """(step, loss) by held-out set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFigure:
    """A chart and its legend: (CSS class, words) of each line."""

    title: str
    svg: str
    legend: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    name: str
    points: Sequence[Point]
    band: Sequence[CurvePoint] = ()
    """Range of the values that each point stands for."""


def read_curves(measurements: Measurements) -> Curves:
    """Return the curves of a job."""
    heldout: dict[str, list[Point]] = {}
    for one in measurements.evaluations():
        if math.isfinite(one.loss):
            heldout.setdefault(one.name, []).append((float(one.step), one.loss))
    return Curves(
        **measurements.curves(("loss", "grad_norm", "learning_rate"), MAX_POINTS),
        heldout={name: downsampled(line, MAX_POINTS) for name, line in heldout.items()},
    )


def figures(jobs: Mapping[str, Curves]) -> Iterator[CurveFigure]:
    """Yield the charts of one job, or of several whose curves are overlaid.

    Args:
        jobs: Curves by name; charts that would be empty are left out.
    """
    several = len(jobs) > 1
    losses = [
        _Line(
            name=name if several else "training",
            points=_means(curves.loss),
            band=() if several else curves.loss,
        )
        for name, curves in jobs.items()
    ]
    heldout = [
        _Line(name=f"{name}: {set_name}" if several else set_name, points=line)
        for name, curves in jobs.items()
        for set_name, line in curves.heldout.items()
    ]
    if several:
        yield from _figure("Training loss", "loss", losses)
        yield from _figure("Held-out loss", "heldout", heldout)
    else:
        yield from _figure("Loss", "loss", [*losses, *heldout])
    for title, key in (
        ("Gradient norm", "grad_norm"),
        ("Learning rate", "learning_rate"),
    ):
        lines = [
            _Line(
                name=name if several else title.lower(),
                points=_means(getattr(curves, key)),
            )
            for name, curves in jobs.items()
        ]
        yield from _figure(title, key.replace("_", ""), lines)


def _means(curve: Sequence[CurvePoint]) -> list[Point]:
    return [(point.step, point.mean) for point in curve]


def _figure(title: str, key: str, lines: Sequence[_Line]) -> Iterator[CurveFigure]:
    """Yield a chart of lines, if there is anything to draw."""
    lines = [line for line in lines if line.points]
    if not lines:
        return
    values = [value for line in lines for _, value in line.points]
    # The range of the means: one outlier would flatten all the rest.
    bottom, top = min(values), max(values)
    if top <= bottom:
        bottom, top = bottom - 0.5 * abs(bottom), top + (0.5 * abs(top) or 1.0)
    bottom, top, distance = plot.nice_range(bottom, top)
    steps = [step for line in lines for step, _ in line.points]
    frame = Frame(
        from_s=min(steps),
        to_s=max(max(steps), min(steps) + 1.0),
        top=top,
        bottom=bottom,
        height=220 if key == "loss" else 130,
    )
    numbers = range(round((top - bottom) / distance) + 1)
    digits = max(4, 2 + math.ceil(math.log10(max(-bottom, top) / distance)))  # all differ
    labels = [(v, f"{v:.{digits}g}") for v in (bottom + n * distance for n in numbers)]
    parts = [plot.axes(frame, labels, _ticks(frame))]
    for number, line in enumerate(lines):
        parts.append(plot.path(_band(frame, line.band), "band"))
        css = f"line c{number % COLOURS}"
        parts.append(plot.path(_path_of(frame, line), css, line.name))
    last = "; ".join(f"{line.name}: {line.points[-1][1]:.4g} at last" for line in lines)
    what = f"{title} over mini-batches, from {bottom:.4g} to {top:.4g}. {last}"
    legend = [(f"line c{n % COLOURS}", line.name) for n, line in enumerate(lines)]
    if any(line.band for line in lines):
        legend.append(("band", "range"))
    svg = plot.picture(frame, f"curve{key}", title, what, parts)
    yield CurveFigure(title=title, svg=svg, legend=legend)


def _path_of(frame: Frame, line: _Line) -> str:
    """Return a line; short ones where there are so few points that it would tell of a
    slope that nobody has measured."""
    if len(line.points) > _FEW:
        return plot.line_path(frame, line.points)
    half = _DASH * (frame.to_s - frame.from_s) / 2
    dashes = ([(x - half, y), (x + half, y)] for x, y in line.points)
    return "".join(plot.line_path(frame, dash) for dash in dashes)


def _band(frame: Frame, curve: Sequence[CurvePoint]) -> str:
    """Return the area between the lowest and the highest values."""
    if not any(point.high > point.low for point in curve):
        return ""
    above = [(point.step, point.high) for point in curve]
    below = [(point.step, point.low) for point in reversed(curve)]
    return f"{plot.line_path(frame, [*above, *below])}Z"


def _ticks(frame: Frame) -> list[tuple[float, str]]:
    """Return round steps with their labels."""
    distance = max(1.0, plot.nice_top((frame.to_s - frame.from_s) / _TICKS))
    first = math.ceil(frame.from_s / distance)
    last = math.floor(frame.to_s / distance)
    steps = (number * distance for number in range(first, last + 1))
    return [(step, f"{step:,.0f}") for step in steps if step == int(step)]
