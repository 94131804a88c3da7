"""Upper bound on the training that a clairvoyant policy could do on a trace.

Shares no code with the morph policy (``policy``) nor with the replay: it is the
yardstick for both.

A run is any number of mini-batches, one after the other, on VMs that are all there from a
pause before its first until the end of its last. Between two runs is a pause. No policy
can do more, as long as each of its pauses is as long and a mini-batch that loses a VM is
lost.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

MAX_COUNTED = 20_000
"""Maximum number of mini-batches that are counted one by one; beyond that also parts
count, which raises the bound by less than one per run."""

Times = npt.NDArray[np.float64]


def max_minibatches(
    lives: Sequence[tuple[float, float]],
    step_s: Mapping[int, float],
    pause_s: float,
    end_s: float,
) -> int:
    """Return the maximum number of mini-batches that a clairvoyant could train.

    Args:
        lives: Begin and end of each VM's life; each has one GPU.
        step_s: Time of a mini-batch by the number of GPUs that it takes.
        pause_s: Minimum pause between two runs, and before the first.
        end_s: Nothing counts that ends later.
    """
    sizes = _useful(step_s)
    if not sizes:
        return 0
    search = _Search(lives, sizes, pause_s, end_s)
    if end_s / sizes[-1][1] > MAX_COUNTED:
        return int(search.max_in_parts() + 1e-9)
    return search.max_whole()


def _useful(step_s: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the sizes for which no smaller one is as fast, ascending."""
    sizes: list[tuple[int, float]] = []
    for slots, step in sorted(step_s.items()):
        if not sizes or step < sizes[-1][1]:
            sizes.append((slots, step))
    return sizes


class _Search:
    """One search."""

    def __init__(
        self,
        lives: Sequence[tuple[float, float]],
        sizes: Sequence[tuple[int, float]],
        pause_s: float,
        end_s: float,
    ) -> None:
        # A VM takes part only after the pause in which it joins.
        self.lives = [(a + pause_s, b) for a, b in lives if a + pause_s < b]
        self.comes = sorted({a for a, _ in self.lives})
        self.moments = sorted({t for life in self.lives for t in life})
        self.stays: dict[int, list[float]] = {}
        self.sizes, self.pause_s, self.end_s = sizes, pause_s, end_s

    def max_whole(self) -> int:
        """Return the maximum number of whole mini-batches.

        Dynamic programming over how many are done: for each the earliest moment at
        which the next run may begin. Runs begin then, or when a VM has joined and
        nobody could have done one more by then.
        """
        self.ready: Times = np.full(int(self.end_s / self.sizes[-1][1]) + 3, np.inf)
        self.ready[0] = 0.0
        for done in range(len(self.ready) - 1):
            start_s = float(self.ready[done])
            while start_s < min(self.end_s, self.ready[done + 1]):
                self._run_from(done, start_s)
                later = bisect.bisect_right(self.comes, start_s)
                if later == len(self.comes):
                    break
                start_s = self.comes[later]
        return int(np.flatnonzero(np.isfinite(self.ready))[-1])

    def _run_from(self, done: int, start_s: float) -> None:
        for step_s, until_s in self._runs(start_s):
            count = int((until_s - start_s) / step_s + 1e-9)
            ends = start_s + step_s * np.arange(1, count + 1) + self.pause_s
            known = self.ready[done + 1 : done + 1 + count]
            np.minimum(known, ends, out=known)

    def max_in_parts(self) -> float:
        """Return the maximum number of mini-batches if parts of them count.

        What a run does is then linear in when it ends. So each run ends when a VM goes,
        or so that the next one begins when a VM has come: those beginnings are all.
        """
        ends = {min(b, self.end_s) for _, b in self.lives}
        starts = np.array(sorted({*self.comes, *(b + self.pause_s for b in ends)}))
        most = np.zeros(len(starts))
        best = 0.0
        for i, start_s in enumerate(starts):
            most[i] = most[: i + 1].max()  # by waiting
            if start_s >= self.end_s:
                break
            for step_s, until_s in self._runs(float(start_s)):
                best = max(best, most[i] + (until_s - start_s) / step_s)
                j = np.searchsorted(starts, until_s + self.pause_s, side="right")
                done = (starts[i + 1 : j] - self.pause_s - start_s) / step_s
                later = most[i + 1 : j]
                np.maximum(later, most[i] + done, out=later)
        return best

    def _runs(self, start_s: float) -> list[tuple[float, float]]:
        """Return the step time of each size that is there, and until when it stays."""
        moment = bisect.bisect_right(self.moments, start_s)
        if moment not in self.stays:
            here = (b for a, b in self.lives if a <= start_s < b)
            self.stays[moment] = sorted(here, reverse=True)
        stays = self.stays[moment]
        return [
            (step_s, min(stays[slots - 1], self.end_s))
            for slots, step_s in self.sizes
            if slots <= len(stays)
        ]
