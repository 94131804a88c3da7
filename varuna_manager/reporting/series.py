"""Long series in little memory: neighbours are merged, and no extreme is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
"""A moment, and the value that holds from it on."""


@dataclass(slots=True)
class Bin:
    """What a value did in one stretch of time."""

    low: float
    high: float
    area: float
    """The value times the seconds for which it was known."""


class Bins:
    """A value over time in bins of one width, which doubles when they become many.

    Args:
        most: Bins are never more than this; even.
        width_s: Of a bin at first.
    """

    def __init__(self, most: int = 1024, width_s: float = 1.0) -> None:
        self.width_s = width_s
        self.start_s: float | None = None
        """Where bin 0 begins; None as long as there is nothing."""
        self.bins: dict[int, Bin] = {}
        self._most = most

    def add(self, from_s: float, to_s: float, value: float) -> None:
        """Note that the value was ``value`` from one moment to a later one.

        Moments before the first one that was ever noted are left out.
        """
        if self.start_s is None:
            self.start_s = from_s
        start_s = self.start_s
        from_s = max(from_s, start_s)
        if to_s <= from_s:
            return
        while to_s - start_s > self._most * self.width_s:
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
        """Return (begin_s, mean, low, high) of every bin in which there was anything.

        The mean is over the whole bin: where nothing was noted, the value was 0.
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


def downsampled(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most ``most`` of the points of a line, its first, last and extremes too.

    Of each run of neighbours the lowest and the highest stay.

    Args:
        points: By time.
        most: 4 or more.
    """
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    run = -(-2 * len(inner) // (most - 2))
    kept = [points[0]]
    for begin in range(0, len(inner), run):
        neighbours = range(begin, min(begin + run, len(inner)))
        ends = {
            min(neighbours, key=lambda i: inner[i][1]),
            max(neighbours, key=lambda i: inner[i][1]),
        }
        kept += [inner[i] for i in sorted(ends)]
    return [*kept, points[-1]]
