"""Units of time and of data that more than one folder counts in, and counts in words."""

HOUR_S = 3600.0
DAY_S = 86400.0
MONTH_H = 730.0
"""Hours in a month as clouds bill it: 365 days of 24 hours, over 12."""
GB_BYTES = 10**9
"""Clouds bill storage and traffic by the decimal gigabyte."""


def counted(number: int, one: str, several: str = "") -> str:
    """Return a number with its noun; by default the plural has an s."""
    return f"{number} {one if number == 1 else several or f'{one}s'}"
