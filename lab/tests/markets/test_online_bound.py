"""The bound of those who do not know which VMs go, against every way there is."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from spottrain_lab.markets.baselines import (
    CostOptimal,
    SpotOnlyWait,
    TimeOptimal,
)
from spottrain_lab.markets.evaluate import online_bound_usd
from spottrain_lab.markets.offline_optimum import KnownSupply
from spottrain_lab.markets.online_bound import CELLS_A_BOOT, Job, min_usd
from spottrain_lab.markets.replay import play
from spottrain_lab.markets.scenarios import synthetic

Point = tuple[float, float]
"""Examples and dollars on the mean."""
BOOT_S = 200.0
CELL_S = BOOT_S / CELLS_A_BOOT
USD, ON_DEMAND_USD = 1.0, 2.5


def job(rates: tuple[float, ...], cells: int, **changes: Any) -> Job:
    made = Job(
        examples_per_s=rates,
        examples=1.0,
        deadline_s=BOOT_S + cells * CELL_S,
        on_demand_usd_per_hour=ON_DEMAND_USD,
        boot_s=BOOT_S,
        morph_s=20.0,
        lost_s=15.0,
    )
    return replace(made, **changes)


def zone(lives: Iterable[tuple[int, int]]) -> KnownSupply:
    """``lives``: the cells in which VMs can train."""
    spans = [(a * CELL_S, BOOT_S + b * CELL_S) for a, b in lives]
    return KnownSupply(lives=spans, usd_per_hour=[USD])


class Ways:
    """All that can be reached, by playing every choice forward from every fleet."""

    def __init__(self, lives: list[tuple[int, int]], what: Job, cells: int) -> None:
        self.lives, self.job, self.cells = lives, what, cells
        self.max_vms = len(what.examples_per_s) - 1
        self.sizes = range(self.max_vms + 1)
        self.reach = functools.cache(self._reach)

    def rate(self, spot: int, on_demand: int) -> float:
        return self.job.examples_per_s[min(self.max_vms, spot + on_demand)]

    def _reach(self, cell: int, spot: int, on_demand: int) -> tuple[Point, ...]:
        """What comes of a fleet that stands before a moment, on the lower hull."""
        if cell == self.cells:
            return ((0.0, 0.0),)
        found = [*self.unmoved(cell, spot, on_demand)]
        for held, kept in itertools.product(range(spot + 1), range(on_demand + 1)):
            found += self.moved(cell, held, kept)
        return hull(found)

    def unmoved(self, cell: int, spot: int, on_demand: int) -> list[Point]:
        """Nothing is changed before it is seen what goes."""
        calm = self.landed(cell, spot, on_demand)
        if spot <= self.there(cell):
            calm += self.then(cell, spot, on_demand, paused=False)
        hurt = self.landed(cell, max(0, spot - 1), on_demand)
        return self.mixed(cell, spot, self.rate(spot, on_demand), calm, hurt)

    def moved(self, cell: int, spot: int, on_demand: int) -> list[Point]:
        """Down to so many before, up to more at the moment itself."""
        found = []
        for more, extra in itertools.product(self.sizes[spot:], self.sizes[on_demand:]):
            usd = (more - spot) * USD + (extra - on_demand) * ON_DEMAND_USD
            calm, hurt = (self.landed(cell, max(0, count), extra) for count in (more, more - 1))
            mixed = self.mixed(cell, spot, self.rate(spot, on_demand), calm, hurt)
            found += [(done, cost + usd * BOOT_S / 3600) for done, cost in mixed]
        return found

    def landed(self, cell: int, spot: int, on_demand: int) -> list[Point]:
        """A pause with so many at the most."""
        return [
            point
            for fewer, less in itertools.product(range(spot + 1), range(on_demand + 1))
            if fewer <= self.there(cell)
            for point in self.then(cell, fewer, less, paused=True)
        ]

    def then(self, cell: int, spot: int, on_demand: int, *, paused: bool) -> list[Point]:
        seconds = CELL_S - (self.job.morph_s if paused else 0.0)
        done = self.rate(spot, on_demand) * seconds
        usd = (spot * USD + on_demand * ON_DEMAND_USD) * CELL_S / 3600
        later = self.reach(cell + 1, spot, on_demand)
        return [(done + more, usd + cost) for more, cost in later]

    def mixed(
        self, cell: int, spot: int, rate: float, calm: list[Point], hurt: list[Point]
    ) -> list[Point]:
        chance = self.unhurt(cell, spot)
        lost = (1 - chance) * rate * self.job.lost_s
        return [
            (
                chance * a + (1 - chance) * b - lost,
                chance * x + (1 - chance) * y,
            )
            for (a, x), (b, y) in itertools.product(hull(calm), hull(hurt))
        ]

    def there(self, cell: int) -> int:
        return sum(a <= cell < b for a, b in self.lives)

    def unhurt(self, cell: int, held: int) -> float:
        """The share of draws of those who are held that the market leaves alone."""
        goes = [b == cell for a, b in self.lives if a <= cell <= b]
        draws = list(itertools.combinations(goes, held))
        return fmean(not any(draw) for draw in draws) if draws else 0.0


def hull(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no mean of others beats: as much work for less."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p[0], p[1])):
        if best and point[1] >= best[-1][1]:
            continue
        while len(best) > 1 and cross(best[-2], best[-1], point) <= 0:
            best.pop()
        best.append(point)
    return tuple(best)


def cross(a: Point, b: Point, c: Point) -> float:
    """Above 0 if ``b`` is more expensive than its like between ``a`` and ``c`` is not."""
    return (a[1] - b[1]) * (b[0] - c[0]) - (b[1] - c[1]) * (a[0] - b[0])


def cheapest(points: tuple[Point, ...], examples: float) -> float:
    for (more, high), (less, low) in itertools.pairwise(points):
        if less <= examples <= more:
            return low + (high - low) * (examples - less) / (more - less)
    return math.inf


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_minimum_over_all_strategies(seed: int) -> None:
    draw = random.Random(seed)
    cells = 3
    rates = (0.0, 1.0) if seed % 2 else (0.0, 1.0, 1.7)
    lives = [
        (start, draw.randint(start + 1, cells + 1))
        for start in range(cells)
        for _ in range(draw.randint(0, 2))
    ]
    what = job(rates, cells)
    points = Ways(lives, what, cells).reach(0, 0, 0)
    for share in (0.3, 0.6, 0.9):
        examples = share * points[0][0]
        found = min_usd(zone(lives), replace(what, examples=examples))
        least = cheapest(points, examples)
        assert found <= least + 1e-9
        assert found >= 0.98 * least


def test_a_vm_that_may_be_lost_costs_more_than_one_that_stays() -> None:
    what = job((0.0, 1.0), 20, examples=1200.0)
    calm = min_usd(zone([(0, 20)]), what)
    rough = min_usd(zone([(n, n + 2) for n in range(0, 20, 2)]), what)
    assert rough > calm
    bound = min_usd(zone([(n, n + 2) for n in range(0, 20, 2)]), replace(what, lost_s=0.0))
    assert calm < bound < rough


def test_without_spot_vms_it_is_what_on_demand_vms_cost() -> None:
    what = job((0.0, 1.0), 20, examples=1980.0)
    usd = ON_DEMAND_USD * (BOOT_S + 20.0 + 1980.0) / 3600
    assert min_usd(zone([]), what) == pytest.approx(usd, rel=0.02)
    assert min_usd(zone([]), what) <= usd * (1 + 1e-9)


@pytest.mark.rotated
@pytest.mark.parametrize("seed", [10006, 10024])
def test_no_rule_costs_less_on_average_over_the_draws(seed: int) -> None:
    scenario = synthetic(seed)
    (place,) = scenario.zones
    least = online_bound_usd(scenario)
    assert least is not None
    draws = [replace(scenario, zones=(replace(place, name=f"draw {n}"),)) for n in range(2)]
    for rule in (CostOptimal, TimeOptimal, SpotOnlyWait):
        outcomes = [play(drawn, rule()) for drawn in draws]
        if all(outcome.in_time for outcome in outcomes):
            assert fmean(outcome.usd for outcome in outcomes) >= least
