"""Cores that the slots of one computer share.

VMs of the local provider are processes of one computer, and a host may have more CPU slots
than cores. Workers that compute at the same time then get equal parts of the cores
(processor sharing: Kleinrock, Queueing Systems II, section 4.4): n of them on c < n cores
run at c / n of the speed of a worker with a core of its own. What they lose beyond that
is measured (``wire.Crowding``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spottrain.wire.model import Crowding

OWN_CORE = -1
"""Instead of a computer's number: a slot that shares its core with no other."""

Shares = tuple[tuple[int, ...], tuple[float, ...]]
"""Of one replica: by stage the number of its computer, and by computer the cores."""


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Computers with no more cores than slots."""

    computers: tuple[int, ...]
    """Of each rank: the number of its computer, or ``OWN_CORE``."""
    cores: tuple[int, ...]
    """Of each computer."""

    def of_replicas(self, depth: int, counts: Sequence[int]) -> list[Shares]:
        """Divide the cores over the replicas, by the work that each has on a computer.

        Replicas run the same at the same time, so that each gets that part of the cores
        at any moment.

        Args:
            depth: Ranks of a replica.
            counts: Micro-batches of each replica.
        """
        work: Counter[tuple[int, int]] = Counter()
        totals: Counter[int] = Counter()
        for rank, computer in enumerate(self.computers):
            work[computer, rank // depth] += counts[rank // depth]
            totals[computer] += counts[rank // depth]
        return [
            (
                self.computers[replica * depth : (replica + 1) * depth],
                tuple(
                    cores * work[computer, replica] / totals[computer]
                    for computer, cores in enumerate(self.cores)
                ),
            )
            for replica in range(len(counts))
        ]

    def task_growth(self, rank: int, crowding: Crowding | None) -> float:
        """Return by how much longer tasks of a rank take than its profile's sections do.

        Between as many ranks as cores and what was measured it grows by the ranks per
        core; beyond, where caches can hardly get colder, it stays.
        """
        computer = self.computers[rank]
        if computer == OWN_CORE or crowding is None or crowding.ranks <= crowding.cores:
            return 1.0
        more = self.computers.count(computer) / self.cores[computer] - 1
        share = max(0.0, min(1.0, more / (crowding.ranks / crowding.cores - 1)))
        least = crowding.core_growth
        return least + share * (crowding.task_growth - least)

    def step_growth(self, crowding: Crowding | None) -> float:
        """Return by how much longer a mini-batch takes than its simulation, which takes
        cores as never idle while there is work."""
        if crowding is None or set(self.computers) <= {OWN_CORE}:
            return 1.0
        return crowding.step_growth

    def finish_s(self, ready_s: Sequence[float], works_s: Sequence[float]) -> list[float]:
        """Return when each rank has done work for which it is ready at a certain time.

        Args:
            ready_s: Of each rank.
            works_s: Of each rank, on a core of its own.
        """
        done_s = [at + work for at, work in zip(ready_s, works_s, strict=True)]
        for computer, cores in enumerate(self.cores):
            ranks = [r for r, own in enumerate(self.computers) if own == computer]
            finished = _share([ready_s[r] for r in ranks], [works_s[r] for r in ranks], cores)
            for rank, at in zip(ranks, finished, strict=True):
                done_s[rank] = max(done_s[rank], at)
        return done_s


def _share(ready_s: Sequence[float], works_s: Sequence[float], cores: int) -> list[float]:
    """Return when works on one computer are done that share its cores."""
    left = list(works_s)
    done_s = list(ready_s)
    waiting = sorted(range(len(left)), key=lambda i: -ready_s[i])
    active: list[int] = []
    now_s = 0.0
    while active or waiting:
        if not active:
            now_s = max(now_s, ready_s[waiting[-1]])
        while waiting and ready_s[waiting[-1]] <= now_s:
            active.append(waiting.pop())
        stretch = max(1.0, len(active) / cores)
        first = min(active, key=left.__getitem__)
        until_s = now_s + left[first] * stretch
        ends = not waiting or until_s <= ready_s[waiting[-1]]
        if not ends:
            until_s = ready_s[waiting[-1]]
        for i in active:
            left[i] = max(0.0, left[i] - (until_s - now_s) / stretch)
        now_s = until_s
        if ends:
            active.remove(first)
            done_s[first] = now_s
    return done_s


def shared_cores(
    machines: Iterable[tuple[str, int]], fleet: Iterable[tuple[str, int]] = ()
) -> SharedCores | None:
    """Return how the ranks of a plan share cores; None if each has one of its own.

    Args:
        machines: Of each rank, its computer and how many cores of it slots may use; 0:
            unknown, then as many as there are slots.
        fleet: The same of all slots, also those without a rank: a computer on which they
            are several, and as many as cores or more, counts as shared: where no core
            is left over, ranks share with agents, supervisors and the manager.
    """
    ranks = list(machines)
    slots = Counter(ranks) | Counter(fleet)
    crowded = [at for at in dict.fromkeys(ranks) if 0 < at[1] <= slots[at] > 1]
    if not crowded:
        return None
    numbers = {at: number for number, at in enumerate(crowded)}
    return SharedCores(
        computers=tuple(numbers.get(at, OWN_CORE) for at in ranks),
        cores=tuple(cores for _, cores in crowded),
    )
