"""Whole VMs from a policy's shares.

Promised deadlines are reserved for first, the earliest before others: each the fewest whole
VMs that are enough, so that rounding never takes what a promise needs. A share of the time in
several configurations becomes one size on one supply: floors first, then the largest
remainders (as seats are given to parties). A job whose share is below its smallest size is
time-sliced in rounds, by deficit: first who received least of what it was entitled to
(Gavel's priority, section 5.5, in wall-clock time). What is left goes where it trains most.
Caps are kept at every step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter

import numpy as np

from spottrain.pricing.sharing.capacity import CapacityTracker
from spottrain.pricing.sharing.problem import Allocation, AllocationProblem
from spottrain.varuna_manager.pool.core.model import PoolJob, Vms


def round_to_vms(
    problem: AllocationProblem,
    allocation: Allocation,
    jobs: Sequence[PoolJob],
    keeps: Sequence[bool],
    owed: Sequence[bool],
    starved_s: Sequence[float],
) -> list[Vms]:
    """Return the VMs of each job.

    Args:
        problem: The pool, and the jobs as demands.
        allocation: The policy's result.
        jobs: The same jobs.
        keeps: By job: it runs, and has not been there for a round.
        owed: By job: it waits, and its share has come to a round of its smallest size. It
            comes in its order among floors, which could leave it no room on any kind for ever.
        starved_s: By job: who waits longer comes first, with enough VMs for its share: floors
            of several would leave it short, and the VMs between them with who takes turns.
    """
    none = (0,) * len(problem.vms)
    room = CapacityTracker(problem)
    ideal = [_target_size(problem, allocation, jobs, m) for m in range(len(jobs))]

    def urgency(m: int) -> tuple[bool, float, float, float]:
        entitled, received = jobs[m].entitled_s, jobs[m].received_s
        ratio = entitled / received if received else np.inf
        return (not keeps[m], -starved_s[m], -ratio, -entitled)

    def take_smallest(m: int) -> bool:
        kind, _, smallest = ideal[m]
        return room.take(m, _on(none, kind, smallest)) or _place_smallest(room, jobs, m)

    _reserve_for_deadlines(room, jobs)
    order = sorted(range(len(jobs)), key=urgency)
    below = []
    for m in order:
        kind, exact, smallest = ideal[m]
        if exact <= 0:
            continue
        in_turn = exact < smallest and (keeps[m] or owed[m])
        if in_turn and take_smallest(m):
            continue
        wholes = [int(exact + 1e-6)] if exact >= smallest else []
        if starved_s[m]:
            wholes = [_min_vms_for_rate(jobs[m], kind, allocation.examples_per_s[m]), *wholes]
        has_rate = jobs[m].rate(room.sizes[m])
        sizes = [_on(none, kind, n) for n in wholes]
        if any(jobs[m].rate(size) > has_rate and room.take(m, size) for size in sizes):
            continue
        if not has_rate:
            below.append(m)
    for m in below:
        take_smallest(m)
    for m in sorted(order, key=lambda m: -(ideal[m][1] % 1)):
        kind, exact, _ = ideal[m]
        if 0 < room.sizes[m][kind] < exact - 1e-6:
            room.take(m, _on(none, kind, room.sizes[m][kind] + 1))
    return room.sizes


def reserved_vms(problem: AllocationProblem, jobs: Sequence[PoolJob]) -> list[Vms]:
    """Return what ``round_to_vms`` sets apart for promised deadlines."""
    room = CapacityTracker(problem)
    _reserve_for_deadlines(room, jobs)
    return room.sizes


def fill_leftover(
    problem: AllocationProblem,
    sizes: Sequence[Vms],
    jobs: Sequence[PoolJob],
    order: Sequence[int],
) -> list[Vms]:
    """Return sizes to which no VM can be added that trains more.

    Args:
        problem: The pool, and the jobs as demands.
        sizes: By job.
        jobs: The same jobs.
        order: Who is asked first, of those with no VMs.
    """
    room = CapacityTracker(problem, list(sizes))
    for m in order:
        if not any(room.sizes[m]):
            _place_smallest(room, jobs, m)
    # What a job cannot have now it cannot have later either: others only grow.
    steps = [
        step for m in range(len(jobs)) if any(room.sizes[m]) and (step := _next(room, jobs[m], m))
    ]
    heapify(steps)
    while steps:
        _, m, size = heappop(steps)
        if room.take(m, size) and (step := _next(room, jobs[m], m)):
            heappush(steps, step)
    return room.sizes


def _reserve_for_deadlines(room: CapacityTracker, jobs: Sequence[PoolJob]) -> None:
    """Give jobs with deadlines what these need, or as much as there is."""
    problem = room.problem
    none = (0,) * len(problem.vms)
    promised = [m for m in range(len(jobs)) if problem.needed[m] > 0]
    for m in sorted(promised, key=lambda m: problem.demands[m].deadline_s):
        needed = float(problem.needed[m]) * (1 - 1e-9)
        enough, less = [], []
        for kind, (sizes, rates) in enumerate(jobs[m].request.envelopes):
            at = bisect_left(rates, needed)
            # The kind that it holds comes first, then what is the smallest part of a kind.
            if at < len(sizes):
                part = sizes[at] / max(1, problem.vms[kind])
                enough.append((not jobs[m].granted[kind], part, kind, sizes[at]))
            less += [(-rate, kind, n) for n, rate in zip(sizes[:at], rates, strict=False)]
        if any(room.take(m, _on(none, kind, n)) for _, _, kind, n in sorted(enough)):
            continue
        any(room.take(m, _on(none, kind, n)) for _, kind, n in sorted(less))


def _target_size(
    problem: AllocationProblem, allocation: Allocation, jobs: Sequence[PoolJob], m: int
) -> tuple[int, float, int]:
    """Return the supply that a job's share is mostly on, its size there, the smallest one."""
    trained = np.zeros(len(problem.vms))
    for option, share in allocation.shares[m]:
        trained += np.array(option.vms, bool) * option.examples_per_s * share
    if not trained.any():
        return 0, 0.0, 1
    holds = np.array(jobs[m].granted, bool)
    kind = int(np.argmax(trained * np.where(holds, 1.0 + 1e-3, 1.0)))
    corners = sorted(
        (option.vms[kind], option.examples_per_s)
        for option in problem.options_of[m]
        if option.vms[kind]
    )
    sizes, rates = zip(*[(0, 0.0), *corners], strict=True)
    exact = float(np.interp(allocation.examples_per_s[m], rates, sizes))
    return kind, exact, corners[0][0]


