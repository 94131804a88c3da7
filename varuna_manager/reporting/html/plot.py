"""Scales, ticks and SVG paths for charts over time, or over steps; pure.

Colours are CSS classes, so that the page around a chart decides on light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from spottrain.units import DAY_S, HOUR_S

Point = tuple[float, float]
"""A time in seconds, and a value."""

_NICE_S = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600),
    *(43200, 86400, 172800, 432000, 864000, 2592000),
)
"""Readable distances of ticks, in seconds."""
_MAX_TICKS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Maps times and values to a chart's coordinates, in units of its view box.

    Charts over steps have them where others have seconds.
    """

    from_s: float
    to_s: float
    """Later than ``from_s``."""
    top: float
    """The highest value; above ``bottom``."""
    bottom: float = 0.0
    height: int = 130
    width: int = 1000
    left: int = 86
    right: int = 14
    above: int = 14
    below: int = 20

    @property
    def base(self) -> int:
        """The coordinate of the lowest value."""
        return self.height - self.below

    @property
    def end(self) -> int:
        """The coordinate of ``to_s``."""
        return self.width - self.right

    def x(self, at_s: float) -> float:
        """Return the coordinate of a time, clipped to the frame."""
        share = (at_s - self.from_s) / (self.to_s - self.from_s)
        return self.left + min(1.0, max(0.0, share)) * (self.end - self.left)

    def y(self, value: float) -> float:
        """Return the coordinate of a value, clipped to the frame."""
        part = (value - self.bottom) / (self.top - self.bottom)
        share = min(1.0, max(0.0, part))
        return self.base - share * (self.base - self.above)


def nice_top(value: float) -> float:
    """Return the next round number that is not below ``value``."""
    if not (math.isfinite(value) and value > 0):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        (m * power for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if m * power >= value),
        10 * power,
    )


def nice_range(bottom: float, top: float) -> tuple[float, float, float]:
    """Return round numbers around a range, and a round distance of at most five ticks.

    Args:
        bottom: Its lowest value.
        top: Its highest, above ``bottom``.
    """
    distance = nice_top((top - bottom) / 3)
    first, last = math.floor(bottom / distance), math.ceil(top / distance)
    return first * distance, last * distance, distance


def time_ticks(span_s: float) -> list[float]:
    """Return the positions of an axis' ticks, in seconds after its start."""
    step = next((s for s in _NICE_S if span_s / s <= _MAX_TICKS), None)
    if step is None:
        step = _NICE_S[-1] * math.ceil(span_s / _NICE_S[-1] / _MAX_TICKS)
    return [i * float(step) for i in range(int(span_s / step) + 1)]


def elapsed(seconds: float, step_s: float) -> str:
    """Return a tick's label, as coarse as the distance between ticks allows."""
    if step_s >= DAY_S:
        return f"{seconds / DAY_S:.0f} d"
    if step_s >= 3600:
        return f"{seconds / HOUR_S:.0f} h"
    hours, minutes = divmod(round(seconds / 60), 60)
    if step_s >= 60:
        return f"{hours}:{minutes:02d}" if hours else f"{minutes} min"
    return f"{seconds:.0f} s"


def step_path(frame: Frame, points: Sequence[Point], until_s: float) -> str:
    """Return a step line: each value holds until the next one."""
    path = ""
    for at_s, value in points:
        x, y = frame.x(at_s), frame.y(value)
        path += f"H{x:.1f}V{y:.1f}" if path else f"M{x:.1f} {y:.1f}"
    return f"{path}H{frame.x(until_s):.1f}" if path else ""


def line_path(frame: Frame, points: Sequence[Point]) -> str:
    """Return a line that joins points."""
    joined = "L".join(f"{frame.x(at_s):.1f} {frame.y(v):.1f}" for at_s, v in points)
    return f"M{joined}" if joined else ""


def area_path(frame: Frame, points: Sequence[Point], until_s: float) -> str:
    """Return the area under a ``step_path``."""
    if not points:
        return ""
    begin = frame.x(points[0][0])
    return f"{step_path(frame, points, until_s)}V{frame.base}H{begin:.1f}Z"


def path(data: str, css: str, title: str = "") -> str:
    """Return a path element with a hover title; empty if there is nothing to draw."""
    if not data:
        return ""
    title_text = f"<title>{escape(title)}</title></path>" if title else "</path>"
    return f'<path class="{css}" d="{data}">{title_text}'


def text(x: float, y: float, words: str, css: str = "tick") -> str:
    """Return a text element."""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def axes(
    frame: Frame,
    values: Iterable[tuple[float, str]],
    ticks: Iterable[tuple[float, str]] | None = None,
) -> str:
    """Return grid and labels: the given values on the left, the axis below.

    Args:
        frame: The chart's frame.
        values: With their labels.
        ticks: Places on the axis, with their labels; by default times since its start.
    """
    parts = []
    for value, label in values:
        y = frame.y(value)
        parts.append(path(f"M{frame.left} {y:.1f}H{frame.end}", "grid"))
        parts.append(text(frame.left - 8, y + 4, label, "tick value"))
    for place, label in _since_start(frame) if ticks is None else ticks:
        x = frame.x(place)
        parts.append(path(f"M{x:.1f} {frame.above}V{frame.base}", "grid"))
        parts.append(text(x, frame.base + 15, label, "tick time"))
    return "".join(parts)


def _since_start(frame: Frame) -> Iterable[tuple[float, str]]:
    ticks = time_ticks(frame.to_s - frame.from_s)
    step_s = ticks[1] if len(ticks) > 1 else frame.to_s - frame.from_s
    return [(frame.from_s + s, elapsed(s, step_s)) for s in ticks]


def picture(frame: Frame, name: str, title: str, what: str, parts: Iterable[str]) -> str:
    """Return a complete inline SVG, accessible to screen readers.

    Args:
        frame: The chart's frame.
        name: Unique on the page: letters and digits.
        what: A description of what it shows.
        parts: Its elements.
    """
    return (
        f'<svg role="img" viewBox="0 0 {frame.width} {frame.height}" '
        f'aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title>'
        f'<desc id="{name}-d">{escape(what)}</desc>'
        f"{''.join(parts)}</svg>"
    )
