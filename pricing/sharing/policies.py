"""The policies of a pool: which job is given which part of it.

After Narayanan's dissertation, sections 5.3 and 5.4 (Gavel), and VirtualFlow, section 4.2.
Deadlines are floors under every policy: where not all can be met, jobs with one get the same
part of what they need. Every result is Pareto-efficient: no job can be given more without
taking from another, except under ``cheapest``, where time is not worth its price, and on the
whole VMs of ``queues``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spottrain.pricing.sharing import queues
from spottrain.pricing.sharing.filling import LOOSE, AllocationProgram, water_fill
from spottrain.pricing.sharing.problem import Allocation, AllocationProblem
from spottrain.pricing.sharing.solver import Floats, SolverError, solve

FTF_ROUNDS = 50
WORTH = 1.01
"""What ``cheapest`` pays for a job without a deadline, in times its lowest cost."""


def equal_rates(problem: AllocationProblem) -> Floats:
    """Return what each job trains on one VM whose kind is drawn as the pool's VMs are.

    Gavel's ``throughput(m, X_equal) / scale_factor``. An option over several kinds counts
    only for a job that has no other. Shape [job], examples per second.
    """
    vms = np.array(problem.vms, dtype=float)
    per_vm = np.zeros((len(problem.demands), len(vms)))
    mixed = np.zeros(len(problem.demands))
    for m, option in problem.columns:
        rate = option.examples_per_s / sum(option.vms)
        mixed[m] = max(mixed[m], rate)
        if sum(map(bool, option.vms)) == 1:
            kind = next(k for k, n in enumerate(option.vms) if n)
            per_vm[m, kind] = max(per_vm[m, kind], rate)
    equal: Floats = per_vm @ (vms / vms.sum())
    return np.where(equal > 0, equal, mixed)


def isolated_rates(problem: AllocationProblem) -> Floats:
    """Return what each job trains alone on its weight's part of every kind.

    Shape [job], examples per second: what it is promised to do no worse than (the sharing
    incentive).
    """
    from scipy.sparse import block_array, csr_array

    program = AllocationProgram(problem)
    columns = np.arange(len(program.job))
    count = len(problem.demands)
    part = problem.weights / problem.weights.sum()
    time = csr_array((np.ones(len(columns)), (program.job, columns)))
    rows, limits = [[time]], [np.ones(count)]
    for kind, vms in enumerate(problem.vms):
        held = np.array([option.vms[kind] for _, option in problem.columns]) / max(vms, 1)
        own = csr_array((held / part[program.job], (program.job, columns)), shape=time.shape)
        rows.append([own])
        limits.append(np.ones(count))
    value = program.rates / problem.best[program.job]
    found = solve(-value, rows=block_array(rows).tocsr(), limits=np.concatenate(limits))
    if found is None:
        raise SolverError("a linear program without demands was reported as infeasible")
    reached: Floats = (program.reached @ found.x) * problem.best
    return reached


def fair(problem: AllocationProblem) -> Allocation:
    """Return weighted max-min fair shares of effective throughput (section 5.4.1).

    A job's throughput is compared with what it would train on its weight's part of the pool,
    so that no job is below that.
    """
    slope = isolated_rates(problem) / problem.best
    return water_fill(AllocationProgram(problem), lambda _: slope)


def makespan(problem: AllocationProblem) -> Allocation:
    """Return the shares with which the last job ends soonest (section 5.4.2); then the
    last but one, and so on. The first level is 1 over the makespan, in 1/s."""
    slope = np.array([demand.examples for demand in problem.demands]) / problem.best
    return water_fill(AllocationProgram(problem), lambda _: slope)


def finish_time_fairness(problem: AllocationProblem) -> Allocation:
    """Return the shares that minimise the largest finish-time fairness (section 5.4.2).

    That is the time from a job's arrival to its end, over the time that it would have taken
    on its own part of the pool. It is the only level.
    """
    program, best = AllocationProgram(problem), problem.best
    examples = np.array([demand.examples for demand in problem.demands])
    age = np.array([demand.age_s for demand in problem.demands])
    alone_left = examples / isolated_rates(problem)
    alone = np.array([demand.isolated_age_s for demand in problem.demands]) + alone_left
    floor = program.floors()
    largest = float(((age + alone_left) / alone).max())
    needed = examples / (largest * alone - age) / best
    for _ in range(FTF_ROUNDS):
        met, _duals = program.highest(np.zeros_like(needed), needed, floor)
        # With met times what was needed, each job ends so much earlier.
        largest = float(((age + examples / (met * needed * best)) / alone).max())
        needed = examples / (largest * alone - age) / best
        if abs(met - 1) < 10 * LOOSE:
            break
    value = program.rates / best[program.job]
    found = program.most(value, np.maximum(floor, needed))
    return Allocation(found.shares, found.examples_per_s, (largest,))


def cheapest(problem: AllocationProblem) -> Allocation:
    """Return the shares that keep deadlines for the least dollars (section 5.4.2, cost).

    A job without a deadline trains only where an example costs next to its lowest price.
    """
    program = AllocationProgram(problem)
    usd = np.array([problem.usd_per_s(option) for _, option in problem.columns])
    least = np.full(len(problem.demands), np.inf)
    np.minimum.at(least, program.job, usd / program.rates)
    worth = WORTH * least[program.job]
    best = problem.best[program.job]
    free = worth <= 0
    value = np.where(free, program.rates, program.rates - usd / np.where(free, 1.0, worth))
    return program.most(value / best, program.floors())


def hierarchical(problem: AllocationProblem) -> Allocation:
    """Return shares that are fair to teams by their weights (section 5.4.3).

    A team's weight goes to its jobs that can still gain: by their own weights, or all of it to
    the one that arrived first (Figure 5.13).
    """
    equal = equal_rates(problem) / problem.best
    weights = problem.teams or {}
    members: dict[str, list[int]] = {}
    for m, demand in enumerate(problem.demands):
        members.setdefault(demand.team, []).append(m)

    def slopes(active: NDArray[np.bool_]) -> Floats:
        slope = np.zeros(len(problem.demands))
        for team, jobs in members.items():
            gaining = [m for m in jobs if active[m]]
            if team in problem.fifo_teams:
                gaining = sorted(gaining, key=lambda m: (problem.demands[m].arrived_s, m))[:1]
            total = sum(problem.demands[m].weight for m in gaining)
            for m in gaining:
                slope[m] = weights.get(team, 1.0) * problem.demands[m].weight / total
        return slope * equal

    return water_fill(AllocationProgram(problem), slopes)


Policy = Callable[[AllocationProblem], Allocation]


def _remembered(policy: Policy) -> Policy:
    """Return a policy that does not look at work or time, with its last result kept.

    In a pool whose jobs take turns, rounds ask again and again for the same.
    """
    last: list[tuple[Any, Allocation]] = []

    @wraps(policy)
    def found(problem: AllocationProblem) -> Allocation:
        if problem.needed.any():
            return policy(problem)
        asked = (
            problem.vms,
            problem.caps,
            problem.teams,
            problem.fifo_teams,
            [(c.name, c.options, c.weight, c.team, c.arrived_s) for c in problem.demands],
        )
        if not last or last[0][0] != asked:
            last[:] = [(asked, policy(problem))]
        return last[0][1]

    return found


POLICIES: Mapping[str, Policy] = {
    "fair": _remembered(fair),
    "priority": queues.priority,
    "makespan": makespan,
    "finish_time_fairness": finish_time_fairness,
    "fifo": queues.fifo,
    "shortest_first": queues.shortest_first,
    "cheapest": cheapest,
    "hierarchical": _remembered(hierarchical),
}
