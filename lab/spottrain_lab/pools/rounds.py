"""Who runs in the next round, so that jobs get their shares of time (section 5.5, Gavel).

A job's priority on an option is its share over the part of the time that it had there, the time
that has passed for all. Figure 5.5 divides by rounds received; the text divides the time on a kind
by that of all jobs on this kind, with which shares are missed where a kind has several VMs or
is not full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spottrain.pricing.sharing.problem import Allocation, Configuration

ROUND_S = 360.0
"""Six minutes, as Gavel has."""

Choice = tuple[int, Configuration]
"""A job and how it runs."""


class RoundScheduler:
    """Chooses round by round what runs while an allocation is valid.

    Args:
        vms: Of the pool, by kind.
        allocation: Shares of time in options that are each held whole or not at all.
        spare: By job: options for what shares leave idle; none for jobs that are to have no
            more than their shares.
    """

    def __init__(
        self,
        vms: Sequence[int],
        allocation: Allocation,
        spare: Mapping[int, Sequence[Configuration]] | None = None,
    ) -> None:
        self.vms = tuple(vms)
        self.shares: dict[Choice, float] = {
            (m, option): share
            for m, given in enumerate(allocation.shares)
            for option, share in given
            if share > 0
        }
        self.spare = spare or {}
        # Half a round each: what has never run is then ordered by its share.
        self._received = dict.fromkeys(self.shares, 0.5)
        self._rounds = 0.5

    def next_round(self, active: Sequence[int]) -> list[Choice]:
        """Return who runs in a round: each job at most once, within all VMs.

        Args:
            active: Jobs that have work left.
        """
        waiting, free = set(active), list(self.vms)
        chosen: list[Choice] = []

        def take(choice: Choice) -> None:
            m, option = choice
            fits = all(n <= f for n, f in zip(option.vms, free, strict=True))
            if m in waiting and fits:
                waiting.discard(m)
                free[:] = [f - n for f, n in zip(free, option.vms, strict=True)]
                chosen.append(choice)

        order = sorted(self.shares, key=lambda c: (-self._priority(c), c[0]))
        for choice in order:
            take(choice)
        for m in sorted(waiting):
            best = sorted(self.spare.get(m, ()), key=lambda o: -o.examples_per_s)
            for option in best:
                take((m, option))
        self._rounds += 1
        for choice in chosen:
            if choice in self._received:
                self._received[choice] += 1
        return chosen

    def _priority(self, choice: Choice) -> float:
        received = self._received[choice] / self._rounds
        return self.shares[choice] / received if received > 0 else math.inf
