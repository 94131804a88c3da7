"""How well the intervals of forecasts hold: coverage, how sure that is, and their score.

Forecasts of one market share its luck, so all that is drawn or left out here is a whole
market. Corrected intervals come from the other markets only (conformal prediction with one
market left out; Lei et al., "Distribution-Free Predictive Inference", 2018).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from spottrain.pricing.deadline.model import Interval

LEVEL = 0.9
"""Coverage that the intervals of forecasts are made for."""
RESAMPLES = 1000
"""Draws of the markets for the interval of a coverage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """An interval, what became of it, and the market it was made in."""

    market: str
    interval: Interval
    actual: float

    @property
    def is_sharp(self) -> bool:
        """Return whether the interval has two finite sides, so that it can be scaled."""
        one = self.interval
        return one.low < one.expected < one.high < math.inf

    def position(self) -> float:
        """Return where the actual value lies: -1 and 1 are the ends, 0 is expected."""
        above = self.actual - self.interval.expected
        return above / self._side(above)

    def scaled(self, low: float, high: float) -> Foretold:
        """Return it with the interval between two positions."""
        expected = self.interval.expected
        ends = [expected + where * self._side(where) for where in (low, high)]
        interval = Interval(low=ends[0], expected=expected, high=ends[1])
        return Foretold(market=self.market, interval=interval, actual=self.actual)

    def is_kept(self) -> bool:
        """Return whether the actual value is in the interval."""
        slip = 1e-9 * abs(self.actual)
        return self.interval.low - slip <= self.actual <= self.interval.high + slip

    def score(self, level: float) -> float:
        """Return the interval score (Gneiting and Raftery, 2007, eq. 43) as a share of the
        actual value: the width, and 2 / (1 - level) times what lies outside."""
        low, high = self.interval.low, self.interval.high
        outside = max(0.0, low - self.actual) + max(0.0, self.actual - high)
        return (high - low + 2 / (1 - level) * outside) / self.actual

    def _side(self, above: float) -> float:
        one = self.interval
        return one.high - one.expected if above > 0 else one.expected - one.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Intervals of several markets."""

    level: float
    """Coverage that they were made for."""
    forecasts: int
    kept: float
    """Share of the intervals that held."""
    kept_low: float
    kept_high: float
    """90 % interval of that share, over draws of the markets."""
    score: float
    """Mean interval score; less is better."""


def coverage(foretold: Sequence[Foretold], level: float = LEVEL) -> Coverage | None:
    """Return the coverage of intervals; None if there are none."""
    if not foretold:
        return None
    by_market = _by_market(foretold)
    draw = random.Random("coverage")
    groups = list(by_market.values())
    drawn = sorted(
        fmean(one.is_kept() for group in draw.choices(groups, k=len(groups)) for one in group)
        for _ in range(RESAMPLES)
    )
    return Coverage(
        level=level,
        forecasts=len(foretold),
        kept=fmean(one.is_kept() for one in foretold),
        kept_low=drawn[round(0.05 * (RESAMPLES - 1))],
        kept_high=drawn[round(0.95 * (RESAMPLES - 1))],
        score=fmean(one.score(level) for one in foretold),
    )


def corrected(foretold: Sequence[Foretold], level: float) -> list[Foretold]:
    """Return the intervals as the other markets' outcomes would have made them.

    Those of a single market, which has no others, and those without width are left out.
    """
    by_market = _by_market([one for one in foretold if one.is_sharp])
    found = []
    for market, own in by_market.items():
        others = sorted(
            one.position() for name, group in by_market.items() if name != market for one in group
        )
        if not others:
            continue
        # The rank with one to come: so many positions of ``others`` and it lie below.
        rank = math.ceil((len(others) + 1) * (1 + level) / 2)
        high = others[min(rank, len(others)) - 1]
        low = others[max(len(others) - rank, 0)]
        found += [one.scaled(low, high) for one in own]
    return found


def _by_market(foretold: Sequence[Foretold]) -> dict[str, list[Foretold]]:
    groups: dict[str, list[Foretold]] = {}
    for one in foretold:
        groups.setdefault(one.market, []).append(one)
    return groups
