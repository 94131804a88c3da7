"""What one who knew all of a trace could have trained at most.

Shares no code with the rule that decides (``policy``) nor with the replay: it is the
yardstick for both.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

MOST_UNITS = 8000
"""Mini-batches told apart; more are counted in groups, which raises the bound a little."""

Times = npt.NDArray[np.float64]


def most_minibatches(
    lives: Sequence[tuple[float, float]],
    step_s: Mapping[int, float],
    pause_s: float,
    end_s: float,
) -> int:
    """Return the most mini-batches that can be trained, knowing everything.

    A run is any number of whole mini-batches, one after the other, on VMs that are all
    there from a pause before its first until the end of its last. Between two runs is a
    pause. No policy can do more, as long as each of its pauses takes ``pause_s`` or more
    and a mini-batch that loses a VM is lost.

    Dynamic programming over the number of mini-batches done: for each the earliest moment
    at which the next run may begin. Runs begin then, or when a VM has come.

    Args:
        lives: From when until when each VM is there; each has one GPU.
        step_s: Time of a mini-batch by the number of GPUs that it takes.
        pause_s: Least time that training stands still between two runs, and before the
            first.
        end_s: Nothing counts that ends later.
    """
    sizes = _useful(step_s)
    if not sizes:
        return 0
    group = 1 + int(end_s / sizes[-1][1] / MOST_UNITS)
    return group * _Search(lives, sizes, pause_s, end_s, group).most()


def _useful(step_s: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the sizes for which no smaller one is as fast, ascending."""
    sizes: list[tuple[int, float]] = []
    for slots, step in sorted(step_s.items()):
        if not sizes or step < sizes[-1][1]:
            sizes.append((slots, step))
    return sizes


class _Search:
    """One search; counts in units of ``group`` mini-batches."""

    def __init__(
        self,
        lives: Sequence[tuple[float, float]],
        sizes: Sequence[tuple[int, float]],
        pause_s: float,
        end_s: float,
        group: int,
    ) -> None:
        # A VM takes part only after the pause in which it joins.
        self.lives = [(a + pause_s, b) for a, b in lives if a + pause_s < b]
        self.comes = sorted({a for a, _ in self.lives})
        self.moments = sorted({t for life in self.lives for t in life})
        self.stays: dict[int, list[float]] = {}
        self.sizes, self.pause_s, self.end_s = sizes, pause_s, end_s
        self.group = group
        most = int(end_s / sizes[-1][1] / group) + 2
        # A run of j whole groups may have almost one more: it is given that one.
        self.gift = int(group > 1)
        self.ready: Times = np.full(most * (1 + self.gift) + 2, np.inf)
        self.ready[0] = 0.0

    def most(self) -> int:
        """Return the most units."""
        best = 0
        for done, begin_s in enumerate(self.ready):
            if begin_s >= self.end_s:
                continue
            best = done
            start_s = float(begin_s)
            while start_s < min(self.end_s, self.ready[done + 1]):
                self._run_from(done, start_s)
                later = bisect.bisect_right(self.comes, start_s)
                if later == len(self.comes):
                    break
                start_s = self.comes[later]
        reached = np.flatnonzero(np.isfinite(self.ready))
        return max(best, int(reached[-1]))

    def _run_from(self, done: int, start_s: float) -> None:
        stays = self._stays(start_s)
        for slots, step_s in self.sizes:
            if slots > len(stays):
                break
            left_s = min(stays[slots - 1], self.end_s) - start_s
            unit_s = step_s * self.group
            count = int(left_s / unit_s + 1e-9)
            if count < 1 - self.gift:
                continue
            units = np.arange(1 - self.gift, count + 1)
            ends = start_s + unit_s * units + self.pause_s
            first = done + 1
            known = self.ready[first : first + len(units)]
            np.minimum(known, ends, out=known)

    def _stays(self, at_s: float) -> list[float]:
        """Return until when the VMs that are there at ``at_s`` stay, longest first."""
        moment = bisect.bisect_right(self.moments, at_s)
        if moment not in self.stays:
            self.stays[moment] = sorted(
                (b for a, b in self.lives if a <= at_s < b), reverse=True
            )
        return self.stays[moment]