def _min_vms_for_rate(job: PoolJob, kind: int, examples_per_s: float) -> int:
    """Return the fewest VMs of a kind on which a job trains so much, or its best there."""
    sizes, rates = job.request.envelopes[kind]
    return sizes[min(bisect_left(rates, examples_per_s * (1 - 1e-9)), len(sizes) - 1)]


def _place_smallest(room: CapacityTracker, jobs: Sequence[PoolJob], m: int) -> bool:
    """Give a job its smallest size on the supply where that trains most."""
    none = (0,) * len(room.problem.vms)
    smallest = [
        (table[0][1], _on(none, kind, table[0][0]))
        for kind, table in enumerate(jobs[m].request.throughputs)
        if table
    ]
    return any(room.take(m, size) for _, size in sorted(smallest, reverse=True))


def _next(room: CapacityTracker, job: PoolJob, m: int) -> tuple[float, int, Vms] | None:
    """Return less the gain per VM, as a part of its best throughput, of a job's next size."""
    size = room.sizes[m]
    kind = max(range(len(size)), key=lambda k: size[k])
    table = job.request.throughputs[kind]
    after = bisect_right(table, size[kind], key=itemgetter(0))
    have = job.rate(size)
    for n, rate in table[after:]:
        if rate > have:
            gain = (rate - have) / (n - size[kind]) / job.best
            return -gain, m, _on(size, kind, n)
    return None


def _on(vms: Vms, kind: int, n: int) -> Vms:
    return (*vms[:kind], n, *vms[kind + 1 :])
