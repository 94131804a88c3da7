"""Varuna's rule, played in quanta (Varuna, section 3.2, constraints 1 to 3)."""

from __future__ import annotations

import numpy as np

from spottrain.morphing.loops.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.morphing.loops.types import Codes, Numbers

ARRIVED, TURNS, FORWARDS, BACKWARDS, QUANTA, LENGTH, FIELDS = range(7)
"""Of a stage: micro-batches whose activation is here; whose turn to recompute, or to go
backward, has come; forwards and backwards begun; quanta still to run of the recompute and
backward under way; tasks in its list so far."""


def play_quanta(
    depth: int, num_microbatches: int, recompute: bool, room: int
) -> tuple[Codes, Numbers, Numbers, int]:
    """Play the rule; leap once over what repeats.

    Forward and recompute take one quantum, a backward two: first the gradient of the
    stage's input, then that of its weights. A stage prefers going backward, and goes
    from a recompute straight to its backward. When a stage has its input gradient, the
    stage before begins to recompute, so that it is done when the backward is and the
    gradient arrives. Without recompute that stage begins its backward a quantum later,
    for the gradient is sent when the backward is done.

    Args:
        depth: Stages.
        num_microbatches: Micro-batches of the replica.
        recompute: Whether all stages but the last compute their forward again.
        room: Most tasks of a list that can be written down.

    Returns:
        Works by stage; the lengths of the lists as far as they are written; where in
        them the part that repeats begins and ends (by stage), and how often it comes in
        addition: -1 if ``room`` was too small, and then all is void.
    """
    works = np.zeros((depth, room), np.int8)
    stages = np.zeros((depth, FIELDS), np.int64)
    then = stages.copy()
    repeated = np.zeros((depth, 2), np.int64)
    stages[0, ARRIVED] = num_microbatches
    last, turn_at = depth - 1, 1 if recompute else 0
    news = np.zeros((depth, 2), np.int64)
    quanta, save_at, extra = 0, 1, 0
    while stages[0, BACKWARDS] < num_microbatches or stages[0, QUANTA] > 0:
        for p in range(depth):
            stage = stages[p]
            if stage[LENGTH] + 2 > room:
                return works, stages[:, LENGTH].copy(), repeated, -1
            if stage[QUANTA] == 0 and stage[BACKWARDS] < stage[TURNS]:
                stage[QUANTA] = 2
                if recompute and p < last:
                    stage[QUANTA] = 3
                    works[p, stage[LENGTH]] = RECOMPUTE
                    stage[LENGTH] += 1
                works[p, stage[LENGTH]] = BACKWARD
                stage[LENGTH] += 1
                stage[BACKWARDS] += 1
            if stage[QUANTA] > 0:
                stage[QUANTA] -= 1
                if stage[QUANTA] == turn_at and p > 0:
                    news[p - 1, TURNS] = 1
            elif stage[FORWARDS] < stage[ARRIVED]:
                works[p, stage[LENGTH]] = FORWARD
                stage[LENGTH] += 1
                stage[FORWARDS] += 1
                if p < last:
                    news[p + 1, ARRIVED] = 1
                else:
                    news[p, TURNS] = 1
        # What a quantum brings can be used from the next one on.
        stages[:, : TURNS + 1] += news
        news[:] = 0
        quanta += 1
        if extra:
            continue
        if quanta == save_at:
            save_at *= 2
            then = stages.copy()
            continue
        # Everything but what has begun on the first stage is as it was?
        grown = stages - then
        same = stages[0, FORWARDS] < num_microbatches
        for p in range(depth):
            forwards = grown[p, FORWARDS]
            same = (
                same
                and grown[p, QUANTA] == 0
                and forwards == grown[p, BACKWARDS] == grown[p, TURNS] > 0
                and (p == 0 or forwards == grown[p, ARRIVED])
            )
        if same:
            left = num_microbatches - stages[0, FORWARDS]
            extra = left // grown[0, FORWARDS] - 1
            if extra > 0:
                repeated[:, 0], repeated[:, 1] = then[:, LENGTH], stages[:, LENGTH]
                for field in (ARRIVED, TURNS, FORWARDS, BACKWARDS):
                    stages[:, field] += extra * grown[:, field]
                stages[0, ARRIVED] = num_microbatches
            extra = max(extra, 1) if extra > 0 else 0
    return works, stages[:, LENGTH].copy(), repeated, extra
