"""The loss scale of fp16: a power of two that keeps small gradients above zero.

The rule is that of torch's ``GradScaler``: half after an overflow, twice as much after
so many mini-batches without one. It is a pure function of committed contents, so that
every stage and every successor computes the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass

GROWTH_STEPS = 2000
"""Mini-batches without overflow after which the scale grows, as in ``GradScaler``."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Losses are multiplied by ``2**exponent`` before they go backward."""

    exponent: int
    good_steps: int
    """Mini-batches without overflow since the scale has changed."""

    def after(self, overflow: bool) -> LossScale:
        """Return the scale of the next mini-batch."""
        if overflow:
            return LossScale(max(self.exponent - 1, MIN_EXPONENT), 0)
        if self.good_steps + 1 < GROWTH_STEPS:
            return LossScale(self.exponent, self.good_steps + 1)
        return LossScale(min(self.exponent + 1, MAX_EXPONENT), 0)


MIN_EXPONENT, MAX_EXPONENT = -24, 24
FIRST = LossScale(16, 0)
"""Of a job's first mini-batch, as in ``GradScaler``."""
