"""How often to save checkpoints: the optimum of Young and Daly, from what was measured.

Checkpoints cost time, and so do the mini-batches that are computed again after progress
was lost. With a checkpoint that slows training by C and a mean time M between such losses
the sum is least near the interval sqrt(2 C M) (J. W. Young, "A first order approximation
to the optimum checkpoint interval", Communications of the ACM 17(9), 1974), or, where C is
not small against M, as J. T. Daly has it ("A higher order estimate of the optimum
checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006).

C is what a checkpoint slows training by, not how long it takes: it is written beside the
mini-batches. M is not the time between losses of VMs: what another VM holds is not lost.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence

MIN_S = 10.0
"""Least interval: every checkpoint is requests to a store, and traffic."""
MAX_S = 1800.0
"""Greatest interval: what no estimate counts, such as a region that fails, then costs at
most half an hour."""
MIN_COST_S = 0.05
"""Least cost of a checkpoint: less cannot be told from the noise of mini-batches."""
PRIOR_COST_S = 1.0
"""Cost that is assumed until a checkpoint was measured."""
PRIOR_LOSSES = 1.0
"""Weight of the assumed rate of losses: as if so many had been observed."""
PRIOR_LOSSES_PER_HOUR = {True: 0.1, False: 0.001}
"""Losses of one VM without a usable notice, by whether it is a spot VM. On spot VMs that of
the calmer of two published traces: 0.099 (16 A100 VMs on GCP) and 0.61 (p3 VMs on AWS,
published with Bamboo) an hour."""
TOGETHER_S = 30.0
"""Losses so close to each other are one for what they undo: survivors may not have a
second copy again, nor its replacement a checkpoint."""
PRIOR_TOGETHER = 0.5
"""Assumed share of losses that follow another so closely: 0.53 and 0.77 in those traces."""
PRIOR_TOGETHER_LOSSES = 4.0
"""Weight of that share."""
_WINDOW = 32
_FEWEST = 3
"""Mini-batches whose median is an undisturbed one."""


def interval_s(cost_s: float, losses_per_s: float) -> float:
    """Return the training time between checkpoints that costs least, within bounds.

    Daly's equation 37, without his restart time, which does not move the optimum.

    Args:
        cost_s: What one slows training by.
        losses_per_s: Rate of losses that would undo all since the last one.

    Returns:
        At least ``MIN_S``, at most ``MAX_S``.

    Raises:
        ValueError: A value is negative or not a number.
    """
    if not (cost_s >= 0 and losses_per_s >= 0):
        raise ValueError(f"cost and losses: got {cost_s:g}, {losses_per_s:g}; give 0 or more")
    cost_s = max(cost_s, MIN_COST_S)
    if losses_per_s * MAX_S**2 < 2 * cost_s:  # rarer than the greatest interval asks for
        return MAX_S
    mean_s = 1 / losses_per_s
    if cost_s >= 2 * mean_s:
        return min(max(mean_s, MIN_S), MAX_S)
    ratio = cost_s / (2 * mean_s)
    best_s = math.sqrt(2 * cost_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
    return min(max(best_s, MIN_S), MAX_S)


def state_losses_per_s(
    stages: Sequence[Collection[str]],
    losses_at_s: Sequence[float],
    observed_s: float,
    *,
    spot: bool = True,
) -> float:
    """Return the rate at which a plan loses progress that no other VM holds.

    That is the rate of losses times the chance that one takes the last copy of a stage: 1
    if every VM holds an only copy; else further VMs must be lost at nearly the same time,
    and be the right ones. Losses are a Poisson process, whose rate and share of close
    ones have conjugate priors.

    Args:
        stages: The VMs that hold each stage's state.
        losses_at_s: When VMs were lost without a usable notice, ascending.
        observed_s: How long they were observed; the fleet is taken to be as it was.
        spot: True if the VMs are spot VMs.
    """
    vms = len(set().union(*stages))
    fewest = min(map(len, stages), default=0)
    if not fewest:
        return 0.0
    seen = len(losses_at_s)
    prior_s = PRIOR_LOSSES * 3600 / PRIOR_LOSSES_PER_HOUR[spot]
    losses_per_s = vms * (PRIOR_LOSSES + seen) / (prior_s + vms * max(0.0, observed_s))
    close = sum(b - a <= TOGETHER_S for a, b in itertools.pairwise(losses_at_s))
    together = (PRIOR_TOGETHER * PRIOR_TOGETHER_LOSSES + close) / (PRIOR_TOGETHER_LOSSES + seen)
    fatal = {frozenset(stage) for stage in stages if len(stage) == fewest}
    chance = len(fatal) / math.comb(vms, fewest)
    # A single loss is any of the VMs; each further one is close with that probability.
    return losses_per_s * together ** (fewest - 1) * chance


def expected_lag_s(vms: int) -> float:
    """Return the training time since the newest checkpoint, on average, where nothing was
    measured yet and every VM of a spot fleet holds an only copy."""
    losses_per_s = vms * PRIOR_LOSSES_PER_HOUR[True] / 3600
    return interval_s(PRIOR_COST_S, losses_per_s) / 2


class CheckpointInterval:
    """The mini-batches between checkpoints of one generation, as its first rank sees them.

    What a checkpoint costs is measured: its stall, and by how much the mini-batches
    beside which it is written are longer than others.

    Args:
        losses_per_s: See ``interval_s``.
        step_s: What a mini-batch is predicted to take.
        cost_s: What earlier generations have measured; 0: nothing.
        min_cost_s: Less is not believed.
        cheap_share: Where checkpoints ask for no store: the share of training time that
            they may take whatever losses are expected.
    """

    def __init__(
        self,
        losses_per_s: float,
        step_s: float,
        cost_s: float = 0.0,
        *,
        min_cost_s: float = MIN_COST_S,
        cheap_share: float = 0.0,
    ) -> None:
        self._min_cost_s, self._cheap_share = min_cost_s, cheap_share
        self._losses_per_s = losses_per_s
        self._predicted_s = step_s
        self._known_s = cost_s
        self._steps_s = deque[float](maxlen=_WINDOW)
        self._beside_s: list[float] = []
        self._stall_s = 0.0
        self._saving = self._first = False

    def begin(self, stall_s: float) -> None:
        """Note that a checkpoint has begun, and for how long training stood still."""
        self._known_s = self.cost_s
        self._saving, self._stall_s, self._beside_s = True, stall_s, []

    def observe(self, step_s: float, *, saving: bool) -> None:
        """Take the time of a mini-batch; the first ones of a generation are no measure.

        Args:
            step_s: Of the mini-batch.
            saving: True if a checkpoint is still being written after it.
        """
        if not self._first:
            self._first = True
        elif self._saving:
            self._beside_s.append(step_s)
        else:
            self._steps_s.append(step_s)
        self._saving = saving

    @property
    def step_s(self) -> float:
        """The time of an undisturbed mini-batch."""
        enough = len(self._steps_s) >= _FEWEST
        return statistics.median(self._steps_s) if enough else self._predicted_s

    @property
    def cost_s(self) -> float:
        """What a checkpoint slows training by, 0 if that was not measured: the mean of the
        newest one and of what was known before."""
        if self._saving or not self._beside_s or len(self._steps_s) < _FEWEST:
            return self._known_s
        longer_s = math.fsum(self._beside_s) - len(self._beside_s) * self.step_s
        newest_s = max(self._stall_s + longer_s, self._min_cost_s)
        return (newest_s + self._known_s) / 2 if self._known_s else newest_s

    @property
    def every_steps(self) -> int:
        """The mini-batches from one checkpoint to the next, at least 1."""
        best_s = interval_s(self.cost_s or PRIOR_COST_S, self._losses_per_s)
        if self._cheap_share and self.cost_s:
            best_s = min(best_s, self.cost_s / self._cheap_share)
        return max(1, round(best_s / self.step_s)) if self.step_s > 0 else 1
