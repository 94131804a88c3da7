"""Policies that serve jobs in an order, on whole VMs: no linear programs.

The program of section 5.4.2 for first come first served weighs ranks, and lets a head of the
queue that gains little from its last VMs give them to others; and shortest job first is a
maximum of linear functions, which no one linear program finds. The queues themselves are
both exact and quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from spottrain.pricing.sharing.capacity import CapacityTracker
from spottrain.pricing.sharing.problem import Allocation, AllocationProblem, Configuration
from spottrain.pricing.sharing.solver import Floats


def fifo(problem: AllocationProblem) -> Allocation:
    """Return each job's best option in what those that arrived before leave."""
    order = sorted(_indices(problem), key=lambda m: problem.demands[m].arrived_s)
    return _served(problem, order)


def shortest_first(problem: AllocationProblem) -> Allocation:
    """Return each job's best option in what those leave that could end before it."""

    def left_s(m: int) -> float:
        return float(problem.demands[m].examples / problem.best[m])

    return _served(problem, sorted(_indices(problem), key=left_s))


def priority(problem: AllocationProblem) -> Allocation:
    """Return elastic weighted fair shares of VMs (VirtualFlow, Algorithm 1).

    Jobs that wait are admitted in order of priority, each only if no job of a higher one
    loses VMs by it. No job is below its smallest size: where these do not all fit,
    those of the lowest priority wait. Shares are of VMs of any kind; in order of priority
    each job has the kind on which that many train fastest.
    """
    demands, shares = problem.demands, _Shares(problem)

    def rank(m: int) -> tuple[float, float]:
        return (-demands[m].weight, demands[m].arrived_s)

    running = sorted((m for m in _indices(problem) if demands[m].running), key=rank)
    waiting = sorted((m for m in _indices(problem) if not demands[m].running), key=rank)
    given = shares.of(running)
    for head in waiting:
        jobs = sorted([*running, head], key=rank)
        sizes = shares.of(jobs)
        higher = [m for m in running if demands[m].weight > demands[head].weight]
        if not sizes.get(head) or any(sizes.get(m, 0) < given.get(m, 0) for m in higher):
            break
        running, given = jobs, sizes
    return _served(problem, sorted(running, key=rank), given)


def _indices(problem: AllocationProblem) -> range:
    return range(len(problem.demands))


class _Shares:
    """Whole VMs by weight, between smallest and largest sizes, within all caps on VMs.

    A cap on dollars counts as one on VMs of the cheapest kind; the rest is up to whoever
    gives out VMs.
    """

    def __init__(self, problem: AllocationProblem) -> None:
        sizes = [[sum(o.vms) for o in options] for options in problem.options_of]
        self.low = np.array([min(each) for each in sizes], dtype=float)
        self.high = np.array([max(each) for each in sizes], dtype=float)
        self.weights = problem.weights
        everybody = np.ones(len(sizes), bool)
        self.groups = [(everybody, float(sum(problem.vms)))]
        """Jobs, and the VMs that they may hold together."""
        for cap in problem.caps:
            if (least := min(cap.per_vm)) <= 0:
                continue
            at_most = math.floor(cap.at_most / least + 1e-9)
            members = np.isin(np.arange(len(sizes)), list(cap.jobs))
            if len(cap.jobs) == 1:
                self.high[members] = np.minimum(self.high[members], at_most)
            else:
                self.groups.append((members, float(at_most)))
        self.groups_of = [
            [i for i, (group, _) in enumerate(self.groups) if group[m]] for m in range(len(sizes))
        ]

    def of(self, jobs: Sequence[int]) -> dict[int, int]:
        """Return VMs by job; of jobs, in order of priority, those that fit at their smallest.

        Who does not fit keeps those of lower priority from what it lacks.
        """
        chosen = self._fitting(jobs)
        exact = self._levelled(chosen)
        sizes = np.floor(exact + 1e-9)
        rest = exact - sizes
        left = [at_most - sizes[group].sum() for group, at_most in self.groups]
        for m in sorted(chosen, key=lambda m: -rest[m]):
            own = self.groups_of[m]
            if rest[m] > 1e-9 and all(left[i] >= 1 for i in own):
                sizes[m] += 1
                for i in own:
                    left[i] -= 1
        return {m: int(sizes[m]) for m in chosen}

    def _fitting(self, jobs: Sequence[int]) -> list[int]:
        """Return the jobs that have room at their smallest size."""
        left = [at_most for _, at_most in self.groups]
        chosen = []
        for m in jobs:
            fits = self.low[m] <= self.high[m]
            for i in self.groups_of[m]:
                if self.low[m] > left[i]:
                    left[i], fits = 0.0, False
            if fits:
                chosen.append(m)
                for i in self.groups_of[m]:
                    left[i] -= self.low[m]
        return chosen

    def _levelled(self, chosen: Sequence[int]) -> Floats:
        """Return the exact shares: as many VMs per weight as bounds and caps permit."""
        exact = np.zeros(len(self.low))
        open_ = np.isin(np.arange(len(exact)), list(chosen))
        while open_.any():
            levels = [
                self._level(group & open_, at_most - exact[group & ~open_].sum())
                for group, at_most in self.groups
            ]
            tightest = int(np.argmin(levels))
            is_full = levels[tightest] < math.inf
            ends = open_ & self.groups[tightest][0] if is_full else open_
            level = self.weights[ends] * levels[tightest]
            exact[ends] = np.clip(level, self.low[ends], self.high[ends])
            open_ &= ~ends
        return exact

    def _level(self, members: NDArray[np.bool_], at_most: float) -> float:
        """Return VMs per weight at which so many are given; infinite: to all their largest."""
        low, high = self.low[members], self.high[members]
        weights = self.weights[members]
        at_most = max(at_most, low.sum())  # which there is room for, but for rounding
        if high.sum() <= at_most:
            return math.inf
        # What is given is linear between the levels at which jobs leave a bound.
        levels = np.concatenate([low / weights, high / weights])
        order = np.argsort(levels)
        slopes = np.cumsum(np.concatenate([weights, -weights])[order])
        levels = levels[order]
        given = low.sum() + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(levels))])
        last = int(np.searchsorted(given, at_most, "right")) - 1
        rest = at_most - given[last]
        return float(levels[last] + (rest / slopes[last] if rest > 0 else 0.0))


