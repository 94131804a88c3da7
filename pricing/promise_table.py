"""The promise on many markets, beside its baselines and the all-knowing bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean

from spottrain.pricing import promise_bound
from spottrain.pricing.promise_project import project
from spottrain.pricing.promise_replay import Outcome, View, play
from spottrain.pricing.promise_rules import RULES, Promise, standing
from spottrain.pricing.promise_terms import Projection
from spottrain.pricing.worlds import World

FREE = "no frictions"
"""Name of the policy in worlds whose VMs boot, join and leave at no cost."""
_LOOKS_AT = (0.9, 0.6, 0.3)
"""Shares of the work that are left when a projection is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """A projection, and what became of it."""

    projection: Projection
    finished_s: float
    usd: float
    """Spent from then on."""

    @property
    def finish_kept(self) -> bool:
        """Whether the finish lay in its interval."""
        finish = self.projection.finish_s
        return finish.low - 1e-6 <= self.finished_s <= finish.high + 1e-6

    @property
    def usd_kept(self) -> bool:
        """Whether the cost lay in its interval."""
        return self.projection.usd.low <= self.usd <= self.projection.usd.high + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All rules in one world."""

    world: str
    slack: float
    """Time to the deadline over the time of the fastest on-demand fleet."""
    bound_usd: float
    outcomes: tuple[Outcome, ...]
    """In the order of ``promise_rules.RULES``."""
    free: Outcome
    """The policy without frictions."""
    free_bound_usd: float
    foretold: tuple[Foretold, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rule over many worlds."""

    rule: str
    jobs: int
    in_time: int
    in_budget: int
    over_bound: float
    """Mean of cost over bound."""
    total_over_bound: float
    """Sum of costs over sum of bounds."""
    kept_over_bound: float
    """Costs of all jobs, for each that was in time, over the mean bound; infinite if none
    was. A job that is late has paid for nothing."""
    on_demand: float
    """On-demand, booting and pausing VMs' parts of the cost."""
    booting: float
    paused: float


class _Watched(Promise):
    """The policy, asked for projections on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Projection, float]] = []

    def wanted(self, view: View) -> Mapping[str, int]:
        """Return what the policy wants."""
        wanted = super().wanted(view)
        share = view.examples_left / view.world.examples
        number = len(self.told)
        if number < len(_LOOKS_AT) and share <= _LOOKS_AT[number]:
            told = project(
                standing(view), view.world.fleet, view.supplies, view.held, self.outlook
            )
            self.told.append((told, view.usd_spent))
        return wanted


def bound_usd(world: World) -> float:
    """Return what a job of ``world`` costs at the least."""
    spot = [
        promise_bound.Supply(lives=zone.lives, usd_per_hour=zone.usd_per_hour)
        for zone in world.zones
    ]
    on_demand = promise_bound.Supply(
        lives=None, usd_per_hour=(world.on_demand_usd_per_hour,)
    )
    return promise_bound.least_usd(
        [*spot, on_demand],
        world.fleet.examples_per_s,
        world.fleet.boot_s,
        world.examples,
        world.deadline_s,
    )


def examine(world: World) -> Case:
    """Play ``world`` under every rule."""
    watched = _Watched()
    ours = play(world, watched)
    told = tuple(
        Foretold(projection=told, finished_s=ours.finished_s, usd=ours.usd - spent)
        for told, spent in watched.told
    )
    free = replace(
        world, fleet=replace(world.fleet, boot_s=0.0, morph_s=0.0, lost_s=0.0)
    )
    return Case(
        world=world.name,
        slack=world.deadline_s / world.on_demand()[0],
        bound_usd=bound_usd(world),
        outcomes=(ours, *(play(world, rule()) for rule in RULES[1:])),
        free=play(free, Promise()),
        free_bound_usd=bound_usd(free),
        foretold=told,
    )


def examine_all(worlds: Sequence[World], processes: int) -> list[Case]:
    """Play all worlds, in so many processes."""
    if processes <= 1 or len(worlds) <= 1:
        return [examine(world) for world in worlds]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(examine, worlds, chunksize=4))


def rows(cases: Sequence[Case]) -> list[Row]:
    """Return a row for each rule, and one for the policy without frictions."""
    pairs = [
        [(case.outcomes[number], case.bound_usd) for case in cases]
        for number in range(len(RULES))
    ]
    found = [_row(RULES[n].name, pair) for n, pair in enumerate(pairs)]
    found.append(_row(FREE, [(case.free, case.free_bound_usd) for case in cases]))
    return found


def _row(rule: str, pairs: Sequence[tuple[Outcome, float]]) -> Row:
    usd = sum(outcome.usd for outcome, _ in pairs)
    bound = sum(least for _, least in pairs)
    in_time = sum(outcome.in_time for outcome, _ in pairs)
    return Row(
        rule=rule,
        jobs=len(pairs),
        in_time=in_time,
        in_budget=sum(outcome.in_budget for outcome, _ in pairs),
        over_bound=fmean(outcome.usd / least for outcome, least in pairs),
        total_over_bound=usd / bound,
        kept_over_bound=usd / bound * len(pairs) / in_time if in_time else math.inf,
        on_demand=sum(outcome.on_demand_usd for outcome, _ in pairs) / usd,
        booting=sum(outcome.booting_usd for outcome, _ in pairs) / usd,
        paused=sum(outcome.paused_usd for outcome, _ in pairs) / usd,
    )


def kept(foretold: Iterable[Foretold]) -> tuple[float, float]:
    """Return the shares of intervals that held: of the finish, and of the cost."""
    told = list(foretold)
    if not told:
        return math.nan, math.nan
    return fmean(one.finish_kept for one in told), fmean(one.usd_kept for one in told)
