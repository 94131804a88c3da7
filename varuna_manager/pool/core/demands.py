"""The pool's jobs as a policy sees them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from spottrain.pricing.sharing.problem import (
    AllocationProblem,
    Configuration,
    Constraint,
    JobDemand,
    elastic_configurations,
)
from spottrain.varuna_manager.pool.core.model import (
    JobRequest,
    Limits,
    PoolJob,
    PoolState,
    Throughputs,
)

MICRO = 1e6
RESERVE = 0.02
RESERVED_MORPHS = 3
"""A deadline is promised, and kept, with so much of its time and so many changes of size to
spare: whole VMs and hand-overs are not in the programs."""
_SOON_S = 1.0
"""What is left at least of a deadline that has passed: the policy does what it can."""


def admitted_deadline_s(state: PoolState, request: JobRequest) -> float:
    """Return when a job is to end, from now: before its deadline by what changes may cost."""
    left_s = request.deadline_s - state.now_s
    return max(_SOON_S, left_s * (1 - RESERVE) - RESERVED_MORPHS * request.morph_s)


def demand_of(state: PoolState, job: PoolJob) -> JobDemand:
    """Return a job as a demand; it has at least one option of those it was submitted with."""
    request = job.request
    left = max(request.examples - job.examples_done, request.examples * 1e-9)
    age_s = state.now_s - job.arrived_s
    return JobDemand(
        name=request.name,
        options=_options(request.throughputs),
        examples=left,
        weight=request.weight,
        arrived_s=job.arrived_s,
        deadline_s=admitted_deadline_s(state, request),
        team=request.team,
        age_s=age_s,
        isolated_age_s=min(age_s, job.entitled_s),
        running=any(job.granted),
    )


@lru_cache(maxsize=4096)
def _options(throughputs: Throughputs) -> tuple[Configuration, ...]:
    return elastic_configurations([dict(table) for table in throughputs])


def problem_of(
    state: PoolState, jobs: Iterable[PoolJob]
) -> tuple[AllocationProblem, list[PoolJob]]:
    """Return the pool with those of the jobs that it, and their caps, have room for."""
    fitting = [job for job in jobs if not too_large_for(state, job)]
    problem = AllocationProblem(
        kinds=tuple(supply.name for supply in state.supplies),
        vms=tuple(supply.vms for supply in state.supplies),
        demands=tuple(demand_of(state, job) for job in fitting),
        usd_per_hour=tuple(s.microusd_per_hour / MICRO for s in state.supplies),
        teams={name: team.weight for name, team in state.settings.teams.items()},
        fifo_teams=frozenset(n for n, team in state.settings.teams.items() if team.order == "fifo"),
        caps=tuple(_caps(state, fitting)),
    )
    return problem, fitting


def too_large_for(state: PoolState, job: PoolJob) -> str:
    """Return what has no room for a job at its smallest size, whoever else there is.

    Empty if it has its smallest size of one kind of VM at least.
    """
    pairs = zip(state.supplies, job.request.throughputs, strict=True)
    smallest = [(supply, table[0][0]) for supply, table in pairs if table]
    left = [(supply, n) for supply, n in smallest if n <= supply.vms]
    if not left:
        return "the pool"
    team = job.request.team
    for whose, limits in (
        ("the pool's caps", state.settings.limits),
        (f"the caps of team {team}", state.team(job).limits),
        ("its own caps", job.request.limits),
    ):
        left = [
            (supply, n)
            for supply, n in left
            if n <= limits.max_vms and n * supply.microusd_per_hour <= limits.max_microusd_per_hour
        ]
        if not left:
            return whose
    return ""


def _caps(state: PoolState, jobs: list[PoolJob]) -> Iterable[Constraint]:
    """Yield the caps of the pool, of teams and of jobs."""
    groups = [(state.settings.limits, frozenset(range(len(jobs))))]
    for name, team in state.settings.teams.items():
        own = [m for m, job in enumerate(jobs) if job.request.team == name]
        groups.append((team.limits, frozenset(own)))
    groups += [(job.request.limits, frozenset([m])) for m, job in enumerate(jobs)]
    for limits, members in groups:
        if members:
            yield from constraints_of(state, limits, members)


def constraints_of(
    state: PoolState, limits: Limits, members: frozenset[int]
) -> Iterable[Constraint]:
    """Yield the caps that limits put on what jobs hold at once."""
    if limits.max_vms < math.inf:
        yield Constraint(members, (1.0,) * len(state.supplies), limits.max_vms)
    if limits.max_microusd_per_hour < math.inf:
        prices = tuple(float(supply.microusd_per_hour) for supply in state.supplies)
        yield Constraint(members, prices, limits.max_microusd_per_hour)
