"""Downsampled time series, which keep the extremes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
"""A time, and the value that holds from it on."""


@dataclass(slots=True)
class Bin:
    """A value during one interval of time."""

    low: float
    high: float
    area: float
    """The value times the seconds for which it was known."""


@dataclass(slots=True)
class Bins:
    """A value over time in bins of equal width, which doubles when there are too many."""

    max_bins: int = 1024
    """Largest number of bins; even."""
    width_s: float = 1.0
    start_s: float | None = None
    """Start of bin 0; None while there are no values."""
    bins: dict[int, Bin] = field(default_factory=dict)

    def add(self, from_s: float, to_s: float, value: float) -> None:
        """Record that the value was ``value`` from one time to a later one.

        Times before the first one recorded are ignored.
        """
        if self.start_s is None:
            self.start_s = from_s
        start_s = self.start_s
        from_s = max(from_s, start_s)
        if to_s <= from_s:
            return
        while to_s - start_s > self.max_bins * self.width_s:
            self._double()
        number = int((from_s - start_s) / self.width_s)
        while from_s < to_s:
            end_s = min(to_s, start_s + (number + 1) * self.width_s)
            if end_s > from_s:
                area = value * (end_s - from_s)
                _merge(self.bins, number, Bin(value, value, area))
                from_s = end_s
            number += 1

    def means(self) -> list[tuple[float, float, float, float]]:
        """Return (begin_s, mean, low, high) of every bin with a value.

        The mean is over the whole bin: where nothing was recorded, the value was 0.
        """
        start_s = self.start_s or 0.0
        return [
            (start_s + n * self.width_s, b.area / self.width_s, b.low, b.high)
            for n, b in sorted(self.bins.items())
        ]

    def _double(self) -> None:
        self.width_s *= 2
        merged: dict[int, Bin] = {}
        for number, one in self.bins.items():
            _merge(merged, number // 2, one)
        self.bins = merged


def _merge(bins: dict[int, Bin], number: int, one: Bin) -> None:
    if (known := bins.get(number)) is None:
        bins[number] = one
        return
    known.low = min(known.low, one.low)
    known.high = max(known.high, one.high)
    known.area += one.area


def downsampled(points: Sequence[Point], max_points: int) -> list[Point]:
    """Return at most ``max_points`` points, with the first, the last and the extremes.

    Of each run of neighbours the lowest and the highest stay.

    Args:
        points: In order of time.
        max_points: 4 or more.
    """
    if len(points) <= max_points:
        return list(points)
    inner = points[1:-1]
    run = -(-len(inner) // ((max_points - 2) // 2))
    kept = [points[0]]
    for begin in range(0, len(inner), run):
        neighbours = range(begin, min(begin + run, len(inner)))
        ends = {
            min(neighbours, key=lambda i: inner[i][1]),
            max(neighbours, key=lambda i: inner[i][1]),
        }
        kept += [inner[i] for i in sorted(ends)]
    return [*kept, points[-1]]
