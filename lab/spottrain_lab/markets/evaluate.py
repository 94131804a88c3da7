"""The deadline policy on many markets, beside its baselines and the bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean

from spottrain.pricing.deadline.forecast import forecast
from spottrain.pricing.deadline.model import Forecast
from spottrain.pricing.deadline.rolling import Rolling, is_due, note
from spottrain_lab.markets import baselines, offline_optimum, online_bound
from spottrain_lab.markets.coverage import Foretold
from spottrain_lab.markets.replay import (
    FleetRule,
    MarketView,
    SimulatedRun,
    play,
)
from spottrain_lab.markets.scenarios import Scenario, prolonged

FREE = "no frictions"
"""Name of the policy in scenarios whose VMs boot, join and leave at no cost."""
_FORECASTS_AT = (0.9, 0.6, 0.3)
"""Shares of the work that are left when a forecast is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOutcome:
    """A forecast, and what became of it."""

    forecast: Forecast
    now_s: float
    """When it was made."""
    finished_s: float
    usd: float
    """Spent after the forecast."""

    @property
    def finish_kept(self) -> bool:
        """Return whether the finish was in its interval."""
        finish = self.forecast.finish_s
        return finish.low - 1e-6 <= self.finished_s <= finish.high + 1e-6

    @property
    def usd_kept(self) -> bool:
        """Return whether the cost was in its interval."""
        return self.forecast.usd.low <= self.usd <= self.forecast.usd.high + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All rules in one scenario."""

    scenario: str
    slack: float
    """Time to the deadline over the time of the fastest on-demand fleet."""
    on_demand_usd: float
    """Cost of that fleet."""
    offline_optimum_usd: float
    online_bound_usd: float | None
    """See ``online_bound``; None where there are several zones."""
    outcomes: tuple[SimulatedRun, ...]
    """In the order of ``baselines.RULES``."""
    free: SimulatedRun
    """The policy without frictions."""
    free_bound_usd: float
    forecasts: tuple[ForecastOutcome, ...]
    time_optimal_forecasts: tuple[ForecastOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """A rule over many scenarios."""

    rule: str
    jobs: int
    in_time: int
    in_budget: int
    late_by: float | None
    """How late the late jobs were: mean share of their time; None if there were none."""
    never: int
    """Jobs that never finished."""
    over_bound: float
    """Mean of cost over bound; late jobs pay until the work is done."""
    total_over_bound: float
    """Sum of costs over sum of bounds."""
    kept_over_bound: float
    """Costs of all jobs, per job that was in time, over the mean bound; infinite if none
    was. A late job has paid for nothing."""
    in_time_over_bound: float | None
    """Mean of cost over bound of the jobs that were in time; None if there were none."""
    ours_over_bound: float | None
    """The same for the cost-optimal deadline policy, on the same jobs."""
    max_over_on_demand: float
    """The largest cost, over that of the whole fleet on demand."""
    on_demand: float
    """On-demand, booting and pausing VMs' parts of the cost."""
    booting: float
    paused: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineBoundRow:
    """The deadline policy beside the online bound, in scenarios of one zone."""

    jobs: int
    over_bound: float
    online_over_bound: float
    over_online: float
    """Means over jobs."""


class _WithForecasts:
    """A deadline policy, with forecasts made on the way."""

    def __init__(self, rule: baselines.CostOptimal) -> None:
        self.rule, self.name = rule, rule.name
        self.forecasts: list[tuple[Forecast, MarketView]] = []
        self.rolling: Rolling | None = None

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return the VMs that the policy wants, by supply."""
        wanted = self.rule.wanted(view)
        share = view.examples_left / view.scenario.examples
        number = len(self.forecasts)
        if is_due(self.rolling, view.examples_left):
            plain = self._forecast(view, None)
            left, spent = view.examples_left, view.usd_spent
            self.rolling = note(self.rolling, plain, left, view.now_s, spent)
        if number < len(_FORECASTS_AT) and share <= _FORECASTS_AT[number]:
            found = self._forecast(view, self.rolling)
            self.forecasts.append((found, view))
        return wanted

    def _forecast(self, view: MarketView, rolling: Rolling | None) -> Forecast:
        return forecast(
            baselines.job_status(view),
            view.scenario.fleet,
            view.supplies,
            view.holdings,
            self.rule.outlook,
            cost_optimal=self.rule.cost_optimal,
            rolling=rolling,
            usd_spent=view.usd_spent,
        )


def watch(
    scenario: Scenario, rule: baselines.CostOptimal
) -> tuple[SimulatedRun, tuple[ForecastOutcome, ...]]:
    """Return the run of the job, and its forecasts with their outcomes."""
    watched = _WithForecasts(rule)
    outcome = play(scenario, watched)
    forecasts = tuple(
        ForecastOutcome(
            forecast=found,
            now_s=view.now_s,
            finished_s=outcome.finished_s,
            usd=outcome.usd - view.usd_spent,
        )
        for found, view in watched.forecasts
    )
    return outcome, forecasts


def offline_optimum_usd(scenario: Scenario) -> float:
    """Return the offline optimum of the job's cost."""
    spot = [
        offline_optimum.KnownSupply(lives=zone.lives, usd_per_hour=zone.usd_per_hour)
        for zone in scenario.zones
    ]
    on_demand = offline_optimum.KnownSupply(
        lives=None, usd_per_hour=(scenario.on_demand_usd_per_hour,)
    )
    return offline_optimum.min_usd(
        [*spot, on_demand],
        scenario.fleet.examples_per_s,
        scenario.fleet.boot_s,
        scenario.examples,
        scenario.deadline_s,
    )


