"""Time as the manager tells it: seconds since the epoch that never go back nor leap."""

from __future__ import annotations

import time

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps: VMs are paid for then too."""
TOLERANCE_S = 2.0
"""The wall clock may be off by so much without being told of."""


class Clock:
    """The wall clock as it was at the start, gone on steadily since.

    A wall clock that is set while the manager runs must neither hide time in which VMs
    cost money nor invent some.

    Args:
        at_least_s: The newest moment that is known to have been; the clock begins there
            if the wall clock lies before it.
    """

    def __init__(self, at_least_s: float = 0.0) -> None:
        self._ahead_s = max(time.time(), at_least_s) - time.clock_gettime(_STEADY)
        self._told_s = 0.0

    def now_s(self) -> float:
        """Return seconds since the epoch."""
        return time.clock_gettime(_STEADY) + self._ahead_s

    def set_by_s(self) -> float:
        """Return how far the wall clock was set since this was asked last; mostly 0."""
        off_s = time.time() - self.now_s()
        by_s = off_s - self._told_s
        if abs(by_s) <= TOLERANCE_S:
            return 0.0
        self._told_s = off_s
        return by_s
