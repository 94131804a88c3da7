"""Policies that serve jobs in an order, on whole VMs: no linear programs.

The program of section 5.4.2 for first come first served weighs ranks, and lets a head of the
queue that gains little from its last VMs give them to others; and shortest job first is a
maximum of linear functions, which no one linear program finds. The queues themselves are
both exact and quick.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spottrain.pricing.sharing.claims import Allotment, Claim, Contest, Option
from spottrain.pricing.sharing.market import Floats


def fifo(contest: Contest) -> Allotment:
    """Return each job's best option in what those that arrived before leave."""
    order = sorted(_indices(contest), key=lambda m: contest.claims[m].arrived_s)
    return _served(contest, order)


def shortest_first(contest: Contest) -> Allotment:
    """Return each job's best option in what those leave that could end before it."""

    def left_s(m: int) -> float:
        return float(contest.claims[m].examples / contest.best[m])

    return _served(contest, sorted(_indices(contest), key=left_s))


def priority(contest: Contest) -> Allotment:
    """Return elastic weighted fair shares of VMs (VirtualFlow, Algorithm 1).

    Jobs that wait are admitted in order of priority, each only if no job of a higher one
    loses VMs by it. No job is below its smallest size: where these do not all fit,
    those of the lowest priority wait. Shares are of VMs of any kind; in order of priority
    each job has the kind on which that many train fastest.
    """
    claims, capacity = contest.claims, sum(contest.vms)

    def rank(m: int) -> tuple[float, float]:
        return (-claims[m].weight, claims[m].arrived_s)

    running = sorted((m for m in _indices(contest) if claims[m].running), key=rank)
    waiting = sorted((m for m in _indices(contest) if not claims[m].running), key=rank)
    given = _fair_sizes(contest, running, capacity)
    for head in waiting:
        jobs = sorted([*running, head], key=rank)
        sizes = _fair_sizes(contest, jobs, capacity)
        higher = (m for m in running if claims[m].weight > claims[head].weight)
        if not sizes.get(head) or any(
            sizes.get(m, 0) < given.get(m, 0) for m in higher
        ):
            break
        running, given = jobs, sizes
    return _served(contest, sorted(running, key=rank), given)


def _indices(contest: Contest) -> range:
    return range(len(contest.claims))


def _fair_sizes(contest: Contest, jobs: Sequence[int], capacity: int) -> dict[int, int]:
    """Return whole VMs by job, proportional to weights between smallest and largest sizes.

    Args:
        contest: The pool.
        jobs: In order of priority.
        capacity: VMs of all kinds.
    """
    fitting = [[sum(o.vms) for o in _fitting(contest, m)] for m in jobs]
    smallest = np.array([min(sizes) for sizes in fitting], dtype=float)
    kept = int(np.searchsorted(np.cumsum(smallest), capacity, side="right"))
    if not kept:
        return {}
    low, weights = smallest[:kept], contest.weights[list(jobs[:kept])]
    high = np.array([max(sizes) for sizes in fitting[:kept]], dtype=float)
    below, above = 0.0, float((high / weights).max())
    for _ in range(60):
        level = (below + above) / 2
        if np.clip(weights * level, low, high).sum() > capacity:
            above = level
        else:
            below = level
    exact = np.clip(weights * above, low, high)
    sizes = np.floor(exact + 1e-9)
    while (
        sizes.sum() > capacity
    ):  # all of them at their largest: above was never reached
        sizes[int(np.argmax(sizes - low))] -= 1
    left = int(min(capacity, round(exact.sum())) - sizes.sum())
    for m in np.argsort(-(exact - sizes), kind="stable")[: max(0, left)]:
        sizes[m] += sizes[m] < high[m]
    return {m: int(size) for m, size in zip(jobs, sizes, strict=False)}


def _fitting(contest: Contest, m: int) -> list[Option]:
    return [o for o in contest.claims[m].options if contest.fits(o)]


def whole_sizes(claim: Claim) -> list[Option]:
    """Return the options of a job with the whole numbers of VMs between them on one kind."""
    by_kind: dict[int, list[tuple[int, float]]] = {}
    found = []
    for option in claim.options:
        kinds = [k for k, n in enumerate(option.vms) if n]
        if len(kinds) == 1:
            corner = (option.vms[kinds[0]], option.examples_per_s)
            by_kind.setdefault(kinds[0], []).append(corner)
        else:
            found.append(option)
    width = len(claim.options[0].vms)
    for kind, corners in by_kind.items():
        corners.sort()
        sizes, rates = zip(*corners, strict=True)
        for n in range(sizes[0], sizes[-1] + 1):
            vms = tuple(n if k == kind else 0 for k in range(width))
            found.append(Option(vms, float(np.interp(n, sizes, rates))))
    return found


def _served(
    contest: Contest, order: Iterable[int], sizes: dict[int, int] | None = None
) -> Allotment:
    """Return each job's fastest option in what is free, in order; deadlines come first.

    Args:
        contest: The pool.
        order: The jobs to serve.
        sizes: The most VMs that each may have.
    """
    order = list(order)
    free = np.array(contest.vms)
    chosen: dict[int, Option] = {}
    urgent = [m for m in _indices(contest) if contest.needed[m] > 0]
    urgent.sort(key=lambda m: contest.claims[m].deadline_s)
    for m in urgent:
        enough = [
            option
            for option in whole_sizes(contest.claims[m])
            if option.examples_per_s >= contest.needed[m] * (1 - 1e-9)
            and (np.array(option.vms) <= free).all()
        ]
        if enough:
            chosen[m] = min(enough, key=lambda o: (sum(o.vms), -o.examples_per_s))
            free -= chosen[m].vms
    for m in order:
        at_most = sum(contest.vms) if sizes is None else sizes.get(m, 0)
        kept = chosen.get(m)
        within = free + (np.array(kept.vms) if kept else 0)
        best = _fastest(contest.claims[m], within, at_most)
        if best and (kept is None or best.examples_per_s > kept.examples_per_s):
            chosen[m] = best
            free = within - best.vms
    shares = tuple(
        ((chosen[m], 1.0),) if m in chosen else () for m in _indices(contest)
    )
    rates = [
        chosen[m].examples_per_s if m in chosen else 0.0 for m in _indices(contest)
    ]
    return Allotment(shares, tuple(rates))


def _fastest(claim: Claim, free: Floats, at_most: int) -> Option | None:
    fitting = [
        option
        for option in whole_sizes(claim)
        if sum(option.vms) <= at_most and (np.array(option.vms) <= free).all()
    ]
    return max(fitting, key=lambda o: (o.examples_per_s, -sum(o.vms)), default=None)
