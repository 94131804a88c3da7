"""Counts along the lists of all stages: what is in flight, what is recomputed."""

from __future__ import annotations

import numpy as np

from spottrain.morphing.schedules.compiled import part
from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.morphing.schedules.stage import RUNS
from spottrain.morphing.schedules.types import Codes, Numbers

NEEDED, RECOMPUTED, CHUNK = range(3)
"""Of a row: recomputes that its list cannot do without, chunks that recompute as bits,
and from there on micro-batches in flight of each chunk."""


@part
def growth(work: int) -> int:
    """Return how many more micro-batches are in flight after a task."""
    if work == FORWARD:
        return 1
    return -1 if work == BACKWARD else 0


@part
def count_loads(codes: Codes, runs: Numbers, chunks: int) -> Numbers:
    """Return a row of every stage: see ``NEEDED``.

    In flight are those of the moment when most are, the last such moment with most of
    them in the first chunk. Of a pattern that is repeated the first and the last time are
    gone through: those in between are like the last.
    """
    rows = np.zeros((len(runs), CHUNK + chunks), np.int64)
    now = np.zeros(chunks, np.int64)
    begun, done = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for p in range(len(runs)):
        row, most, before = rows[p], 0, -1
        done[:] = 0
        now[:] = 0
        for r in range(RUNS):
            start, length, repeats = runs[p, r]
            for time in range(min(repeats, 2)):
                needed = 0
                begun[:] = done
                for i in range(start, start + length):
                    chunk, work = codes[i] // 3, codes[i] % 3
                    if work == RECOMPUTE:
                        row[RECOMPUTED] |= 1 << chunk
                        spared = (
                            before == FORWARD
                            and done[FORWARD] - 1 == done[RECOMPUTE] == done[BACKWARD]
                        )
                        needed += 0 if spared else 1
                    done[work] += 1
                    before = work
                    now[chunk] += growth(work)
                    total = now.sum()
                    if work == FORWARD and (
                        total > most or (total == most and now[0] >= row[CHUNK])
                    ):
                        most = total
                        row[CHUNK:] = now
                row[NEEDED] += needed * (1 if time == 0 else repeats - 1)
                if time == 0 and repeats > 2:  # go on to the last time
                    done += (repeats - 2) * (done - begun)
                    for code in codes[start : start + length]:
                        now[code // 3] += (repeats - 2) * growth(code % 3)
    return rows
