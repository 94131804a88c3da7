"""The promise on many markets, beside its baselines and the bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean

from spottrain.pricing.deadline.forecast import forecast
from spottrain.pricing.deadline.model import Forecast
from spottrain.pricing.simulation import offline_optimum, online_bound
from spottrain.pricing.simulation.baselines import (
    RULES,
    CostOptimal,
    TimeOptimal,
    job_status,
)
from spottrain.pricing.simulation.replay import MarketView, SimulatedRun, play
from spottrain.pricing.simulation.scenarios import Scenario, prolonged

FREE = "no frictions"
"""Name of the policy in worlds whose VMs boot, join and leave at no cost."""
_LOOKS_AT = (0.9, 0.6, 0.3)
"""Shares of the work that are left when a projection is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOutcome:
    """A projection, and what became of it."""

    projection: Forecast
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

    scenario: str
    slack: float
    """Time to the deadline over the time of the fastest on-demand fleet."""
    offline_optimum_usd: float
    online_bound_usd: float | None
    """``promise_blind.least_usd``; None where there are several zones."""
    outcomes: tuple[SimulatedRun, ...]
    """In the order of ``promise_rules.RULES``."""
    free: SimulatedRun
    """The policy without frictions."""
    free_bound_usd: float
    predicted: tuple[ForecastOutcome, ...]
    predicted_time_optimal: tuple[ForecastOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """A rule over many worlds."""

    rule: str
    jobs: int
    in_time: int
    in_budget: int
    late_by: float | None
    """Of the jobs that were done late, the mean part of their time that they were late by;
    None if there were none."""
    never: int
    """Jobs that were given up."""
    over_bound: float
    """Mean of cost over bound; who is late pays until the work is done."""
    total_over_bound: float
    """Sum of costs over sum of bounds."""
    kept_over_bound: float
    """Costs of all jobs, for each that was in time, over the mean bound; infinite if none
    was. A job that is late has paid for nothing."""
    in_time_over_bound: float | None
    """Mean of cost over bound of the jobs that were in time; None if there were none."""
    ours_over_bound: float | None
    """What the promise takes for the same jobs."""
    on_demand: float
    """On-demand, booting and pausing VMs' parts of the cost."""
    booting: float
    paused: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineBoundRow:
    """The promise beside what costs least if nobody knows which VMs go; one zone each."""

    jobs: int
    over_bound: float
    blind_over_bound: float
    over_blind: float
    """Means over jobs."""


class _Watched:
    """A policy of ours, asked for projections on the way."""

    def __init__(self, rule: CostOptimal) -> None:
        self.rule, self.name = rule, rule.name
        self.told: list[tuple[Forecast, float]] = []

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return what the policy wants."""
        wanted = self.rule.wanted(view)
        share = view.examples_left / view.scenario.examples
        number = len(self.told)
        if number < len(_LOOKS_AT) and share <= _LOOKS_AT[number]:
            told = forecast(
                job_status(view),
                view.scenario.fleet,
                view.supplies,
                view.holdings,
                self.rule.outlook,
                cost_optimal=self.rule.cost_optimal,
            )
            self.told.append((told, view.usd_spent))
        return wanted


def _watch(
    scenario: Scenario, rule: CostOptimal
) -> tuple[SimulatedRun, tuple[ForecastOutcome, ...]]:
    """Return what comes of the job, and what came of each projection."""
    watched = _Watched(rule)
    outcome = play(scenario, watched)
    told = tuple(
        ForecastOutcome(
            projection=told,
            finished_s=outcome.finished_s,
            usd=outcome.usd - spent,
        )
        for told, spent in watched.told
    )
    return outcome, told


def offline_optimum_usd(scenario: Scenario) -> float:
    """Return what a job of ``scenario`` costs at the least."""
    spot = [
        offline_optimum.KnownSupply(lives=zone.lives, usd_per_hour=zone.usd_per_hour)
        for zone in scenario.zones
    ]
    on_demand = offline_optimum.KnownSupply(
        lives=None, usd_per_hour=(scenario.on_demand_usd_per_hour,)
    )
    return offline_optimum.least_usd(
        [*spot, on_demand],
        scenario.fleet.examples_per_s,
        scenario.fleet.boot_s,
        scenario.examples,
        scenario.deadline_s,
    )


def online_bound_usd(scenario: Scenario) -> float | None:
    """Return what it costs at the least not to know which VMs go; None: several zones."""
    if len(scenario.zones) > 1:
        return None
    (zone,), fleet = scenario.zones, scenario.fleet
    lives = [(from_s, until_s - scenario.notice_s) for from_s, until_s in zone.lives]
    return online_bound.least_usd(
        offline_optimum.KnownSupply(lives=lives, usd_per_hour=zone.usd_per_hour),
        online_bound.Job(
            examples_per_s=fleet.rates,
            examples=scenario.examples,
            deadline_s=scenario.deadline_s,
            on_demand_usd_per_hour=scenario.on_demand_usd_per_hour,
            boot_s=fleet.boot_s,
            morph_s=fleet.morph_s,
            lost_s=fleet.lost_s if scenario.notice_s < fleet.morph_s else 0.0,
        ),
    )


def evaluate(scenario: Scenario) -> Case:
    """Play ``scenario`` under every rule."""
    endless = prolonged(scenario)
    ours, told = _watch(endless, CostOptimal())
    soon, told_in_haste = _watch(endless, TimeOptimal())
    free = replace(
        scenario, fleet=replace(scenario.fleet, boot_s=0.0, morph_s=0.0, lost_s=0.0)
    )
    return Case(
        scenario=scenario.name,
        slack=scenario.deadline_s / scenario.on_demand()[0],
        offline_optimum_usd=offline_optimum_usd(scenario),
        online_bound_usd=online_bound_usd(scenario),
        outcomes=(ours, soon, *(play(endless, rule()) for rule in RULES[2:])),
        free=play(free, CostOptimal()),
        free_bound_usd=offline_optimum_usd(free),
        predicted=told,
        predicted_time_optimal=told_in_haste,
    )


def evaluate_all(scenarios: Sequence[Scenario], processes: int) -> list[Case]:
    """Play all worlds, in so many processes."""
    if processes <= 1 or len(scenarios) <= 1:
        return [evaluate(scenario) for scenario in scenarios]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(evaluate, scenarios, chunksize=2))


def rows(cases: Sequence[Case]) -> list[PolicyRow]:
    """Return a row for each rule, and one for the policy without frictions."""
    ours = [case.outcomes[0].usd / case.offline_optimum_usd for case in cases]
    found = [
        _row(
            rule.name,
            [(case.outcomes[n], case.offline_optimum_usd) for case in cases],
            ours,
        )
        for n, rule in enumerate(RULES)
    ]
    free = [(case.free, case.free_bound_usd) for case in cases]
    found.append(_row(FREE, free, ours))
    return found


def _row(
    rule: str, pairs: Sequence[tuple[SimulatedRun, float]], ours: Sequence[float]
) -> PolicyRow:
    """Return a row.

    Args:
        rule: Its name.
        pairs: Outcomes and bounds.
        ours: What the promise takes for the same jobs, over the bound.
    """
    usd = sum(outcome.usd for outcome, _ in pairs)
    bound = sum(least for _, least in pairs)
    over = [outcome.usd / least for outcome, least in pairs]
    kept = [n for n, (outcome, _) in enumerate(pairs) if outcome.in_time]
    late = [o.late_by for o, _ in pairs if o.finished and not o.in_time]
    return PolicyRow(
        rule=rule,
        jobs=len(pairs),
        in_time=len(kept),
        in_budget=sum(outcome.in_budget for outcome, _ in pairs),
        late_by=fmean(late) if late else None,
        never=sum(not outcome.finished for outcome, _ in pairs),
        over_bound=fmean(over),
        total_over_bound=usd / bound,
        kept_over_bound=usd / bound * len(pairs) / len(kept) if kept else math.inf,
        in_time_over_bound=fmean(over[n] for n in kept) if kept else None,
        ours_over_bound=fmean(ours[n] for n in kept) if kept else None,
        on_demand=sum(outcome.on_demand_usd for outcome, _ in pairs) / usd,
        booting=sum(outcome.booting_usd for outcome, _ in pairs) / usd,
        paused=sum(outcome.paused_usd for outcome, _ in pairs) / usd,
    )


def online_bound_row(cases: Iterable[Case]) -> OnlineBoundRow | None:
    """Return the row of the worlds of one zone; None if there are none."""
    triples = [
        (case.outcomes[0].usd, case.offline_optimum_usd, case.online_bound_usd)
        for case in cases
        if case.online_bound_usd is not None
    ]
    if not triples:
        return None
    return OnlineBoundRow(
        jobs=len(triples),
        over_bound=fmean(usd / bound for usd, bound, _ in triples),
        blind_over_bound=fmean(blind / bound for _, bound, blind in triples),
        over_blind=fmean(usd / blind for usd, _, blind in triples),
    )


def kept(predicted: Iterable[ForecastOutcome]) -> tuple[float, float]:
    """Return the shares of intervals that held: of the finish, and of the cost."""
    told = list(predicted)
    if not told:
        return math.nan, math.nan
    return fmean(one.finish_kept for one in told), fmean(one.usd_kept for one in told)
