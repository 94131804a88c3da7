"""Which rank hangs, when no mini-batch has been committed for long.

A job that is merely slow must not be broken off. So it is not the time of a mini-batch that
decides, but how long one rank has been at one task: a fraction of a mini-batch, which a rank
that is slow, or evaluates for hours, finishes again and again. A rank that waits for others
does not hang, unless all wait; and whoever computes, or does what takes its time, is given
more of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from spottrain.wire.model import WorkerState

STEPS = 20.0
"""Mini-batches, as long as they usually take, within which every task ends."""
LONG = 10.0
"""Times the patience for what may take long with no sign of life: making or fetching
examples, a kernel that waits for a disk, the first mini-batch (compiling); and for a process
that computes."""
SAVING = 30.0
"""Likewise, for writing a checkpoint."""
DEADLOCK = 2.0
"""Likewise, for a message on its way between ranks that all wait."""


@dataclass(frozen=True, slots=True)
class HangDiagnosis:
    """What is known of ranks that have not committed for long."""

    hung: tuple[int, ...]
    """Those that hang; they are broken off."""
    awaited: tuple[int, ...]
    """Those that the others wait for, whether they hang or are slow; the one that has been
    longest at its task comes first."""
    is_deadlock: bool
    """All wait for each other: a message was lost."""


def patience_s(floor_s: float, step_s: float) -> float:
    """Return how long nothing may be heard of a job before its ranks are asked.

    Args:
        floor_s: At least so long.
        step_s: Usual time of a mini-batch.
    """
    return max(floor_s, STEPS * step_s)


def allowed_s(
    rank: WorkerState, patience_s: float, *, is_first: bool, is_forming: bool = False
) -> float:
    """Return how long a rank may be at the task that it does.

    Args:
        rank: What it does.
        patience_s: See there.
        is_first: Its generation has not committed a mini-batch yet.
        is_forming: Its generation forms, and moves state.

    Returns:
        Infinite for one that waits, or moves state, which may take long, and for one that
        has ended, of which its supervisor tells.
    """
    if rank.process == "gone":
        return math.inf
    if rank.process == "stopped":
        return patience_s
    if rank.doing == "wait" or is_forming:
        return math.inf
    if rank.doing == "save":
        return SAVING * patience_s
    is_long = is_first or rank.doing in ("start", "data")
    return patience_s * (LONG if is_long or rank.process != "idle" else 1.0)


def judge(
    ranks: Mapping[int, WorkerState],
    num_ranks: int,
    patience_s: float,
    *,
    is_first: bool,
    is_forming: bool = False,
) -> HangDiagnosis:
    """Return which ranks hang.

    Args:
        ranks: By number, as far as their agents have answered.
        num_ranks: Of the plan.
        patience_s: See there.
        is_first: Their generation has not committed a mini-batch yet.
        is_forming: Their generation forms, and moves state.
    """
    awaited = [
        number
        for number, rank in ranks.items()
        if rank.doing != "wait" or rank.process == "stopped"
    ]
    hung = [
        number
        for number in awaited
        if ranks[number].still_s
        >= allowed_s(ranks[number], patience_s, is_first=is_first, is_forming=is_forming)
    ]
    least_s = DEADLOCK * patience_s * (LONG if is_first else 1.0)
    is_deadlock = (
        len(ranks) == num_ranks
        and not is_forming
        and not awaited
        and all(rank.still_s >= least_s for rank in ranks.values())
    )
    awaited.sort(key=lambda number: -ranks[number].still_s)
    return HangDiagnosis(tuple(sorted(hung)), tuple(awaited), is_deadlock)
