"""What a pool's VMs and caps leave, while whole VMs are given out."""

from __future__ import annotations

from collections.abc import Sequence

from spottrain.pricing.sharing.problem import AllocationProblem


class CapacityTracker:
    """What the problem's VMs and caps leave, while sizes are given out.

    Args:
        problem: The pool, and its jobs as demands.
        sizes: By job; by default none.
    """

    def __init__(
        self, problem: AllocationProblem, sizes: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        self.problem = problem
        none = (0,) * len(problem.vms)
        self.sizes = [none] * len(problem.demands)
        self._free = list(problem.vms)
        self._left = [cap.at_most for cap in problem.caps]
        self._caps: list[list[int]] = [[] for _ in problem.demands]
        """By job: the caps that count it."""
        for i, cap in enumerate(problem.caps):
            for m in cap.jobs:
                self._caps[m].append(i)
        for m, size in enumerate(sizes or ()):
            self._set(m, size)

    def fits(self, m: int, size: tuple[int, ...]) -> bool:
        """Return whether a job may have a size in place of its present one."""
        more = self._more(m, size)
        if any(n > 0 and n > free for n, free in zip(more, self._free, strict=True)):
            return False
        for i in self._caps[m]:
            added = _counted(self.problem.caps[i].per_vm, more)
            if added > 0 and added > self._left[i] + 1e-9:
                return False
        return True

    def take(self, m: int, size: tuple[int, ...]) -> bool:
        """Give a job a size if it fits."""
        if fits := self.fits(m, size):
            self._set(m, size)
        return fits

    def _set(self, m: int, size: tuple[int, ...]) -> None:
        more = self._more(m, size)
        self._free = [f - n for f, n in zip(self._free, more, strict=True)]
        for i in self._caps[m]:
            self._left[i] -= _counted(self.problem.caps[i].per_vm, more)
        self.sizes[m] = size

    def _more(self, m: int, size: tuple[int, ...]) -> list[int]:
        return [new - old for new, old in zip(size, self.sizes[m], strict=True)]

    def most(self, m: int) -> list[int]:
        """Return how many VMs of each kind a job may have if it has no others."""
        own = self.sizes[m]
        most = [free + n for free, n in zip(self._free, own, strict=True)]
        for i in self._caps[m]:
            per_vm = self.problem.caps[i].per_vm
            left = self._left[i] + _counted(per_vm, own) + 1e-9
            most = [
                min(n, int(left / each)) if each > 0 else n
                for n, each in zip(most, per_vm, strict=True)
            ]
        return most


def _counted(per_vm: Sequence[float], vms: Sequence[int]) -> float:
    return sum(each * n for each, n in zip(per_vm, vms, strict=True))
