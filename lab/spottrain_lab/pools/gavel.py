"""Gavel replayed: its shares of time, in rounds, at fixed sizes (dissertation, chapter 5)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spottrain.errors import ConfigError
from spottrain.pricing.sharing.filling import AllocationProgram, water_fill
from spottrain.pricing.sharing.policies import POLICIES, equal_rates
from spottrain.pricing.sharing.problem import (
    Allocation,
    AllocationProblem,
    Configuration,
    JobDemand,
)
from spottrain.units import HOUR_S
from spottrain.varuna_manager.pool.core.model import Supply, Vms
from spottrain.varuna_manager.pool.simulation.outcome import (
    JobOutcome,
    PoolOutcome,
    own_part_rate,
)
from spottrain.varuna_manager.pool.simulation.workload import SimulatedJob
from spottrain_lab.pools import policies as fixed_sizes
from spottrain_lab.pools.market import Demand, OfferType, Shares
from spottrain_lab.pools.rounds import ROUND_S, Choice, RoundScheduler

Shared = Callable[[AllocationProblem], Allocation]
FRUGAL = frozenset({"cheapest", "min_cost", "isolated"})
"""Policies that leave VMs idle: for their price, or because they are somebody else's."""
SPARE = 2
"""Rounds by which deadlines are aimed at earlier: shares come in whole rounds."""
CHECKPOINT_S = 5.0
"""Loading and saving takes their models less than so long (section 5.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gavel:
    """How Gavel is replayed.

    Raises:
        ConfigError: a policy that it does not have.
    """

    policy: str = "fair"
    is_aware: bool = True
    """Of kinds; else every VM counts as the fastest kind, and time goes to kinds by their VMs."""
    round_s: float = ROUND_S
    morph_s: float = CHECKPOINT_S
    """Lost in a round on other VMs than in the last."""
    mixed: Callable[[SimulatedJob], Iterable[Configuration]] | None = None
    """Options over several kinds; only where the policy is aware of them."""

    def __post_init__(self) -> None:
        if self.policy not in _SHARES:
            raise ConfigError(
                f"policy: got {self.policy}; give one of {', '.join(sorted(_SHARES))}"
            )

    def shares(self, problem: AllocationProblem) -> Allocation:
        """Return each job's shares of time."""
        return _SHARES[self.policy](problem)


def max_throughput(problem: AllocationProblem) -> Allocation:
    """Return the shares with which most steps per second are trained (section 6.4.1)."""
    return _of_kinds(problem, fixed_sizes.max_throughput)


def min_cost(problem: AllocationProblem) -> Allocation:
    """Return the shares of most steps per dollar, deadlines or not (section 6.4.1)."""
    return _of_kinds(problem, fixed_sizes.max_examples_per_usd, has_deadlines=False)


def isolated(problem: AllocationProblem) -> Allocation:
    """Return an equal part of every kind for each job, as if nobody shared anything."""
    shares = []
    for own in problem.options_of:
        parts = [
            problem.vms[int(np.argmax(option.vms))] / (len(problem.demands) * sum(option.vms))
            for option in own
        ]
        over = max(1.0, sum(parts))
        shares.append(tuple((o, part / over) for o, part in zip(own, parts, strict=True)))
    rates = [sum(o.examples_per_s * part for o, part in given) for given in shares]
    return Allocation(tuple(shares), tuple(rates))


