"""How much spot VMs will train until the deadline, as a share of a full fleet, and how sure that is.

Markets keep their state for a while and then forget it: the share at a moment correlates with that
``t`` later by ``exp(-t / MEMORY_S)``, and a part of its variance is of regimes that last for days. So the mean share over the time left tends from that of now
to that of the samples, and varies the less the longer the time is; the samples, which are such a
mean themselves, leave the market's own mean unsure. The share is taken to be beta distributed
with that mean and variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.markets import Array

_CELLS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """The mean share over the time left."""

    alpha: float
    beta: float
    """Of its beta distribution."""
    usual: float
    """The market's own mean."""

    def quantile(self, probability: float) -> float:
        """Return the share that it stays below with so much probability."""
        return self.quantiles((probability,))[0]

    def quantiles(self, probabilities: Sequence[float]) -> list[float]:
        """Return several of them."""
        edges = np.linspace(0.0, 1.0, _CELLS + 1)
        middles = (edges[1:] + edges[:-1]) / 2
        logs = (self.alpha - 1) * np.log(middles) + (self.beta - 1) * np.log1p(-middles)
        # The first and last cells may have a pole.
        logs[0] = self.alpha * math.log(edges[1]) - math.log(self.alpha * edges[1])
        logs[-1] = self.beta * math.log(edges[1]) - math.log(self.beta * edges[1])
        below = np.append(0.0, np.cumsum(np.exp(logs - logs.max())))
        return [float(np.interp(p * below[-1], below, edges)) for p in probabilities]

    @property
    def away_s(self) -> float:
        """How long spot VMs stay away once they are gone, were all of them to go at once."""
        return tuning.MEMORY_S / self.usual

    @property
    def cycle_s(self) -> float:
        """From one time that they go to the next."""
        return tuning.MEMORY_S / (self.usual * (1 - self.usual))


def availability(shares: Array, left_s: float) -> Availability:
    """Return what samples of the share, one every ``SAMPLE_S`` and that of now last, say of the
    time left."""
    left_s = max(left_s, 1.0)
    kept = _over_memories(lambda memories: -math.expm1(-memories) / memories, left_s)
    seen = 1 / _over_memories(_variance, len(shares) * tuning.SAMPLE_S)
    weight = seen + tuning.PRIOR_MEMORIES
    usual, square = (
        (seen * float((shares**power).mean()) + tuning.PRIOR_MEMORIES * tuning.PRIOR_SHARE) / weight
        for power in (1, 2)
    )
    mean = min(0.999, max(0.001, usual + (float(shares[-1]) - usual) * kept))
    varies = max(1e-4, _over_memories(_variance, left_s) - kept**2) + (1 - kept) ** 2 / weight
    most = mean * (1 - mean)
    variance = min(0.9 * most, max(1e-6, (square - usual**2) * varies))
    sure = most / variance - 1
    return Availability(alpha=mean * sure, beta=(1 - mean) * sure, usual=usual)


def _over_memories(of: Callable[[float], float], lasts_s: float) -> float:
    """Return the mean of a number of memories' function over both memories."""
    slow = tuning.REGIMES_SHARE
    return (1 - slow) * of(lasts_s / tuning.MEMORY_S) + slow * of(lasts_s / tuning.REGIME_S)


def _variance(memories: float) -> float:
    """Return the variance of a mean over so long a time, as a share of that at a moment."""
    return 2 / memories**2 * (memories + math.expm1(-memories))
