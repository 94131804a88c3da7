"""Varuna's rule, played in quanta (Varuna, section 3.2, constraints 1 to 3)."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from spottrain.morphing.schedules.compiled import jitable
from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.morphing.schedules.stage import LENGTH, REPEATS, RUNS, START
from spottrain.morphing.schedules.types import Codes, Numbers

Room: TypeAlias = tuple[Codes, Numbers, Numbers, Numbers, Numbers]
"""What a run changes: works by stage; the runs of each stage's list; stages, now and at an
earlier moment; and what a quantum brings."""
ARRIVED, TURNS, FORWARDS, BACKWARDS, QUANTA, WRITTEN, FIELDS = range(7)
"""Of a stage: micro-batches whose activation has arrived; whose turn to recompute, or
to go backward, has come; forwards and backwards begun; quanta left of the running
recompute and backward; tasks in its list so far."""


@jitable
def repeats(stages: Numbers, then: Numbers, num_microbatches: int) -> int:
    """Return how often the tasks since ``then`` repeat, leaving one more to be played.

    They do if the state is the same except for the micro-batches that went through.
    Only the first stage meets the end of the mini-batch, as the others wait for it.
    """
    for p in range(len(stages)):
        a, b = then[p], stages[p]
        through = b[FORWARDS] - a[FORWARDS]
        same = b[QUANTA] == a[QUANTA] and b[TURNS] - a[TURNS] == through
        if not same or not b[BACKWARDS] - a[BACKWARDS] == through > 0:
            return 0
        if p > 0 and b[ARRIVED] - a[ARRIVED] != through:
            return 0
    through = stages[0][FORWARDS] - then[0][FORWARDS]
    return int(max(0, (num_microbatches - stages[0][FORWARDS]) // through - 1))


def make_room(depth: int, capacity: int) -> Room:
    """Return room to play in, for lists of up to ``capacity`` tasks."""
    return (
        np.zeros((depth, capacity), np.int8),
        np.zeros((depth, RUNS, 3), np.int64),
        np.zeros((depth, FIELDS), np.int64),
        np.zeros((depth, FIELDS), np.int64),
        np.zeros((depth, 2), np.int64),
    )


def play_quanta(
    depth: int, num_microbatches: int, recompute: bool, room: Room
) -> tuple[Codes, Numbers, bool]:
    """Play the rule; fast-forward once over the steady state.

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
        room: See ``make_room``.

    Returns:
        Works by stage; the runs of each stage's list (see ``stage``) among them; and
        whether there was room enough.
    """
    works, runs, stages, then, news = room
    capacity = len(works[0])
    stages[0][ARRIVED] = num_microbatches
    last, turn_at = depth - 1, 1 if recompute else 0
    quanta, save_at, extra = 0, 1, 0
    while stages[0][BACKWARDS] < num_microbatches or stages[0][QUANTA] > 0:
        for p in range(depth):
            stage = stages[p]
            if stage[WRITTEN] + 2 > capacity:
                return works, runs, False
            if stage[QUANTA] == 0 and stage[BACKWARDS] < stage[TURNS]:
                stage[QUANTA] = 2
                if recompute and p < last:
                    stage[QUANTA] = 3
                    works[p][stage[WRITTEN]] = RECOMPUTE
                    stage[WRITTEN] += 1
                works[p][stage[WRITTEN]] = BACKWARD
                stage[WRITTEN] += 1
                stage[BACKWARDS] += 1
            if stage[QUANTA] > 0:
                stage[QUANTA] -= 1
                if stage[QUANTA] == turn_at and p > 0:
                    news[p - 1][TURNS] = 1
            elif stage[FORWARDS] < stage[ARRIVED]:
                works[p][stage[WRITTEN]] = FORWARD
                stage[WRITTEN] += 1
                stage[FORWARDS] += 1
                if p < last:
                    news[p + 1][ARRIVED] = 1
                else:
                    news[p][TURNS] = 1
        # What a quantum brings can be used from the next one on.
        for p in range(depth):
            stages[p][ARRIVED] += news[p][ARRIVED]
            stages[p][TURNS] += news[p][TURNS]
            news[p][ARRIVED] = news[p][TURNS] = 0
        quanta += 1
        if extra:
            continue
        if quanta == save_at:
            save_at *= 2
            for p in range(depth):
                for field in range(FIELDS):
                    then[p][field] = stages[p][field]
            continue
        extra = repeats(stages, then, num_microbatches)
        for p in range(depth if extra > 0 else 0):
            runs[p][0][LENGTH] = then[p][WRITTEN]
            runs[p][1][LENGTH] = stages[p][WRITTEN] - then[p][WRITTEN]
            for field in range(ARRIVED if p > 0 else TURNS, QUANTA):
                stages[p][field] += extra * (stages[p][field] - then[p][field])
    for p in range(depth):
        at = capacity * p
        runs[p][2][LENGTH] = stages[p][WRITTEN]
        runs[p][2][LENGTH] -= runs[p][0][LENGTH] + runs[p][1][LENGTH]
        for r in range(RUNS):
            runs[p][r][START] = at
            runs[p][r][REPEATS] = 1 + extra if r == 1 else 1
            at += runs[p][r][LENGTH]
    return works, runs, True