def online_bound_usd(scenario: Scenario) -> float | None:
    """Return the online bound of the job's cost; None: several zones."""
    if len(scenario.zones) > 1:
        return None
    (zone,), fleet = scenario.zones, scenario.fleet
    lives = [(from_s, until_s - scenario.notice_s) for from_s, until_s in zone.lives]
    return online_bound.min_usd(
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
    ours, forecasts = watch(endless, baselines.CostOptimal())
    soon, soon_forecasts = watch(endless, baselines.TimeOptimal())
    free = replace(scenario, fleet=replace(scenario.fleet, boot_s=0.0, morph_s=0.0, lost_s=0.0))
    return Case(
        scenario=scenario.name,
        slack=scenario.deadline_s / scenario.on_demand()[0],
        on_demand_usd=scenario.on_demand()[1],
        offline_optimum_usd=offline_optimum_usd(scenario),
        online_bound_usd=online_bound_usd(scenario),
        outcomes=(ours, soon, *(_play(endless, rule) for rule in baselines.RULES[2:])),
        free=play(free, baselines.CostOptimal()),
        free_bound_usd=offline_optimum_usd(free),
        forecasts=forecasts,
        time_optimal_forecasts=soon_forecasts,
    )


def _play(scenario: Scenario, rule: type[FleetRule]) -> SimulatedRun:
    """Return the outcome of a baseline, on a fleet of its own if it is redundant."""
    if issubclass(rule, baselines.Redundancy):
        scenario = rule.scenario(scenario)
    return play(scenario, rule())


def evaluate_all(scenarios: Sequence[Scenario], processes: int) -> list[Case]:
    """Play all scenarios in so many processes."""
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
            [case.on_demand_usd for case in cases],
        )
        for n, rule in enumerate(baselines.RULES)
    ]
    free = [(case.free, case.free_bound_usd) for case in cases]
    found.append(_row(FREE, free, ours, [case.on_demand_usd for case in cases]))
    return found


def _row(
    rule: str,
    pairs: Sequence[tuple[SimulatedRun, float]],
    ours: Sequence[float],
    on_demand_usd: Sequence[float],
) -> PolicyRow:
    """Return a row.

    Args:
        rule: Its name.
        pairs: Outcomes and bounds.
        ours: Cost over bound of the cost-optimal deadline policy, for the same jobs.
        on_demand_usd: What the whole fleet on demand costs, for the same jobs.
    """
    usd = sum(outcome.usd for outcome, _ in pairs)
    total_bound = sum(bound for _, bound in pairs)
    over = [outcome.usd / bound for outcome, bound in pairs]
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
        total_over_bound=usd / total_bound,
        kept_over_bound=usd / total_bound * len(pairs) / len(kept) if kept else math.inf,
        in_time_over_bound=fmean(over[n] for n in kept) if kept else None,
        ours_over_bound=fmean(ours[n] for n in kept) if kept else None,
        max_over_on_demand=max(
            outcome.usd / alone for (outcome, _), alone in zip(pairs, on_demand_usd, strict=True)
        ),
        on_demand=sum(outcome.on_demand_usd for outcome, _ in pairs) / usd,
        booting=sum(outcome.booting_usd for outcome, _ in pairs) / usd,
        paused=sum(outcome.paused_usd for outcome, _ in pairs) / usd,
    )


def online_bound_row(cases: Iterable[Case]) -> OnlineBoundRow | None:
    """Return the row of the scenarios of one zone; None if there are none."""
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
        online_over_bound=fmean(online_usd / bound for _, bound, online_usd in triples),
        over_online=fmean(usd / online_usd for usd, _, online_usd in triples),
    )


def foretold(
    forecasts: Iterable[tuple[str, ForecastOutcome]],
) -> tuple[list[Foretold], list[Foretold]]:
    """Return finishes and costs as ``coverage`` takes them, unbounded intervals left out.

    Args:
        forecasts: Each with the name of its market.
    """
    finishes, costs = list[Foretold](), list[Foretold]()
    for market, one in forecasts:
        for found, interval, actual in (
            (finishes, one.forecast.finish_s, one.finished_s),
            (costs, one.forecast.usd, one.usd),
        ):
            if interval.high < math.inf:
                told = Foretold(market=market, interval=interval, actual=actual)
                found.append(told)
    return finishes, costs


def kept(forecasts: Iterable[ForecastOutcome]) -> tuple[float, float]:
    """Return the shares of intervals that held, of the finish and of the cost."""
    outcomes = list(forecasts)
    if not outcomes:
        return math.nan, math.nan
    finish = fmean(one.finish_kept for one in outcomes)
    return finish, fmean(one.usd_kept for one in outcomes)
