"""Rates at which clouds throttle, as they document them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Rates = Mapping[str, tuple[float, float]]
"""By kind of request: size of its bucket, and tokens that are added each second."""

AWS: Rates = {"RunInstances": (5, 2), "read": (100, 20), "write": (50, 5)}
"""Of each action by itself ("Request throttling for the Amazon EC2 API")."""
AZURE: Rates = {"read": (250, 25), "write": (200, 10), "delete": (200, 10)}
"""Of a subscription ("Understand how Azure Resource Manager throttles requests")."""
GCP_PER_MINUTE = 1500.0
"""Of each group of methods, counted anew each minute ("Compute Engine rate quotas")."""


class Throttle:
    """Lets through what the rates allow; everything until it is switched on.

    Args:
        allows: Makes the counter of one bucket; it says whether a request at a time (in
            seconds) passes.
    """

    def __init__(self, allows: Callable[[str], Callable[[float], bool]]) -> None:
        self._make = allows
        self._buckets: dict[str, Callable[[float], bool]] = {}
        self.is_on = False

    def passes(self, bucket: str, kind: str, now_s: float) -> bool:
        """Return whether a request passes, and count it."""
        if not self.is_on:
            return True
        if bucket not in self._buckets:
            self._buckets[bucket] = self._make(kind)
        return self._buckets[bucket](now_s)


def token_bucket(rates: Rates) -> Callable[[str], Callable[[float], bool]]:
    """Return how buckets with tokens are made, by kind of request."""

    def make(kind: str) -> Callable[[float], bool]:
        size, per_s = rates[kind]
        left, at_s = size, 0.0

        def passes(now_s: float) -> bool:
            nonlocal left, at_s
            left = min(size, left + max(0.0, now_s - at_s) * per_s)
            at_s = now_s
            if left < 1:
                return False
            left -= 1
            return True

        return passes

    return make


def per_minute(most: float) -> Callable[[str], Callable[[float], bool]]:
    """Return how counters are made that begin anew with each minute of the clock."""

    def make(kind: str) -> Callable[[float], bool]:
        minute, count = -1.0, 0

        def passes(now_s: float) -> bool:
            nonlocal minute, count
            if now_s // 60 != minute:
                minute, count = now_s // 60, 0
            count += 1
            return count <= most

        return passes

    return make
