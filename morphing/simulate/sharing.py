"""Cores that the slots of one computer share.

VMs of the local provider are processes of one computer, and a host may have more CPU slots
than cores. Together they take at least the sum of their work over its cores. What they lose
beyond that, in caches, threads that receive and cores that wait, is not simulated:
predictions are a range there (``MAX_CROWDING``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OWN_CORE = -1
"""Instead of a computer's number: a slot that shares its core with no other."""
MAX_CROWDING = 1.75
"""Mini-batches on shared cores take up to this many times their work over the cores
(docs/decisions.md)."""


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Computers with no more cores than slots."""

    computers: tuple[int, ...]
    """Of each rank: the number of its computer, or ``OWN_CORE``."""
    cores: tuple[int, ...]
    """Of each computer."""

    def least_s(self, works_s: Sequence[float]) -> float:
        """Return the time in which no computer can have done less than its ranks' work.

        Args:
            works_s: Of each rank, on a core of its own.
        """
        totals_s = [0.0] * len(self.cores)
        for computer, work_s in zip(self.computers, works_s, strict=True):
            if computer != OWN_CORE:
                totals_s[computer] += work_s
        return max(work_s / cores for work_s, cores in zip(totals_s, self.cores, strict=True))


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
    shared = [at for at in dict.fromkeys(ranks) if 0 < at[1] <= slots[at] > 1]
    if not shared:
        return None
    numbers = {at: number for number, at in enumerate(shared)}
    return SharedCores(
        computers=tuple(numbers.get(at, OWN_CORE) for at in ranks),
        cores=tuple(cores for _, cores in shared),
    )
