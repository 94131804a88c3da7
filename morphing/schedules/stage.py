"""The state of a stage as a row of numbers, and its way through its list.

Rows are those of arrays where the loops are compiled, and lists where they run as they are.

A list is up to three runs, each a pattern of codes that is repeated: see
``lists.Schedule``. The counts of ``schedule.StageProgress`` are here a row of
``stages`` and, for every chunk of the stage, a row of ``counts``.
"""

from __future__ import annotations

import numpy as np

from spottrain.morphing.schedules.compiled import jitable
from spottrain.morphing.schedules.rule import (
    BACKWARD,
    FORWARD,
    NOTHING,
    RECOMPUTE,
    decide,
    keeps_graph,
)
from spottrain.morphing.schedules.types import Codes, Numbers

RUNS = 3
"""Runs in a list."""
START, LENGTH, REPEATS = range(3)
"""Of a run: where its pattern begins among the codes, its length, its repetitions."""

(
    RUN,
    OFFSET,
    REPEAT,
    LISTED,
    FORWARDS,
    RECOMPUTED,
    BACKWARDS,
    PASSED,
    _PASSED_RECOMPUTES,
    _PASSED_BACKWARDS,
    GRAPH_KEPT,
    RUNNING,
    RUNNING_NTH,
    UNTIL,
    QUEUED,
    QUEUED_NTH,
    QUEUED_TIME,
    CHOSEN,
    BUSY,
    FINISH,
    PEAK,
    BOUND,
    RECOMPUTES,
    FIELDS,
) = range(24)
"""Of a stage. RUN, OFFSET, REPEAT: the next task's place. LISTED: its code. FORWARDS,
RECOMPUTED (or no longer needed), BACKWARDS: done. PASSED and the two after it: works in
the list before the next task. RUNNING: the code of the running task, its micro-batch, UNTIL
then. QUEUED: that of the one that the device runs next, its micro-batch, and for how long.
CHOSEN: that of the one that the host has chosen, and not queued yet."""
ACTIVATIONS, GRADIENTS, CHUNK_FORWARDS, CHUNK_BACKWARDS, COUNTS = range(5)
"""Of a chunk: arrived, arrived, done, done."""


@jitable
def peaks(codes: Codes, runs: Numbers) -> Numbers:
    """Return each stage's maximum micro-batches in flight if it follows its list."""
    peak = np.zeros(len(runs), np.int64)
    for p in range(len(runs)):
        level = 0
        for r in range(RUNS):
            run = runs[p][r]
            grows = top = 0
            for code in codes[run[START] : run[START] + run[LENGTH]]:
                if code % 3 == FORWARD:
                    grows += 1
                elif code % 3 == BACKWARD:
                    grows -= 1
                top = max(top, grows)
            if run[REPEATS] > 0:
                before = level + max(0, run[REPEATS] - 1) * max(0, grows)
                peak[p] = max(peak[p], before + top)
            level += run[REPEATS] * grows
    return peak


@jitable
def make_stages(codes: Codes, runs: Numbers) -> Numbers:
    """Return the rows of stages that have done nothing yet, each with its list's bound."""
    bounds = peaks(codes, runs)
    stages = np.zeros((len(runs), FIELDS), np.int64)
    for p in range(len(runs)):
        stages[p, RUNNING] = stages[p, QUEUED] = stages[p, CHOSEN] = NOTHING
        stages[p, BOUND] = bounds[p]
        for run in runs[p]:
            if run[REPEATS] > 0:
                for code in codes[run[START] : run[START] + run[LENGTH]]:
                    if code % 3 == RECOMPUTE:
                        stages[p, RECOMPUTES] = 1
        advance(stages[p], runs[p], codes)
    return stages


@jitable
def make_counts(depth: int, chunks: int, num_microbatches: int) -> Numbers:
    """Return the rows of chunks: the first reads its input, the last has its loss."""
    counts = np.zeros((depth, chunks, COUNTS), np.int64)
    counts[0, 0, ACTIVATIONS] = num_microbatches
    counts[depth - 1, chunks - 1, GRADIENTS] = num_microbatches
    return counts


@jitable
def advance(stage: Numbers, runs: Numbers, codes: Codes) -> None:
    """Pass the entries of the list that are done or no longer needed."""
    while stage[RUN] < RUNS:
        run = runs[stage[RUN]]
        if stage[REPEAT] >= run[REPEATS]:
            stage[RUN] += 1
            stage[REPEAT] = 0
            continue
        if stage[OFFSET] >= run[LENGTH]:
            stage[OFFSET] = 0
            stage[REPEAT] += 1
            continue
        code = codes[run[START] + stage[OFFSET]]
        work = code % 3
        if stage[PASSED + work] >= stage[FORWARDS + work]:
            stage[LISTED] = code
            return
        stage[PASSED + work] += 1
        stage[OFFSET] += 1
    stage[LISTED] = NOTHING


@jitable
def following(stage: Numbers, runs: Numbers, codes: Codes) -> int:
    """Return the code after the listed one, or ``NOTHING``."""
    run = runs[stage[RUN]]
    if stage[OFFSET] + 1 < run[LENGTH]:
        return int(codes[run[START] + stage[OFFSET] + 1])
    if stage[REPEAT] + 1 < run[REPEATS]:
        return int(codes[run[START]])
    for r in range(stage[RUN] + 1, RUNS):
        run = runs[r]
        if run[REPEATS] > 0 and run[LENGTH] > 0:
            return int(codes[run[START]])
    return NOTHING


@jitable
def choose(order_policy: int, stage: Numbers, counts: Numbers) -> int:
    """Return the code of the task to run now, or ``NOTHING``."""
    listed = stage[LISTED]
    if listed == NOTHING:
        return NOTHING
    chunk = listed // 3
    own = counts[chunk]
    work = decide(
        order_policy,
        listed % 3,
        own[CHUNK_FORWARDS],
        own[CHUNK_BACKWARDS],
        own[ACTIVATIONS],
        own[GRADIENTS],
        stage[BOUND],
        stage[RECOMPUTES] > 0,
        stage[GRAPH_KEPT] > 0,
    )
    return NOTHING if work == NOTHING else 3 * chunk + work


@jitable
def note(code: int, stage: Numbers, counts: Numbers, runs: Numbers, codes: Codes) -> None:
    """Count a task, after which the next one may be chosen."""
    chunk, work = code // 3, code % 3
    if work == FORWARD:
        if stage[RECOMPUTES] and keeps_graph(
            stage[LISTED] % 3,
            following(stage, runs, codes) % 3,
            stage[FORWARDS],
            stage[BACKWARDS],
            stage[PASSED + RECOMPUTE],
        ):
            stage[GRAPH_KEPT] = 1
            stage[RECOMPUTED] += 1
        stage[FORWARDS] += 1
        counts[chunk][CHUNK_FORWARDS] += 1
        stage[PEAK] = max(stage[PEAK], stage[FORWARDS] - stage[BACKWARDS])
    elif work == RECOMPUTE:
        stage[GRAPH_KEPT] = 1
        stage[RECOMPUTED] += 1
    elif work == BACKWARD:
        stage[GRAPH_KEPT] = 0
        stage[BACKWARDS] += 1
        counts[chunk][CHUNK_BACKWARDS] += 1
    advance(stage, runs, codes)