def _of_kinds(
    problem: AllocationProblem,
    policy: Callable[[Sequence[OfferType], Sequence[Demand]], Shares],
    *,
    has_deadlines: bool = True,
) -> Allocation:
    """Return what a policy over jobs and kinds gives, as shares of options."""
    kinds = range(len(problem.kinds))
    prices = problem.usd_per_hour or (0.0,) * len(problem.kinds)
    types = [
        OfferType(name=name, usd_per_hour=usd, quota=n)
        for name, usd, n in zip(problem.kinds, prices, problem.vms, strict=True)
    ]
    by_kind = [{k: o for o in options for k in kinds if o.vms[k]} for options in problem.options_of]
    demands = [
        Demand(
            name=demand.name,
            examples=demand.examples,
            examples_per_s=tuple(own[k].examples_per_s if k in own else 0.0 for k in kinds),
            deadline_h=demand.deadline_s / HOUR_S if has_deadlines else math.inf,
            machines=max(max(option.vms) for option in own.values()),
        )
        for demand, own in zip(problem.demands, by_kind, strict=True)
    ]
    found = policy(types, demands)
    shares = tuple(
        tuple((own[k], row[k]) for k in kinds if k in own and row[k] > 1e-7)
        for own, row in zip(by_kind, found.shares, strict=True)
    )
    rates = [sum(o.examples_per_s * share for o, share in row) for row in shares]
    return Allocation(shares, tuple(rates))


def fair(problem: AllocationProblem) -> Allocation:
    """Return weighted max-min fair shares of throughput, each job's against its weight times
    what one VM trains (section 5.4.1)."""
    slope = equal_rates(problem) * problem.weights / problem.best
    return water_fill(AllocationProgram(problem), lambda _: slope)


_SHARES: Mapping[str, Shared] = {
    **POLICIES,
    "fair": fair,
    "max_throughput": max_throughput,
    "min_cost": min_cost,
    "isolated": isolated,
}


def simulate(gavel: Gavel, supplies: Sequence[Supply], jobs: Iterable[SimulatedJob]) -> PoolOutcome:
    """Return what comes of jobs that arrive, by Gavel's mechanism.

    Shares are computed anew in the round after a job arrived or ended. A job that ends within a
    round leaves its VMs idle until the next.
    """
    replayed = _Replay(gavel, tuple(supplies), jobs)
    while replayed.coming or replayed.active:
        replayed.run_round()
    return PoolOutcome(
        kinds=tuple(supply.name for supply in supplies),
        vms=replayed.vms,
        jobs=tuple(replayed.outcomes),
        refused=tuple(replayed.refused),
        decision_s=replayed.decision_s,
    )


