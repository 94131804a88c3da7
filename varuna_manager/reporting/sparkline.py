"""Numbers as a line of text; prices over time, as such a line and as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from spottrain.pricing.prices.price import Price
from spottrain.varuna_manager.reporting.html.plot import Frame, nice_top, step_path

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT, _MARGIN, _LINE = 800, 320, 60, 18
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def usd_at(series: Sequence[Price], at_s: float) -> float | None:
    """Return the price at a moment: the newest one that had begun by then."""
    begun = [price for price in series if price.since_s <= at_s]
    return begun[-1].usd_per_hour if begun else None


def sparkline(series: Sequence[Price], from_s: float, to_s: float, width: int = 12) -> str:
    """Return a price over time as one line of text; blank where it is unknown.

    Args:
        series: Prices of one offer, oldest first.
        from_s: Seconds since the epoch; so is to_s.
        to_s: The right end.
        width: In characters.
    """
    step_s = (to_s - from_s) / max(1, width - 1)
    return bars([usd_at(series, from_s + i * step_s) for i in range(width)])


def bars(values: Sequence[float | None]) -> str:
    """Return numbers as one line of text, a character each; blank for ``None``."""
    seen = [value for value in values if value is not None]
    low, span = (min(seen), max(seen) - min(seen)) if seen else (0.0, 0.0)
    return "".join(" " if value is None else _BARS[_level(value - low, span)] for value in values)


def svg(series: Mapping[str, Sequence[Price]], from_s: float, to_s: float) -> str:
    """Return an SVG chart of prices over time, one step line per name.

    Args:
        series: Prices by name, oldest first, USD per hour.
        from_s: Left end, seconds since the epoch.
        to_s: Right end, later.
    """
    top = nice_top(max((p.usd_per_hour for line in series.values() for p in line), default=1.0))
    frame = Frame(
        from_s=from_s,
        to_s=to_s,
        top=top,
        width=_WIDTH,
        height=_HEIGHT,
        left=_MARGIN,
        right=20,
        above=20,
        below=40,
    )
    height = _HEIGHT + _LINE * len(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">',
        _stroke(f"M{_MARGIN} 20V{frame.base}H{frame.end}", "#888"),
        _text(8, 24, f"${top:,g}"),
        _text(8, frame.base, "$0"),
        _text(_MARGIN, _HEIGHT - 20, _day(from_s)),
        _text(_WIDTH - 100, _HEIGHT - 20, _day(to_s)),
    ]
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(price.since_s, price.usd_per_hour) for price in line]
        parts.append(_stroke(step_path(frame, points, to_s), colour))
        y = _HEIGHT + _LINE * number
        parts.append(_text(_MARGIN, y, name, colour))
    return "\n".join([*parts, "</svg>\n"])


def _level(above: float, span: float) -> int:
    return round(above / span * (len(_BARS) - 1)) if span > 0 else 0


def _text(x: float, y: float, text: str, colour: str = "#333") -> str:
    font = 'font-family="sans-serif" font-size="12"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {font}>{escape(text)}</text>'


def _stroke(path: str, colour: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}"/>'


def _day(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M}"
