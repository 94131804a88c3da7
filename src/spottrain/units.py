"""Units of time and of data that more than one folder counts in, and counts in words."""

from __future__ import annotations

HOUR_S = 3600.0
DAY_S = 86400.0
MONTH_H = 730.0
"""Hours in a month as clouds bill it: 365 days of 24 hours, over 12."""
GB_BYTES = 10**9
"""Clouds bill storage and traffic by the decimal gigabyte."""


def counted(number: int, one: str, several: str = "") -> str:
    """Return a number with its noun; by default the plural has an s."""
    return f"{number} {one if number == 1 else several or f'{one}s'}"


def size(num_bytes: float) -> str:
    """Return bytes, such as ``12.3 MB``."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:,.1f} TB"
