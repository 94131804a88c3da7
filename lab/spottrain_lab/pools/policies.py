"""Allocation policies as linear programs: jobs on offer types, within quotas.

After Narayanan's dissertation, sections 5.4 and 6.4. Two forms. Of hours: how long each
job runs on each offer type until its work is done (`cheapest`, `shortest`). Of shares:
how each job's time is divided while prices and jobs stay as they are
(`max_throughput`, `max_examples_per_usd`, `fairest`). A job may move between types, and runs
on one at a time; moves take no time here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from spottrain.errors import ConfigError
from spottrain.pricing.sharing.solver import Floats
from spottrain.units import HOUR_S
from spottrain_lab.pools.market import (
    Arrays,
    Demand,
    Hours,
    InfeasibleError,
    OfferType,
    Shares,
    arrays,
)
from spottrain_lab.pools.programs import HoursProgram, SharesProgram

_SLACK = 1e-9
"""Relative tolerance of the solver."""


def cheapest(
    types: Sequence[OfferType], jobs: Sequence[Demand], *, max_usd: float | None = None
) -> Hours:
    """Return the cheapest hours that do all work, each job by its deadline.

    The explicit form of section 6.4.2: the printed sum of ratios is degenerate, since
    doing next to nothing keeps every ratio.

    Args:
        types: What can be rented.
        jobs: What is to be done.
        max_usd: The budget.

    Raises:
        InfeasibleError: with the earliest deadlines, or the smallest budget, that do.
        ConfigError: an empty market, one that does not fit the jobs, no budget at all.
    """
    market = arrays(types, jobs)
    max_usd = _budget(max_usd)
    deadlines_h = [job.deadline_h for job in jobs]
    hours = HoursProgram(market, deadlines_h, free=True).cheapest()
    if hours is not None and not _fits(hours, market, deadlines_h):
        hours = HoursProgram(market, deadlines_h).cheapest()
    if hours is None:
        raise _too_tight(market, deadlines_h, _hours_stretch)
    if max_usd is not None and hours.usd > max_usd * (1 + _SLACK):
        raise _over_budget(HoursProgram(market, deadlines_h), hours.usd, max_usd)
    return hours


def shortest(
    types: Sequence[OfferType], jobs: Sequence[Demand], *, max_usd: float | None = None
) -> Hours:
    """Return the hours that end the last job soonest; of those, the cheapest.

    Section 6.4.3 searches the makespan by halving; with hours in place of shares it is
    one linear program. The jobs' own deadlines play no part.

    Args:
        types: What can be rented.
        jobs: What is to be done.
        max_usd: What all jobs together may cost.

    Raises:
        InfeasibleError: the budget is below the lowest cost of the work.
        ConfigError: an empty market, one that does not fit the jobs, no budget at all.
    """
    market = arrays(types, jobs)
    max_usd = _budget(max_usd)
    alone_h = float(market.whole_h.min(axis=1).max())
    stretch = HoursProgram(market, [alone_h] * len(jobs)).stretch(max_usd)
    if stretch is None:
        min_usd = float(market.usd.min(axis=1).sum())
        raise InfeasibleError(
            f"budget {_usd(max_usd)}: the work costs at least {_usd(min_usd)}, "
            "however long it takes; raise the budget to that",
            min_usd=min_usd,
        )
    makespan_h = stretch.factor * alone_h
    again = HoursProgram(market, [makespan_h * (1 + _SLACK)] * len(jobs)).cheapest()
    return again or stretch.hours


def max_throughput(types: Sequence[OfferType], jobs: Sequence[Demand]) -> Shares:
    """Return shares that maximise weighted examples per second (section 6.4.1).

    Weights of 1 starve slow jobs. Weights of rank over best throughput serve first come
    first (section 5.4).
    """
    market = arrays(types, jobs)
    weights = _column([job.weight for job in jobs])
    return SharesProgram(market).max_value(market.rates * weights)


def max_examples_per_usd(types: Sequence[OfferType], jobs: Sequence[Demand]) -> Shares:
    """Return shares that maximise examples per dollar, each job in time.

    The linear form of section 6.4.2 with the rows of 6.4.3: each job's examples per
    dollar on a type, as a share of its best ones, times the time spent there. It
    compares types only: use `cheapest` for the lowest cost.

    Raises:
        InfeasibleError: with deadlines that can be met.
        ConfigError: an empty market, or one that does not fit the jobs.
    """
    market = arrays(types, jobs)
    best_usd = market.usd.min(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        value = np.where(market.usd == best_usd, 1.0, best_usd / market.usd)
    value = np.where(market.rates > 0, value, 0.0)
    program = SharesProgram(market)
    deadlines_h = [job.deadline_h for job in jobs]
    shares = program.max_value(value, at_least=_needed(market, deadlines_h))
    if shares is None:
        raise _too_tight(market, deadlines_h, _shares_stretch)
    return shares


def fairest(
    types: Sequence[OfferType],
    jobs: Sequence[Demand],
    *,
    against: Literal["equal", "isolated"] = "equal",
) -> Shares:
    """Return shares whose worst-off job is best off (max-min fairness, section 5.4.1).

    The objective is the minimum over jobs of throughput times machines, over weight and
    over the throughput of ``against``.

    Args:
        types: What can be rented; every quota must be finite.
        jobs: What runs.
        against: ``equal``: the job alone, its time divided over types as their quotas
            are. ``isolated``: an equal part of every type for each job; then 1 over the
            objective is the finish-time fairness of jobs that begin now.

    Raises:
        ConfigError: an infinite quota, an empty market, or one that does not fit.
        InfeasibleError: a job that can run on no type.
    """
    market = arrays(types, jobs)
    for kind in types:
        if math.isinf(kind.quota):
            raise ConfigError(f"{kind.name}: fair shares need a quota; give a number")
    if against == "equal":
        given = market.quotas / market.quotas.sum() * np.ones_like(market.rates)
    else:
        given = market.quotas / (len(jobs) * market.machines[:, None])
        given = given / np.maximum(given.sum(axis=1, keepdims=True), 1.0)
    normal = (market.rates * given).sum(axis=1)
    weights = np.array([job.weight for job in jobs])
    return SharesProgram(market).fairest((normal * weights / market.machines)[:, None])


def _needed(market: Arrays, deadlines_h: Sequence[float]) -> Floats:
    """Return the examples per second that each job's deadline needs, [job, 1]."""
    examples = np.array([job.examples for job in market.jobs])
    return (examples / (np.array(deadlines_h) * HOUR_S))[:, None]


