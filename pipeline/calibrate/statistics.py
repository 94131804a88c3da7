"""Statistics that one slow repetition cannot move: medians, spreads, lines of cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for normal noise."""
MEDIAN_TO_MEAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise."""
MIN_SAMPLES = 7
"""Fewer repetitions say nothing of their spread."""
STEADY = 0.01
"""Standard error of a median, as a share of it, at which repeating ends."""
_MIN_S_PER_BYTE = 1e-14
"""Minimum slope: flatter lines are links that no message is large enough to measure."""


def sigma(values: Sequence[float]) -> float:
    """Return the standard deviation of ``values``, robust to outliers."""
    middle = statistics.median(values)
    return MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def spread(values: Sequence[float]) -> float:
    """Return ``sigma`` as a share of the median; 0 if that is 0."""
    middle = statistics.median(values)
    return sigma(values) / middle if middle > 0 else 0.0


def is_steady(values: Sequence[float]) -> bool:
    """Return whether more repetitions would hardly move the median any more."""
    if len(values) < MIN_SAMPLES:
        return False
    error = MEDIAN_TO_MEAN_ERROR * sigma(values) / math.sqrt(len(values))
    return error <= STEADY * statistics.median(values)


def fit_line(seconds: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Fit ``latency_s + bytes * s_per_byte`` to the medians of repeated messages.

    Least squares of relative errors, both numbers kept from being negative: a message
    of 1 kB counts as much as one of 10 MB.

    Args:
        seconds: Times of the repetitions of each size in bytes, all above 0.

    Returns:
        latency_s, and s_per_byte, which is above 0.
    """
    points = [(size, statistics.median(times)) for size, times in seconds.items()]
    # Sums over points of w, w x, w x², w y, w x y, with w = 1 / y² (relative errors).
    w = sum(1 / y**2 for _, y in points)
    wx = sum(x / y**2 for x, y in points)
    wxx = sum(x * x / y**2 for x, y in points)
    wy = sum(1 / y for _, y in points)
    wxy = sum(x / y for x, y in points)
    determinant = w * wxx - wx * wx
    if determinant <= 1e-12 * w * wxx:  # all of one size: bytes are what takes time
        return 0.0, max(wxy / wxx, _MIN_S_PER_BYTE)
    latency_s = (wxx * wy - wx * wxy) / determinant
    s_per_byte = (w * wxy - wx * wy) / determinant
    if latency_s < 0:
        return 0.0, max(wxy / wxx, _MIN_S_PER_BYTE)
    if s_per_byte < _MIN_S_PER_BYTE:
        return wy / w, _MIN_S_PER_BYTE
    return latency_s, s_per_byte
