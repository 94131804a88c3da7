"""When to morph: the one rule that the manager and the replays of traces follow.

A morph pays if the new plan does more until the next loss than the present one, what
going over to it costs counted (design: Planning). How long that will be is guessed from
the losses so far. A generation that is broken is mended at once; who survives keeps its
place and a warm spare takes the lost one's (``placement.place``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

NOTICE_SHARE = 0.25
"""The part of a notice's lead time that may pass waiting for further notices."""
CAUTION = 0.1
"""The most speed that is given up for a plan that survives losses better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to go on: a plan, and the training time that going over to it costs."""

    examples_per_s: float
    """0 for a generation that is broken."""
    cost_s: float = 0.0
    """0 for the plan that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What was seen of the fleet, on one clock."""

    since_s: float
    """When watching began."""
    losses_at_s: Sequence[float]
    """When GPUs were lost, ascending."""
    changed_at_s: float
    """When usable GPUs last came or went."""
    debounce_s: float
    """Losses no further apart are one; and so long the fleet must have been quiet before
    a plan is left that still runs."""

    @property
    def losses(self) -> int:
        """Moments at which GPUs were lost: a burst is one."""
        gaps = (b - a for a, b in itertools.pairwise(self.losses_at_s))
        return bool(self.losses_at_s) + sum(gap > self.debounce_s for gap in gaps)

    def quiet_s(self, now_s: float) -> float:
        """Return the time to expect until the next loss.

        The mean so far, the next loss counted as if it came now; or, if longer, half the
        time since the last one: after a rough hour a calm fleet is trusted again.
        """
        mean_s = (now_s - self.since_s) / (self.losses + 1)
        return max(mean_s, (now_s - self._last_s) / 2)

    def quiet_at_s(self, quiet_s: float) -> float:
        """Return from when on ``quiet_s`` can be expected, if nothing is lost till then."""
        mean_at_s = self.since_s + quiet_s * (self.losses + 1)
        return min(mean_at_s, self._last_s + 2 * quiet_s)

    @property
    def _last_s(self) -> float:
        return self.losses_at_s[-1] if self.losses_at_s else self.since_s


def morph_at_s(present: Way, new: Way, outlook: Outlook, left_s: float) -> float:
    """Return from when on it is right to leave ``present`` for ``new``.

    It pays once the time to expect until the next loss (``Outlook.quiet_s``) exceeds the
    time that ``new`` needs to make up for its cost. The longer nothing is lost, the more
    pays.

    Args:
        present: The plan that runs; one that does nothing is left at once.
        new: The plan to go over to.
        outlook: What the time until the next loss is guessed from.
        left_s: Training time that the job still needs under ``present``.

    Returns:
        A time on the clock of ``outlook``; infinite if never.
    """
    if present.examples_per_s == 0:
        return outlook.since_s
    needed_s = break_even_s(present.examples_per_s, new.examples_per_s, new.cost_s)
    if needed_s >= left_s:
        return math.inf
    quiet_at_s = outlook.quiet_at_s(needed_s)
    return max(quiet_at_s, outlook.changed_at_s + outlook.debounce_s)


def break_even_s(
    current_examples_per_s: float, new_examples_per_s: float, morph_cost_s: float
) -> float:
    """Return for how long a new plan must last to do more examples than the present one.

    Training stands still for ``morph_cost_s``. Infinite if the new plan is no faster; a
    generation that does not train (0 examples/s) is always left.
    """
    if new_examples_per_s <= current_examples_per_s:
        return math.inf
    if current_examples_per_s == 0:
        return 0.0
    gain = new_examples_per_s - current_examples_per_s
    return morph_cost_s * new_examples_per_s / gain


def handover_at_s(noticed_at_s: float, leaves_at_s: float, debounce_s: float) -> float:
    """Return when to leave a generation because one of its VMs goes away.

    A little later than the notice, as others may follow.
    """
    lead_s = leaves_at_s - noticed_at_s
    return noticed_at_s + min(debounce_s, NOTICE_SHARE * lead_s)


def lag_share(outlook: Outlook, lag_s: float, now_s: float) -> float:
    """Return the training time at stake with a loss, as a share of that between losses.

    Args:
        outlook: Nothing is at stake before the first loss.
        lag_s: Training since the newest checkpoint, on average.
        now_s: On the clock of ``outlook``.
    """
    quiet_s = outlook.quiet_s(now_s)
    return lag_s / quiet_s if outlook.losses_at_s and quiet_s > 0 else 0.0


def slowdown(depth: int, width: int, share: float) -> float:
    """Return by what factor falling back to checkpoints slows a plan down.

    A stage is gone when all its replicas are: with one replica at any loss, with two if
    of two losses the second hits the partner of the first (before its state has been
    copied again), with more hardly ever.

    Args:
        depth: Pipeline depth.
        width: Replicas.
        share: See ``lag_share``.

    Returns:
        From 1 up to 1 + ``CAUTION``.
    """
    chance = {1: 1.0, 2: 1 / (2 * depth - 1)}.get(width, 0.0)
    return 1 + min(CAUTION, chance * share)