def _fits(hours: Hours, market: Arrays, deadlines_h: Sequence[float]) -> bool:
    """Return whether quotas suffice if each job spreads its hours evenly."""
    at_once = np.array(hours.hours) / np.array(deadlines_h)[:, None]
    held = (at_once * market.machines[:, None]).sum(axis=0)
    return bool((held <= market.quotas).all())


_Stretch = Callable[[Arrays, list[float]], tuple[float, tuple[str, ...]]]
"""Maps (market, deadlines) to the smallest feasible factor, and the types that bind."""


def _hours_stretch(market: Arrays, deadlines_h: list[float]) -> tuple[float, tuple[str, ...]]:
    free = HoursProgram(market, deadlines_h, free=True).cheapest()
    if free is not None and _fits(free, market, deadlines_h):
        return 1.0, ()
    stretch = HoursProgram(market, deadlines_h).stretch(None)
    return (1.0, ()) if stretch is None else (stretch.factor, stretch.short_of)


def _shares_stretch(market: Arrays, deadlines_h: list[float]) -> tuple[float, tuple[str, ...]]:
    reached = SharesProgram(market).fairest(_needed(market, deadlines_h)).objective
    return 1.0 / reached, ()


def _too_tight(market: Arrays, deadlines_h: list[float], stretch: _Stretch) -> InfeasibleError:
    """Return the error of infeasible deadlines, with the earliest feasible ones."""
    alone_h = [float(min_h) for min_h in market.whole_h.min(axis=1)]
    late = [m for m, min_h in enumerate(alone_h) if min_h > deadlines_h[m]]
    if late:
        worst = max(late, key=lambda m: alone_h[m] / deadlines_h[m])
        fastest = market.types[int(market.whole_h[worst].argmin())].name
        problem = (
            f"{market.jobs[worst].name}: deadline {deadlines_h[worst]:.4g} h: even on "
            f"{fastest}, the fastest type it may use, its work takes {alone_h[worst]:.6g} h"
        )
    else:
        problem = "deadlines: each job alone could finish in time, but not all of them together"
    eased = list(map(max, deadlines_h, alone_h))
    factor, short_of = stretch(market, eased)
    if factor > 1 + _SLACK and short_of:
        problem += f"; quotas of {', '.join(short_of)} are too small"
    nearest = {
        job.name: eased_h * max(1.0, factor)
        for job, eased_h in zip(market.jobs, eased, strict=True)
        if math.isfinite(eased_h)
    }
    min_h = {
        job.name: nearest[job.name]
        for job, given in zip(market.jobs, deadlines_h, strict=True)
        if job.name in nearest and nearest[job.name] > given * (1 + _SLACK)
    } or nearest
    return InfeasibleError(f"{problem}; allow at least {_listed(min_h)}", min_deadline_h=min_h)


def _over_budget(program: HoursProgram, needed_usd: float, max_usd: float) -> InfeasibleError:
    """Return the error of a budget that is too small, with what more time would do."""
    market = program.market
    line = f"budget {_usd(max_usd)}: finishing in time costs at least {_usd(needed_usd)}"
    stretch = program.stretch(max_usd)
    if stretch is None:
        min_usd = float(market.usd.min(axis=1).sum())
        return InfeasibleError(
            f"{line}, and {_usd(min_usd)} without deadlines; raise the budget",
            min_usd=needed_usd,
        )
    min_h = {
        job.name: job.deadline_h * stretch.factor
        for job in market.jobs
        if math.isfinite(job.deadline_h)
    }
    return InfeasibleError(
        f"{line}; raise the budget to that, or allow {_listed(min_h)}",
        min_usd=needed_usd,
        min_deadline_h=min_h,
    )


def _budget(max_usd: float | None) -> float | None:
    """Return the budget; None for any amount.

    Raises:
        ConfigError: It is invalid.
    """
    if max_usd is not None and not max_usd > 0:
        raise ConfigError(f"budget: got {max_usd} USD; give more than 0, or none")
    return None if max_usd == math.inf else max_usd


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=float)[:, None]


def _listed(hours: dict[str, float]) -> str:
    shown = [f"{name} {value:.6g} h" for name, value in list(hours.items())[:3]]
    more = len(hours) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _usd(usd: float | None) -> str:
    return "none" if usd is None else f"${usd:,.3f}"
