"""The morph policy: one rule for the manager and for the replays of traces.

A morph pays if the new plan trains more examples until the next loss than the present
one, the cost of the switch included (design: Planning). The time until then is
estimated from the losses so far. A broken generation is replaced at once; survivors
keep their places and a warm spare takes the lost one's (``placement.place``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

NOTICE_SHARE = 0.25
"""The part of a notice's lead time that may pass waiting for further notices."""
UNSEEN_SHARE = 0.05
"""Lag share that is assumed before the first loss: preemptible VMs do get lost, and a
plan with a second replica then goes on."""
CAUTION = 0.1
"""Maximum share of speed that is given up for a plan that survives losses better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphOption:
    """A plan to train under, and the training time that switching to it costs."""

    examples_per_s: float
    """0 for a broken generation."""
    cost_s: float = 0.0
    """0 for the plan that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutlook:
    """Changes of the fleet that were observed, all times on one clock."""

    since_s: float
    """Begin of the observation."""
    losses_at_s: Sequence[float]
    """Times at which GPUs were lost, ascending."""
    changed_at_s: float
    """Time of the last change of the usable GPUs."""
    debounce_s: float
    """Losses no further apart count as one; and the fleet must have been quiet for so
    long before a running plan is left."""

    def quiet_s(self, now_s: float) -> float:
        """Return the time to expect until the next loss.

        The mean remainder of all earlier quiet times that were longer than the present
        one; one more sample assumes that the present one will last as long again. So a
        fleet with long quiet times is trusted after a while, and one that was never
        quiet for longer is trusted for as long as it has been quiet.
        """
        gaps, last_s = self._gaps()
        quiet_s = now_s - last_s
        left = [gap - quiet_s for gap in gaps if gap > quiet_s]
        return (sum(left) + quiet_s) / (len(left) + 1)

    def quiet_at_s(self, quiet_s: float, from_s: float) -> float:
        """Return the time from which ``quiet_s`` can be expected without another loss.

        Nothing before ``from_s`` counts. The expectation falls while time passes, rises
        where an earlier quiet time is exceeded, and only rises once all are.
        """
        gaps, last_s = self._gaps()
        at_s = begin_s = max(from_s, last_s)
        been_s = begin_s - last_s
        longer = sorted(gap for gap in gaps if gap > been_s)
        total_s = sum(longer)
        for number, gap in enumerate(longer):
            count = len(longer) - number
            if total_s - (count - 1) * been_s >= quiet_s * (count + 1):
                return at_s
            been_s = gap
            at_s = max(begin_s, last_s + gap)
            total_s -= gap
        return at_s if been_s >= quiet_s else max(begin_s, last_s + quiet_s)

    def _gaps(self) -> tuple[list[float], float]:
        """Return the quiet times between bursts of losses, and when the last loss was."""
        moments = (self.since_s, *self.losses_at_s)
        gaps = (after - before for before, after in itertools.pairwise(moments))
        return [gap for gap in gaps if gap > self.debounce_s], moments[-1]


def morph_at_s(
    present: MorphOption, new: MorphOption, outlook: FleetOutlook, left_s: float
) -> float:
    """Return the time from which a morph from ``present`` to ``new`` pays.

    It pays once the time to expect until the next loss (``FleetOutlook.quiet_s``) is as long
    as ``new`` needs to make up for its cost.

    Args:
        present: The plan that runs; a broken one is left at once.
        new: The plan to switch to.
        outlook: Observations from which the time until the next loss is estimated.
        left_s: Training time that the job still needs under ``present``.

    Returns:
        A time on the clock of ``outlook``; infinite if never.
    """
    if present.examples_per_s == 0:
        return outlook.since_s
    needed_s = break_even_s(present.examples_per_s, new.examples_per_s, new.cost_s)
    if needed_s >= left_s:
        return math.inf
    return outlook.quiet_at_s(needed_s, outlook.changed_at_s + outlook.debounce_s)


def break_even_s(
    current_examples_per_s: float, new_examples_per_s: float, morph_cost_s: float
) -> float:
    """Return how long a new plan must last to train more examples than the present one.

    Training stands still for ``morph_cost_s``. Infinite if the new plan is no faster; a
    generation that does not train (0 examples/s) is left at once.
    """
    if new_examples_per_s <= current_examples_per_s:
        return math.inf
    if current_examples_per_s == 0:
        return 0.0
    gain = new_examples_per_s - current_examples_per_s
    return morph_cost_s * new_examples_per_s / gain


def handover_at_s(noticed_at_s: float, leaves_at_s: float, debounce_s: float) -> float:
    """Return the time to leave a generation because one of its VMs has a notice.

    A little later than the notice, as further notices may follow.
    """
    lead_s = leaves_at_s - noticed_at_s
    return noticed_at_s + min(debounce_s, NOTICE_SHARE * lead_s)


def lag_share(outlook: FleetOutlook, lag_s: float, now_s: float) -> float:
    """Return the training time at stake with a loss, as a share of that between losses.

    Args:
        outlook: Before the first loss the share is ``UNSEEN_SHARE``.
        lag_s: Training since the newest checkpoint, on average.
        now_s: On the clock of ``outlook``.
    """
    if not outlook.losses_at_s:
        return UNSEEN_SHARE
    quiet_s = outlook.quiet_s(now_s)
    return lag_s / quiet_s if quiet_s > 0 else 0.0


def slowdown(depth: int, copies: int, share: float) -> float:
    """Return by what factor falling back to checkpoints slows a plan down, at least 1.

    A stage is gone when all its replicas are: with one copy at any loss, with two if
    of two losses the second hits the partner of the first (before its state has been
    copied again), with more hardly ever.

    Args:
        depth: Stages.
        copies: VMs that hold each stage, at least.
        share: See ``lag_share``.
    """
    chance = {1: 1.0, 2: 1 / (2 * depth - 1)}.get(copies, 0.0)
    return 1 + chance * share


def capped_slowdown(depth: int, copies: int, share: float) -> float:
    """Return ``slowdown``, capped for the choice of plans.

    The losses of the next hour are a guess, the speed of a plan much less so.
    """
    return min(1 + CAUTION, slowdown(depth, copies, share))
