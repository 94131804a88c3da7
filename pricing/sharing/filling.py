"""The linear programs of a pool, and water filling over them.

Narayanan's dissertation, sections 5.3 and 5.4. Jobs that cannot gain any more are found by the
dual values of a round's program instead of a mixed-integer program: a job whose row has a
positive dual value is at the same level in every optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spottrain.pricing.sharing.problem import Allocation, AllocationProblem
from spottrain.pricing.sharing.solver import INTERIOR, Floats, SolverError, solve

if TYPE_CHECKING:
    from scipy.sparse import csr_array

ROUNDS = 24
"""Rounds of water filling, after which what is left goes where it is of most use: many jobs that
saturate one after the other do not take a program each."""
LOOSE = 1e-7
"""The solver's tolerance."""
SLACK = 1e-6
"""What an earlier program found is asked for less this part of the best throughput."""

Slopes = Callable[[NDArray[np.bool_]], Floats]
"""Maps the jobs that can still gain to [job]: how fast each rises in a round, as a part of its
best throughput."""


class AllocationProgram:
    """Shares of time per (job, option): a job's at most 1, a kind's VMs at most the pool's."""

    def __init__(self, problem: AllocationProblem) -> None:
        from scipy.sparse import csr_array, vstack

        self.problem = problem
        self.job = np.array([m for m, _ in problem.columns], dtype=int)
        self.rates = np.array([o.examples_per_s for _, o in problem.columns])
        columns = np.arange(len(self.job))
        height = len(problem.demands)
        jobs = csr_array((np.ones(len(columns)), (self.job, columns)), shape=(height, len(columns)))
        held = np.array([o.vms for _, o in problem.columns], dtype=float)
        quotas = np.maximum(np.array(problem.vms, dtype=float), 1.0)
        parts = [jobs, csr_array(held.T / quotas[:, None])]
        for cap in problem.caps:
            counted = np.isin(self.job, list(cap.jobs))
            used = np.where(counted, held @ np.array(cap.per_vm), 0.0)
            parts.append(csr_array(used[None, :] / max(cap.at_most, SLACK)))
        self.rows: csr_array = vstack(parts).tocsr()
        self.reached: csr_array = csr_array(
            (self.rates / problem.best[self.job], (self.job, columns)),
            shape=(height, len(columns)),
        )
        """Rows of throughput as a part of each job's best."""

    def highest(self, base: Floats, slope: Floats, floor: Floats) -> tuple[float, Floats]:
        """Return the highest z with ``reached >= base + z * slope`` and ``reached >= floor``.

        Args:
            base: [job], part of its best throughput.
            slope: [job]; 0 for a job that does not rise.
            floor: [job]

        Returns:
            z, and [job]: the dual value of each rising row.
        """
        from scipy.sparse import csr_array, hstack, vstack

        rises, kept = np.flatnonzero(slope > 0), np.flatnonzero(floor > SLACK)
        scale = float(np.max(slope))
        rising = hstack([-self.reached[rises], csr_array((slope[rises] / scale)[:, None])])
        parts = [rising, hstack([self.rows, csr_array((self.rows.shape[0], 1))])]
        limits = [-base[rises], np.ones(self.rows.shape[0])]
        if kept.size:
            parts.append(hstack([-self.reached[kept], csr_array((kept.size, 1))]))
            limits.append(SLACK - floor[kept])
        found = solve(
            np.append(np.zeros(len(self.job)), -1.0),
            rows=vstack(parts, format="csr"),
            limits=np.concatenate(limits),
            method=INTERIOR,
        )
        if found is None:
            raise SolverError("floors that had been reached were reported as infeasible")
        duals = np.zeros(len(slope))
        duals[rises] = -found.ineqlin.marginals[: rises.size] * slope[rises] / scale
        return float(found.x[-1]) / scale, duals

    def most(self, value: Floats, floor: Floats) -> Allocation:
        """Return the shares of highest total value.

        Args:
            value: [column], of all of a job's time in that option.
            floor: [job], part of its best throughput that it must reach.
        """
        from scipy.sparse import vstack

        kept = np.flatnonzero(floor > SLACK)
        scale = float(np.abs(value).max(initial=0.0)) or 1.0
        rows: Any = vstack([self.rows, -self.reached[kept]], format="csr")
        limits = np.append(np.ones(self.rows.shape[0]), SLACK - floor[kept])
        found = solve(-value / scale, rows=rows, limits=limits, method=INTERIOR)
        if found is None:
            raise SolverError("floors that had been reached were reported as infeasible")
        return self._allocation(found.x)

    def floors(self) -> Floats:
        """Return what deadlines need, [job]; where not all can be met, of all alike less."""
        needed = self.problem.needed / self.problem.best
        if not needed.any():
            return needed
        zero = np.zeros(len(needed))
        met, _ = self.highest(zero, needed, zero)
        return needed * min(1.0, met)

    def _allocation(self, parts: Floats) -> Allocation:
        """Return shares of at most all time and VMs, whatever the solver's tolerance."""
        parts = np.where(parts > LOOSE, parts, 0.0)
        over = max(1.0, float((self.rows @ parts).max(initial=0.0)))
        parts = parts / over
        shares: list[list[Any]] = [[] for _ in self.problem.demands]
        for column in np.flatnonzero(parts):
            m, option = self.problem.columns[column]
            shares[m].append((option, float(parts[column])))
        rates = np.zeros(len(shares))
        np.add.at(rates, self.job, parts * self.rates)
        return Allocation(tuple(map(tuple, shares)), tuple(rates.tolist()))


def water_fill(program: AllocationProgram, slopes: Slopes) -> Allocation:
    """Return shares of which the least is highest, then the next, and so on.

    All jobs rise together, each at its slope, until some cannot any more; those stay where
    they are, and the others go on (section 5.4.3). Deadlines are floors from the start.
    """
    count = len(program.problem.demands)
    floor = program.floors()
    base, active = np.zeros(count), np.ones(count, dtype=bool)
    levels: list[float] = []
    for _ in range(ROUNDS):
        slope = np.where(active, slopes(active), 0.0)
        if not slope.any():
            break
        least, duals = program.highest(base, slope, np.maximum(floor, base))
        levels.append(max(0.0, least))
        base = np.minimum(1.0, base + levels[-1] * slope)
        stuck = (duals > LOOSE) | ((base >= 1 - LOOSE) & (slope > 0))
        active &= ~stuck
        if not stuck.any() or not active.any():
            break
    value = program.rates / program.problem.best[program.job]
    found = program.most(value, np.maximum(floor, base))
    return Allocation(found.shares, found.examples_per_s, tuple(levels))