class _Sizes:
    """The whole numbers of VMs on which a job may run: between corners, on each kind."""

    def __init__(self, options: Sequence[Configuration]) -> None:
        self.mixed: list[Configuration] = []
        self.corners: dict[int, list[tuple[int, float]]] = {}
        for option in options:
            kinds = [k for k, n in enumerate(option.vms) if n]
            if len(kinds) == 1:
                corner = (option.vms[kinds[0]], option.examples_per_s)
                self.corners.setdefault(kinds[0], []).append(corner)
            else:
                self.mixed.append(option)
        self.width = len(options[0].vms)
        for corners in self.corners.values():
            corners.sort()

    def fastest(self, room: CapacityTracker, m: int, at_most: int) -> Configuration | None:
        """Return what trains most in what there is room for, of these the fewest VMs."""
        found = [o for o in self._fitting(room, m) if sum(o.vms) <= at_most]
        most = room.most(m)
        for kind, corners in self.corners.items():
            n = min(most[kind], at_most, corners[-1][0])
            if n >= corners[0][0]:
                found.append(self._on(kind, n))
        return max(found, key=lambda o: (o.examples_per_s, -sum(o.vms)), default=None)

    def enough(self, room: CapacityTracker, m: int, rate: float) -> Configuration | None:
        """Return the fewest VMs that there is room for and that train so much."""
        rate *= 1 - 1e-9
        found = [o for o in self._fitting(room, m) if o.examples_per_s >= rate]
        most = room.most(m)
        for kind, corners in self.corners.items():
            if corners[-1][1] < rate:
                continue
            sizes, rates = zip(*corners, strict=True)
            n = math.ceil(float(np.interp(rate, rates, sizes)) - 1e-9)
            if n <= most[kind]:
                found.append(self._on(kind, n))
        return min(found, key=lambda o: (sum(o.vms), -o.examples_per_s), default=None)

    def _fitting(self, room: CapacityTracker, m: int) -> list[Configuration]:
        return [option for option in self.mixed if room.fits(m, option.vms)]

    def _on(self, kind: int, n: int) -> Configuration:
        sizes, rates = zip(*self.corners[kind], strict=True)
        vms = tuple(n if k == kind else 0 for k in range(self.width))
        return Configuration(vms, float(np.interp(n, sizes, rates)))


def _served(
    problem: AllocationProblem, order: Iterable[int], most: dict[int, int] | None = None
) -> Allocation:
    """Return each job's fastest option in what there is room for, in order; deadlines come
    first.

    Args:
        order: The jobs to serve.
        most: The most VMs that each may have.
    """
    room = CapacityTracker(problem)
    chosen: dict[int, Configuration] = {}
    sizes = [_Sizes(options) for options in problem.options_of]
    urgent = [m for m in _indices(problem) if problem.needed[m] > 0]
    urgent.sort(key=lambda m: problem.demands[m].deadline_s)
    for m in urgent:
        if enough := sizes[m].enough(room, m, float(problem.needed[m])):
            chosen[m] = enough
            room.take(m, enough.vms)
    for m in order:
        at_most = sum(problem.vms) if most is None else most.get(m, 0)
        kept = chosen.get(m)
        best = sizes[m].fastest(room, m, at_most)
        if best and (kept is None or best.examples_per_s > kept.examples_per_s):
            chosen[m] = best
            room.take(m, best.vms)
    shares = tuple(((chosen[m], 1.0),) if m in chosen else () for m in _indices(problem))
    rates = [chosen[m].examples_per_s if m in chosen else 0.0 for m in _indices(problem)]
    return Allocation(shares, tuple(rates))
