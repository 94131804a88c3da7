"""The linear programs of ``policies``, for scipy's HiGHS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from spottrain.pricing.sharing.solver import INTERIOR, Floats, SolverError, solve
from spottrain_lab.pools.market import Arrays, Hours, Shares

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MIN_PERIODS = 16
"""Periods allowed for any number of jobs: 2,048 on three types then take 0.3 s of a CPU where
quotas are short. See HoursProgram."""
MAX_COLUMNS = 2**15
"""Fewer jobs may have more periods, up to programs of this size."""


@dataclass(frozen=True, slots=True)
class DeadlineStretch:
    """The smallest factor on all deadlines that makes them feasible."""

    factor: float
    hours: Hours
    short_of: tuple[str, ...]
    """Offer types whose quotas bind."""


class HoursProgram:
    """Hours per (job, type) that do all work within deadlines and quotas.

    A column is the part of a job's work that is done on a type in a period. Where types
    have quotas, periods lie between the jobs' deadlines, so that a solution can
    be run: within a period any hours that fit every job's and every type's time can be
    put in order, jobs of several machines apart (a preemptive open shop). Where there
    are fewer periods than deadlines, a job whose deadline lies within a period spreads
    its work there evenly over the time that it has, and holds its machines as if for
    the whole period: each job has all of its time, and only quotas that are nearly
    exhausted look a little smaller than they are.
    Without quotas each job is a program of its own.

    Args:
        market: Jobs, types and what the work takes.
        deadlines_h: By job; infinite for none.
        free: Leave the quotas out.
    """

    def __init__(self, market: Arrays, deadlines_h: Sequence[float], *, free: bool = False) -> None:
        self.market = market
        self.quotas = np.full_like(market.quotas, math.inf) if free else market.quotas
        deadlines = np.array(deadlines_h, dtype=float)
        job, kind = np.nonzero(market.rates > 0)
        bound = np.isfinite(self.quotas).any()
        max_periods = max(MIN_PERIODS, MAX_COLUMNS // len(job))
        ends = _period_ends(deadlines, max_periods) if bound else np.array([math.inf])
        periods = np.searchsorted(ends, deadlines)[job] + 1
        self.job = np.repeat(job, periods)
        self.kind = np.repeat(kind, periods)
        first = np.repeat(np.cumsum(periods) - periods, periods)
        self.period = np.arange(len(self.job)) - first
        begins = np.append(0.0, ends[:-1])[self.period]
        until = np.minimum(ends[self.period], deadlines[self.job])
        self._rows(until - begins, len(ends))

    def _rows(self, time_h: Floats, periods: int) -> None:
        """Make the rows: work of each job, and time of jobs and types as shares."""
        from scipy.sparse import csr_array, vstack

        market, columns = self.market, np.arange(len(self.job))
        hours = market.whole_h[self.job, self.kind]
        self.usd = market.usd[self.job, self.kind]
        self.hours = hours
        shape = (len(market.jobs), len(columns))
        self.work = csr_array((np.ones(len(columns)), (self.job, columns)), shape=shape)
        with np.errstate(invalid="ignore"):
            job_time = hours / time_h
            type_time = hours * market.machines[self.job] / (self.quotas[self.kind] * time_h)
        parts = []
        self.row_kinds: list[int] = []
        keys = (self.job * periods + self.period, self.kind * periods + self.period)
        for key, values in zip(keys, (job_time, type_time), strict=True):
            used = values > 0
            _, row = np.unique(key[used], return_inverse=True)
            height = int(row.max()) + 1 if len(row) else 0
            parts.append(
                csr_array((values[used], (row, columns[used])), shape=(height, len(columns)))
            )
            self.row_kinds += _kinds(self.kind[used], row, height, key is keys[1])
        self.time: csr_array = vstack(parts, format="csr")

    def cheapest(self) -> Hours | None:
        """Return the cheapest hours; None if none are in time."""
        scale = float(self.usd.max()) or 1.0
        found = solve(
            self.usd / scale,
            rows=self.time,
            limits=np.ones(self.time.shape[0]),
            equal=self.work,
        )
        return None if found is None else self._hours(found.x)

    def stretch(self, max_usd: float | None) -> DeadlineStretch | None:
        """Return the factor by which all deadlines must grow, or may shrink, in a budget.

        Returns:
            None where no time makes the work as cheap as ``max_usd``.
        """
        from scipy.sparse import csr_array, hstack, vstack

        height, width = self.time.shape
        rows: Any = hstack([self.time, csr_array(-np.ones((height, 1)))], format="csr")
        limits = np.zeros(height)
        if max_usd is not None:
            scale = max(max_usd, float(self.usd.max()) * 1e-6) or 1.0
            budget = csr_array(np.append(self.usd / scale, 0.0)[None, :])
            rows = vstack([rows, budget], format="csr")
            limits = np.append(limits, max_usd / scale)
        work = hstack([self.work, csr_array((self.work.shape[0], 1))], format="csr")
        objective = np.append(np.zeros(width), 1.0)
        found = solve(objective, rows=rows, limits=limits, equal=work)
        if found is None:
            return None
        tight = np.flatnonzero(found.ineqlin.marginals[:height] < -1e-9)
        names = {self.row_kinds[row] for row in tight} - {-1}
        return DeadlineStretch(
            float(found.x[-1]),
            self._hours(found.x[:-1]),
            tuple(self.market.types[kind].name for kind in sorted(names)),
        )

    def _hours(self, parts: Floats) -> Hours:
        market = self.market
        hours = np.zeros(market.rates.shape)
        np.add.at(hours, (self.job, self.kind), np.maximum(parts, 0.0) * self.hours)
        # Exactly the work, whatever the solver's tolerance left over.
        hours /= (hours * market.rates).sum(axis=1, keepdims=True)
        hours *= (market.rates * np.where(market.rates > 0, market.whole_h, 0.0)).max(
            axis=1, keepdims=True
        )
        used = hours * market.machines[:, None]
        with np.errstate(invalid="ignore"):
            per_type = np.where(market.quotas > 0, used.sum(axis=0) / market.quotas, 0.0)
        prices = np.array([kind.usd_per_hour for kind in market.types])
        return Hours(
            hours=_tuples(hours),
            usd=float((used * prices).sum()),
            makespan_h=float(max(hours.sum(axis=1).max(), per_type.max())),
        )


class SharesProgram:
    """Shares of time per (job, type): a job's at most 1, a type's at most its quota."""

    def __init__(self, market: Arrays) -> None:
        from scipy.sparse import csr_array, vstack

        self.market = market
        self.job, self.kind = np.nonzero(market.rates > 0)
        columns = np.arange(len(self.job))
        ones = np.ones(len(columns))
        jobs = csr_array((ones, (self.job, columns)))
        bound = np.isfinite(market.quotas)[self.kind]
        machines = market.machines[self.job]
        with np.errstate(invalid="ignore"):
            values = (machines / market.quotas[self.kind])[bound]
        types = csr_array(
            (values, (self.kind[bound], columns[bound])),
            shape=(len(market.types), len(columns)),
        )
        self.rows: csr_array = vstack([jobs, types], format="csr")

    @overload
    def max_value(self, value: Floats) -> Shares: ...
    @overload
    def max_value(self, value: Floats, at_least: Floats) -> Shares | None: ...
    def max_value(self, value: Floats, at_least: Floats | None = None) -> Shares | None:
        """Return shares of the highest total value.

        Args:
            value: [job, type], of all of a job's time on that type.
            at_least: [job, 1], examples per second that each job must reach.

        Returns:
            None where ``at_least`` cannot be reached.
        """
        from scipy.sparse import vstack

        values = value[self.job, self.kind]
        scale = float(values.max()) or 1.0
        rows, limits = self.rows, np.ones(self.rows.shape[0])
        if at_least is not None and (held := np.flatnonzero(at_least[:, 0] > 0)).size:
            rows = vstack([rows, -self._reached(at_least)[held]], format="csr")
            limits = np.append(limits, -np.ones(len(held)))
        found = solve(-values / scale, rows=rows, limits=limits, method=INTERIOR)
        if found is None:
            return None
        return Shares(shares=self._shares(found.x), objective=-found.fun * scale)

    def fairest(self, against: Floats) -> Shares:
        """Return shares that maximise the minimum over jobs of throughput / ``against``.

        Args:
            against: [job, 1]; a job of 0 does not count.
        """
        from scipy.sparse import csr_array, hstack, vstack

        held = np.flatnonzero(against[:, 0] > 0)
        reached = self._reached(against)[held]
        best = (self.market.rates.max(axis=1) / np.maximum(against[:, 0], 1e-300))[held]
        scale = float(best.min())
        below = hstack([-reached / scale, csr_array(np.ones((len(held), 1)))])
        above = hstack([self.rows, csr_array((self.rows.shape[0], 1))])
        rows = vstack([above, below], format="csr")
        limits = np.append(np.ones(self.rows.shape[0]), np.zeros(len(held)))
        objective = np.append(np.zeros(len(self.job)), -1.0)
        found = solve(objective, rows=rows, limits=limits, method=INTERIOR)
        if found is None:
            raise SolverError("a linear program without demands was reported as infeasible")
        return Shares(shares=self._shares(found.x[:-1]), objective=-float(found.fun) * scale)

    def _reached(self, against: Floats) -> csr_array:
        """Return rows of throughput over ``against``, one a job."""
        from scipy.sparse import csr_array

        rates = self.market.rates[self.job, self.kind]
        values = rates / np.where(against > 0, against, 1.0)[self.job, 0]
        return csr_array((values, (self.job, np.arange(len(self.job)))))

    def _shares(self, parts: Floats) -> tuple[tuple[float, ...], ...]:
        shares = np.zeros(self.market.rates.shape)
        shares[self.job, self.kind] = np.clip(parts, 0.0, 1.0)
        return _tuples(shares)


def _period_ends(deadlines: Floats, max_periods: int) -> Floats:
    """Return where up to ``max_periods`` periods end; one more, endless, if a job has no
    deadline."""
    finite = np.unique(deadlines[np.isfinite(deadlines)])
    if len(finite) > max_periods:
        kept = np.linspace(0, len(finite) - 1, max_periods).round().astype(int)
        finite = finite[kept]
    endless = [math.inf] if np.isinf(deadlines).any() else []
    return np.append(finite, endless)


def _kinds(kind: Any, row: Any, height: int, of_types: bool) -> list[int]:
    """Return the type of each row of types; -1 for each row of jobs."""
    kinds = np.full(height, -1)
    if of_types:
        kinds[row] = kind
    return [int(one) for one in kinds]


def _tuples(values: Floats) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values.tolist())