class _Replay:
    """The state between rounds."""

    def __init__(
        self, gavel: Gavel, supplies: tuple[Supply, ...], jobs: Iterable[SimulatedJob]
    ) -> None:
        self.gavel, self.supplies = gavel, supplies
        self.vms: Vms = tuple(supply.vms for supply in supplies)
        self.refused: list[tuple[str, str]] = []
        self.outcomes: list[JobOutcome] = []
        for job in sorted(jobs, key=lambda job: job.arrived_s):
            if own_part_rate(job, self.vms, 1.0) > 0:
                self.outcomes.append(JobOutcome(job))
            else:
                self.refused.append((job.name, f"{job.name}: larger than the pool"))
        self.coming = list(range(len(self.outcomes)))[::-1]
        self.active: list[int] = []
        self.left = [one.job.work for one in self.outcomes]
        self.alone_s = [0.0] * len(self.outcomes)
        """Time that what is done would have taken on a part of the pool."""
        self.last: dict[int, Configuration] = {}
        self.now_s = 0.0
        self.scheduler: RoundScheduler | None = None
        self.members: list[int] = []
        """Jobs as the scheduler counts them."""
        self.decision_s = 0.0
        self._options = [self._own_options(one.job) for one in self.outcomes]

    def _own_options(self, job: SimulatedJob) -> tuple[Configuration, ...]:
        width = len(self.vms)
        single = [
            Configuration(tuple(job.size if k == j else 0 for j in range(width)), rate)
            for k, table in enumerate(job.throughputs)
            if (rate := table.get(job.size, 0.0)) > 0 and job.size <= self.vms[k]
        ]
        mixed = self.gavel.mixed
        return (*single, *(mixed(job) if mixed else ()))

    def run_round(self) -> None:
        """Let a round pass."""
        if not self.active:
            arrives_s = self.outcomes[self.coming[-1]].job.arrived_s
            rounds = math.ceil((arrives_s - self.now_s) / self.gavel.round_s)
            self.now_s += max(0, rounds) * self.gavel.round_s
        while self.coming and self.outcomes[self.coming[-1]].job.arrived_s <= self.now_s:
            self.active.append(self.coming.pop())
            self.scheduler = None
        if self.scheduler is None:
            begun_s = time.process_time()
            self.scheduler, self.members = self._reset(), list(self.active)
            self.decision_s = max(self.decision_s, time.process_time() - begun_s)
        places = {m: place for place, m in enumerate(self.members)}
        chosen = self.scheduler.next_round([places[m] for m in self.active])
        self._train([(self.members[place], option) for place, option in chosen])
        self.now_s += self.gavel.round_s

    def _reset(self) -> RoundScheduler:
        problem = AllocationProblem(
            kinds=tuple(supply.name for supply in self.supplies),
            vms=self.vms,
            usd_per_hour=tuple(s.microusd_per_hour / 1e6 for s in self.supplies),
            demands=tuple(self._demand(m, self._options[m]) for m in self.active),
        )
        allocation = self.gavel.shares(problem) if self.gavel.is_aware else self._unaware(problem)
        spare = dict(enumerate(problem.options_of))
        if self.gavel.policy in FRUGAL:
            spare = {}
        return RoundScheduler(self.vms, allocation, spare)

    def _demand(self, m: int, options: tuple[Configuration, ...]) -> JobDemand:
        job = self.outcomes[m].job
        return JobDemand(
            name=job.name,
            options=options,
            examples=max(self.left[m], job.work * 1e-9),
            weight=job.weight,
            arrived_s=job.arrived_s,
            deadline_s=max(1.0, job.deadline_s - self.now_s - SPARE * self.gavel.round_s),
            team=job.team,
            age_s=self.now_s - job.arrived_s,
            isolated_age_s=min(self.now_s - job.arrived_s, self.alone_s[m]),
            running=m in self.last,
        )

    def _unaware(self, problem: AllocationProblem) -> Allocation:
        """Return shares as if all VMs were of the fastest kind, by VMs of each kind."""
        total = sum(self.vms)
        fastest = [max(o.examples_per_s for o in own) for own in problem.options_of]
        demands = tuple(
            replace(demand, options=(Configuration((self.outcomes[m].job.size,), rate),))
            for m, demand, rate in zip(self.active, problem.demands, fastest, strict=True)
        )
        whole = self.gavel.shares(AllocationProblem(kinds=("any",), vms=(total,), demands=demands))
        shares = []
        for own, given in zip(problem.options_of, whole.shares, strict=True):
            share = sum(part for _, part in given)
            held = [self.vms[int(np.argmax(option.vms))] for option in own]
            shares.append(tuple((o, share * n / sum(held)) for o, n in zip(own, held, strict=True)))
        return Allocation(tuple(shares), whole.examples_per_s)

    def _train(self, chosen: Sequence[Choice]) -> None:
        none = (0,) * len(self.vms)
        part = 1.0 / len(self.active)
        running = dict(chosen)
        for m in list(self.active):
            one = self.outcomes[m]
            option = running.get(m)
            if option is None:
                if any(one.sizes):
                    one.holds(self.now_s, none)
                continue
            lost_s = 0.0 if self.last.get(m) == option else self.gavel.morph_s
            if one.started_s == math.inf:
                one.started_s, lost_s = self.now_s, 0.0
            needed_s = lost_s + self.left[m] / option.examples_per_s
            lasts_s = min(self.gavel.round_s, needed_s)
            done = min(self.left[m], max(0.0, lasts_s - lost_s) * option.examples_per_s)
            self.left[m] -= done
            self.alone_s[m] += done / own_part_rate(one.job, self.vms, part)
            one.holds(self.now_s, option.vms)
            usd_per_hour = sum(
                supply.microusd_per_hour * n / 1e6
                for supply, n in zip(self.supplies, option.vms, strict=True)
            )
            one.usd += usd_per_hour * lasts_s / HOUR_S
            if needed_s <= self.gavel.round_s:
                one.ended_s = self.now_s + lasts_s
                one.holds(one.ended_s, none)
                self.active.remove(m)
                self.scheduler = None
        self.last = running
