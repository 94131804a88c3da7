"""Micro-batches that each stage handles at once, from its run-length-encoded list."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spottrain.morphing.schedules.compiled import jitable, run_loop
from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.morphing.schedules.stage import RUNS
from spottrain.morphing.schedules.types import Codes, Numbers
from spottrain.wire.model import ScheduleKind

_NEEDED, _RECOMPUTED, _CHUNK = range(3)
"""Columns of a row: recomputes that its list cannot skip, a bit mask of chunks that
recompute, and from there on the micro-batches in flight of each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Micro-batches that a stage handles at once."""

    in_flight: int
    """Forwarded and not yet through the backward; a stage with several runs of sections
    counts a micro-batch once for each."""
    inputs_held: int
    """Arrived and not yet through the backward: never more than are in flight in the
    stage before."""
    gradients_waiting: int = 0
    """Arrived and not yet in their backward. An estimate: none has to wait in theory,
    but nothing keeps the stage after from being ahead."""
    recomputes: int
    """Recomputes that its list cannot skip (see ``StageProgress.keeps_graph``)."""
    by_chunk: tuple[int, ...] = ()
    """Of those in flight, how many in each run of sections; empty: there is one run."""
    keeps: tuple[bool, ...] = ()
    """For each run of sections, whether it keeps every graph; empty: all do if there
    are no recomputes."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Micro-batches in flight of each run of sections."""
        return self.by_chunk or (self.in_flight,)

    @property
    def keeping(self) -> tuple[bool, ...]:
        """For each run of sections, whether it keeps every graph."""
        return self.keeps or (not self.recomputes,) * len(self.counts)


def stage_loads(
    schedule: ScheduleKind,
    pipeline_depth: int,
    num_microbatches: int,
    recompute: bool,
    *,
    chunks: int = 1,
    in_flight_bound: int | None = None,
) -> tuple[StageLoad, ...]:
    """Return the load of every stage of a replica that follows ``schedule``.

    A plan's own bound permits every stage as many, also those whose list would need
    fewer, because a ready task may run before its turn (``rule.decide``). The last
    stage is the exception: it never waits for a gradient, so it never goes beyond its
    list.

    Args:
        schedule: Its kind.
        pipeline_depth: Stages.
        num_microbatches: Micro-batches of the replica; no upper limit.
        recompute: Whether stages compute their forward again.
        chunks: Runs of sections on each stage.
        in_flight_bound: As ``Plan.in_flight_bound``.
    """
    compact = compact_schedule(
        schedule, pipeline_depth, num_microbatches, recompute=recompute, chunks=chunks
    )
    empty = np.zeros((pipeline_depth, _CHUNK + chunks), np.int64)
    tallies = np.zeros(chunks, np.int64), np.zeros(3, np.int64), np.zeros(3, np.int64)
    numbers = compact.codes, compact.runs, chunks, empty, tallies
    counted = run_loop(_count_loads, len(compact.codes), *numbers)
    rows: list[list[int]] = np.asarray(counted).tolist()
    listed = [sum(row[_CHUNK:]) for row in rows]
    in_flight = listed
    if in_flight_bound is not None:
        most = min(in_flight_bound, num_microbatches)
        in_flight = [most] * (pipeline_depth - 1) + [min(most, listed[-1])]
    return tuple(
        StageLoad(
            in_flight=in_flight[p],
            # In a ring of several chunks some come from the last stage; see docs.
            inputs_held=in_flight[p - 1] if p else in_flight[0] + (chunks > 1),
            gradients_waiting=_gradients_waiting(compact, p, min(listed[p], in_flight[p])),
            recomputes=row[_NEEDED],
            by_chunk=tuple(row[_CHUNK:]) if chunks > 1 else (),
            keeps=tuple(not row[_RECOMPUTED] >> chunk & 1 for chunk in range(chunks))
            if chunks > 1
            else (),
        )
        for p, row in enumerate(rows)
    )


def _gradients_waiting(compact: Schedule, stage: int, in_flight: int) -> int:
    """Return how many gradients may arrive before their turn.

    Stages that alternate forward and backward take each gradient as it comes, but one.
    Where all forwards come first, the stage after has backwards to run as often as it
    would have to wait, which is about one time in three.
    """
    if compact.chunks > 1:
        return 1
    if stage == compact.pipeline_depth - 1:
        return 0
    return 1 if in_flight <= compact.pipeline_depth else -(-in_flight // 3)


@jitable
def _growth(work: int) -> int:
    """Return how many more micro-batches are in flight after a task."""
    if work == FORWARD:
        return 1
    return -1 if work == BACKWARD else 0


@jitable
def _count_loads(
    codes: Codes, runs: Numbers, chunks: int, rows: Numbers, tallies: tuple[Numbers, ...]
) -> Numbers:
    """Fill a row of every stage, and return them: see ``_NEEDED``.

    Counted are those at the peak, and of several peaks the last one with most of them
    in the first chunk. Of a repeated pattern only the first and the last repetition are
    gone through: those in between are like the last.
    """
    now, begun, done = tallies
    for p in range(len(runs)):
        row, most, before, total = rows[p], 0, -1, 0
        for work in range(3):
            done[work] = 0
        for chunk in range(chunks):
            now[chunk] = 0
        for r in range(RUNS):
            start, length, repeats = runs[p][r]
            for time in range(min(repeats, 2)):
                needed = 0
                for work in range(3):
                    begun[work] = done[work]
                for code in codes[start : start + length]:
                    chunk, work = code // 3, code % 3
                    if work == RECOMPUTE:
                        row[_RECOMPUTED] |= 1 << chunk
                        spared = (
                            before == FORWARD
                            and done[FORWARD] - 1 == done[RECOMPUTE] == done[BACKWARD]
                        )
                        needed += 0 if spared else 1
                    done[work] += 1
                    before = work
                    now[chunk] += _growth(work)
                    total += _growth(work)
                    if work == FORWARD and (
                        total > most or (total == most and now[0] >= row[_CHUNK])
                    ):
                        most = total
                        for each in range(chunks):
                            row[_CHUNK + each] = now[each]
                row[_NEEDED] += needed * (1 if time == 0 else repeats - 1)
                if time == 0 and repeats > 2:  # go on to the last time
                    for work in range(3):
                        done[work] += (repeats - 2) * (done[work] - begun[work])
                    for code in codes[start : start + length]:
                        now[code // 3] += (repeats - 2) * _growth(code % 3)
                        total += (repeats - 2) * _growth(code % 3)
    return rows
