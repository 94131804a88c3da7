"""Formats numbers, times and money for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from spottrain import units

NOTHING = "-"
"""Placeholder for an unknown value."""


def duration(seconds: float | None) -> str:
    """Return a time span, such as ``1 h 04 min``, ``2 min 05 s`` or ``3.2 s``."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def age(seconds: float) -> str:
    """Return how old something is, such as ``12 min``, ``5 h`` or ``40 d``."""
    for size_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def step_time(seconds: float | None) -> str:
    """Return how long one step takes, such as ``412 ms``."""
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else duration(seconds)


def predicted_time(step_s: float | None, max_step_s: float | None) -> str:
    """Return how long a step is to take: a range, such as ``412 ms to 659 ms``, where slots
    share cores, of which ``max_step_s`` is the end."""
    most = "" if max_step_s is None else f" to {step_time(max_step_s)}"
    return step_time(step_s) + most


def dollars(usd: float | None) -> str:
    """Return dollars, with more digits for small amounts."""
    if usd is None:
        return NOTHING
    return f"${usd:,.2f}" if usd == 0 or usd >= 1 else f"${usd:.4f}"


def gpu_hours(document: Mapping[str, Any], before: str) -> str:
    """Return ``before`` and how much of a budget in GPU-hours is used; empty without one."""
    if document["gpu_hours_budget"] is None:
        return ""
    return f"{before}{document['gpu_hours']:.2f} of {document['gpu_hours_budget']:g} GPU-hours"


def saved(share: float | None) -> str:
    """Return in words which share of a cost was saved, or was paid on top of it."""
    if share is None:
        return NOTHING
    if abs(share) < 0.005:
        return "the same"
    return f"{share:.0%} saved" if share > 0 else f"{-share:.0%} more was paid"


def size(num_bytes: float | None) -> str:
    """Return bytes, such as ``12.3 MB``."""
    return NOTHING if num_bytes is None else units.size(num_bytes)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def finite(value: Any) -> Any:
    """Return data with None for numbers that JSON cannot hold: infinite ones and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value


_LAST_S = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


def utc(at_s: float) -> str:
    """Return a time (seconds since the epoch) such as ``2030-01-31T18:00:00Z``.

    Later times than the year 9999 become its last second.
    """
    return f"{datetime.fromtimestamp(min(at_s, _LAST_S), UTC):%Y-%m-%dT%H:%M:%SZ}"


def clock(at_s: float) -> str:
    """Return the local time of day (of seconds since the epoch)."""
    return f"{datetime.fromtimestamp(at_s):%H:%M:%S}"
