"""A clock for what is billed: seconds since the epoch that never go back and never jump.

Standard library only.
"""

from __future__ import annotations

import time

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""It runs on while the machine sleeps: VMs are billed then too."""
TOLERANCE_S = 2.0
"""Differences to the wall clock up to this are not reported."""
JUMP_S = 300.0
"""A wall clock that is further ahead of the newest event than this is checked."""


class Clock:
    """The wall clock as it was at the start, run on by a steady clock.

    When somebody sets the wall clock while a process runs, VMs must not be billed for less
    or more time than they ran.

    A wall clock that is far ahead of the newest event may be wrong, or the machine was off
    or slept while VMs ran. Until ``settle`` says which, the clock runs on from that event:
    time that has passed cannot be taken back.

    Args:
        at_least_s: Time of the newest event; the clock begins there if the wall clock is
            behind it. 0: there is none.
    """

    def __init__(self, at_least_s: float = 0.0) -> None:
        wall_s = time.time()
        self.is_unsettled = bool(at_least_s) and wall_s - at_least_s > JUMP_S
        start_s = at_least_s if self.is_unsettled else max(wall_s, at_least_s)
        self._ahead_s = start_s - time.clock_gettime(_STEADY)
        self._reported_s = wall_s - start_s if self.is_unsettled else 0.0

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

    def settle(self, true_s: float | None = None) -> float:
        """Go forward to the true time; return by how much the wall clock is ahead of it.

        Args:
            true_s: Seconds since the epoch by another's clock; none: as the wall clock says.
        """
        wall_s, now_s = time.time(), self.now_s()
        is_wrong = true_s is not None and abs(wall_s - true_s) > JUMP_S
        right_s = true_s if is_wrong and true_s is not None else wall_s
        self._ahead_s += max(0.0, right_s - now_s)
        self._reported_s = wall_s - self.now_s()
        self.is_unsettled = False
        return wall_s - right_s
