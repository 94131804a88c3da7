"""The lines of a report's pictures: what was measured and billed, as points over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spottrain.cloud.port.provider import Offer
from spottrain.varuna_manager.reporting.history import PriceLine
from spottrain.varuna_manager.reporting.html.plot import Frame, Point
from spottrain.varuna_manager.reporting.series import thinned
from spottrain.varuna_manager.reporting.time_split import Interval, Rental

MOST_POINTS = 1024
"""Of one line."""
Bin = tuple[float, float, float, float]
"""When it begins, mean, lowest, highest: see ``series.Bins.means``."""


def whole(bins: Sequence[Bin], width_s: float, to_s: float) -> list[Point]:
    """Return the means; that of the last bin over the time that has passed of it."""
    points = [(at_s, mean) for at_s, mean, _, _ in bins]
    if points and (passed_s := to_s - points[-1][0]) < width_s:
        at_s, mean = points[-1]
        top = bins[-1][3]
        points[-1] = (at_s, min(top, mean * width_s / max(passed_s, 1e-6)))
    return points


def with_gaps(points: Sequence[Point], width_s: float) -> list[Point]:
    """Let a line fall to 0 where nothing is known."""
    filled: list[Point] = []
    for at_s, value in points:
        if filled and at_s - filled[-1][0] > 1.5 * width_s:
            filled.append((filled[-1][0] + width_s, 0.0))
        filled.append((at_s, value))
    return filled


def band(frame: Frame, bins: Sequence[Bin], width_s: float) -> str:
    """Return boxes from the slowest to the fastest mini-batch of each bin."""
    return "".join(
        f"M{frame.x(at_s):.1f} {frame.y(low):.1f}V{frame.y(high):.1f}"
        f"H{frame.x(at_s + width_s):.1f}V{frame.y(low):.1f}Z"
        for at_s, _, low, high in bins
        if high > low
    )


def _counted(changes: Iterable[tuple[float, float]]) -> list[Point]:
    """Return the running sum of changes, one point a moment."""
    points: list[Point] = []
    level = 0.0
    for at_s, change in sorted(changes):
        level += change
        if points and points[-1][0] == at_s:
            points[-1] = (at_s, level)
        else:
            points.append((at_s, level))
    return thinned(points, MOST_POINTS)


def held(rented: Iterable[Rental]) -> list[Point]:
    """Return how many VMs were rented from when on."""
    return _counted(
        change
        for one in rented
        for change in ((one.launched_s, 1.0), (one.end_s, -1.0))
    )


def working(stretches: Iterable[Interval]) -> list[Point]:
    """Return on how many VMs a generation trained from when on."""
    return _counted(
        change
        for one in stretches
        if one.doing == "training"
        for change in (
            (one.from_s, float(len(one.slots))),
            (one.to_s, -float(len(one.slots))),
        )
    )


def spent(
    rented: Iterable[Rental],
    usd: Callable[[Rental], float],
    beside: float,
    from_s: float,
    to_s: float,
) -> list[Point]:
    """Return dollars over time; each VM's money flows evenly while it is billed, and
    what storage and traffic cost, over the whole job."""
    changes: list[tuple[float, float]] = []
    for one in rented:
        if one.billed_s > 0:
            rate = usd(one) / one.billed_s
            changes.append((one.launched_s, rate))
            changes.append((one.launched_s + one.billed_s, -rate))
    span_s = max(to_s - from_s, 1.0)
    changes += [(from_s, beside / span_s), (to_s, -beside / span_s)]
    points: list[Point] = []
    level = rate = 0.0
    before_s = from_s
    for at_s, change in sorted(changes):
        level += rate * (at_s - before_s)
        rate, before_s = rate + change, at_s
        points.append((at_s, level))
    return thinned(points, MOST_POINTS)


def price_lines(
    rented: Iterable[Rental], prices: Iterable[PriceLine], most: int
) -> list[PriceLine]:
    """Return the offers on which most was spent, then the cheapest spot offers."""
    dollars: dict[tuple[str, str, str, bool], float] = {}
    for one in rented:
        key = _place(one.offer)
        dollars[key] = dollars.get(key, 0.0) + one.cost.usd

    def rank(line: PriceLine) -> tuple[float, bool, float]:
        usd = dollars.get(_place(line.offer), 0.0)
        return -usd, not line.offer.spot, line.points[-1][1]

    lines = [line for line in prices if line.points]
    return sorted(lines, key=rank)[:most]


def _place(offer: Offer) -> tuple[str, str, str, bool]:
    return offer.cloud, offer.zone, offer.instance_type, offer.spot
