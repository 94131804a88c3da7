"""Whole VMs from a policy's shares.

A share of the time in several options becomes one size on one supply. Floors first, then
the largest remainders (as seats are given to parties); a job whose share is below its
smallest size has that size for part of the time, in rounds: those go first whose share so far
is largest against what they got (Gavel's priority, section 5.5, in wall-clock time). What is
left goes where it trains most. Caps are kept at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spottrain.pricing.sharing.claims import Allotment, Contest
from spottrain.varuna_manager.pool.core.model import PoolJob, Vms


@dataclass
class Room:
    """What the contest's VMs and caps leave, while sizes are given out."""

    contest: Contest
    sizes: list[Vms] = field(default_factory=list)
    """By job."""

    def fits(self, m: int, size: Vms) -> bool:
        """Return whether a job may have a size in place of its present one."""
        more = [new - old for new, old in zip(size, self.sizes[m], strict=True)]
        for k, vms in enumerate(self.contest.vms):
            if more[k] > 0 and sum(held[k] for held in self.sizes) + more[k] > vms:
                return False
        for cap in self.contest.caps:
            added = _counted(cap.per_vm, more) if m in cap.jobs else 0.0
            used = sum(_counted(cap.per_vm, self.sizes[j]) for j in cap.jobs)
            if added > 0 and used + added > cap.at_most + 1e-9:
                return False
        return True

    def take(self, m: int, size: Vms) -> bool:
        """Give a job a size if it fits."""
        if fits := self.fits(m, size):
            self.sizes[m] = size
        return fits


def whole_vms(
    contest: Contest,
    allotment: Allotment,
    jobs: Sequence[PoolJob],
    keeps: Sequence[bool],
) -> list[Vms]:
    """Return the VMs of each job.

    Args:
        contest: The pool, and the jobs as claims.
        allotment: The policy's result.
        jobs: The same jobs.
        keeps: By job: it runs, and has not been there for a round.
    """
    none = (0,) * len(contest.vms)
    room = Room(contest, [none] * len(jobs))
    ideal = [_ideal(contest, allotment, jobs, m) for m in range(len(jobs))]

    def urgency(m: int) -> tuple[bool, float, float]:
        got = jobs[m].got_s
        return (not keeps[m], -(jobs[m].due_s / got if got else np.inf), -jobs[m].due_s)

    order = sorted(range(len(jobs)), key=urgency)
    below = []
    for m in order:
        kind, exact, smallest = ideal[m]
        if exact <= 0:
            continue
        if exact < smallest or not room.take(m, _on(none, kind, int(exact + 1e-6))):
            below.append(m)
    for m in below:
        _ = room.take(m, _on(none, ideal[m][0], ideal[m][2])) or _anywhere(
            room, jobs, m
        )
    for m in sorted(order, key=lambda m: -(ideal[m][1] % 1)):
        kind, exact, _ = ideal[m]
        if any(room.sizes[m]) and room.sizes[m][kind] < exact - 1e-6:
            room.take(m, _on(none, kind, room.sizes[m][kind] + 1))
    return room.sizes


def grown(
    contest: Contest,
    sizes: Sequence[Vms],
    jobs: Sequence[PoolJob],
    order: Sequence[int],
) -> list[Vms]:
    """Return sizes to which no VM can be added that trains more.

    Args:
        contest: The pool, and the jobs as claims.
        sizes: By job.
        jobs: The same jobs.
        order: Who is asked first, of those with no VMs.
    """
    room = Room(contest, list(sizes))
    for m in order:
        if not any(room.sizes[m]):
            _anywhere(room, jobs, m)
    while True:
        steps = [
            step
            for m in range(len(jobs))
            if any(room.sizes[m]) and (step := _next(room, jobs[m], m))
        ]
        if not steps:
            return room.sizes
        _, m, size = max(steps)
        room.sizes[m] = size


def _ideal(
    contest: Contest, allotment: Allotment, jobs: Sequence[PoolJob], m: int
) -> tuple[int, float, int]:
    """Return the supply that a job's share is mostly on, its size there, the smallest one."""
    trained = np.zeros(len(contest.vms))
    for option, share in allotment.shares[m]:
        trained += np.array(option.vms, bool) * option.examples_per_s * share
    if not trained.any():
        return 0, 0.0, 1
    holds = np.array(jobs[m].granted, bool)
    kind = int(np.argmax(trained * np.where(holds, 1.0 + 1e-3, 1.0)))
    corners = sorted(
        (option.vms[kind], option.examples_per_s)
        for j, option in contest.columns
        if j == m and option.vms[kind]
    )
    sizes, rates = zip(*[(0, 0.0), *corners], strict=True)
    exact = float(np.interp(allotment.examples_per_s[m], rates, sizes))
    return kind, exact, corners[0][0]


def _anywhere(room: Room, jobs: Sequence[PoolJob], m: int) -> bool:
    """Give a job its smallest size on the supply where that trains most."""
    none = (0,) * len(room.contest.vms)
    smallest = [
        (table[0][1], _on(none, kind, table[0][0]))
        for kind, table in enumerate(jobs[m].request.throughputs)
        if table
    ]
    return any(room.take(m, size) for _, size in sorted(smallest, reverse=True))


def _next(room: Room, job: PoolJob, m: int) -> tuple[float, int, Vms] | None:
    """Return the gain per VM, as a part of its best throughput, of a job's next size."""
    size = room.sizes[m]
    kind = max(range(len(size)), key=lambda k: size[k])
    have = job.rate(size)
    for n, rate in job.request.throughputs[kind]:
        if n > size[kind] and rate > have:
            larger = _on(size, kind, n)
            gain = (rate - have) / (n - size[kind]) / job.best
            return (gain, m, larger) if room.fits(m, larger) else None
    return None


def _on(vms: Vms, kind: int, n: int) -> Vms:
    return (*vms[:kind], n, *vms[kind + 1 :])


def _counted(per_vm: Sequence[float], vms: Sequence[int]) -> float:
    return sum(each * n for each, n in zip(per_vm, vms, strict=True))
