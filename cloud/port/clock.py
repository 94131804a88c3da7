"""The manager's clock: seconds since the epoch that never go back and never jump."""

from __future__ import annotations

import time

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""It runs on while the machine sleeps: VMs are billed then too."""
TOLERANCE_S = 2.0
"""Differences to the wall clock up to this are not reported."""


class Clock:
    """The wall clock as it was at the start, run on by a steady clock.

    When somebody sets the wall clock while the manager runs, VMs must not be billed for
    less or more time than they ran.

    Args:
        at_least_s: Time of the newest event; the clock begins there if the wall clock is
            behind it.
    """

    def __init__(self, at_least_s: float = 0.0) -> None:
        self._ahead_s = max(time.time(), at_least_s) - time.clock_gettime(_STEADY)
        self._reported_s = 0.0

    def now_s(self) -> float:
        """Return seconds since the epoch."""
        return time.clock_gettime(_STEADY) + self._ahead_s

    def set_by_s(self) -> float:
        """Return by how much the wall clock was set since the last call; usually 0."""
        off_s = time.time() - self.now_s()
        by_s = off_s - self._reported_s
        if abs(by_s) <= TOLERANCE_S:
            return 0.0
        self._reported_s = off_s
        return by_s
