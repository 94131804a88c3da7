"""Micro-batches that each stage handles at once, from its run-length-encoded list."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.morphing.schedules.types import Runs
from spottrain.wire.plan import ScheduleKind


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
    lists = _counted(schedule, pipeline_depth, num_microbatches, recompute, chunks)
    return tuple(lists.load(p, in_flight_bound) for p in range(pipeline_depth))


def stage_load(
    schedule: ScheduleKind,
    pipeline_depth: int,
    num_microbatches: int,
    recompute: bool,
    stage: int,
    in_flight_bound: int | None = None,
) -> StageLoad:
    """Return the load of one stage; arguments are those of ``stage_loads``."""
    lists = _counted(schedule, pipeline_depth, num_microbatches, recompute, 1)
    return lists.load(stage, in_flight_bound)


class _Counted:
    """The lists of a schedule, and what each asks for, whatever may be in flight."""

    def __init__(self, lists: Schedule) -> None:
        self._lists = lists
        self._counts = [_count(runs, lists.chunks) for runs in lists.lists]
        self._listed = [sum(by_chunk) for _, _, by_chunk in self._counts]

    def load(self, stage: int, bound: int | None) -> StageLoad:
        """Return the load of a stage; see ``stage_loads``."""
        needed, recompute_of, by_chunk = self._counts[stage]
        chunks = self._lists.chunks
        in_flight = self._in_flight(stage, bound)
        is_ring = chunks > 1
        return StageLoad(
            in_flight=in_flight,
            # In a ring of several chunks some come from the last stage; see docs.
            inputs_held=self._in_flight(stage - 1, bound) if stage else in_flight + is_ring,
            gradients_waiting=_gradients_waiting(
                self._lists, stage, min(self._listed[stage], in_flight)
            ),
            recomputes=needed,
            by_chunk=tuple(by_chunk) if is_ring else (),
            keeps=tuple(chunk not in recompute_of for chunk in range(chunks)) if is_ring else (),
        )

    def _in_flight(self, stage: int, bound: int | None) -> int:
        listed = self._listed[stage]
        if bound is None:
            return listed
        most = min(bound, self._lists.num_microbatches)
        return min(most, listed) if stage == len(self._listed) - 1 else most


@lru_cache(maxsize=256)
def _counted(
    schedule: ScheduleKind, depth: int, num_microbatches: int, recompute: bool, chunks: int
) -> _Counted:
    return _Counted(
        compact_schedule(schedule, depth, num_microbatches, recompute=recompute, chunks=chunks)
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


def _count(runs: Runs, chunks: int) -> tuple[int, set[int], list[int]]:
    """Return what a stage's list asks for.

    That is how many recomputes it cannot skip, which chunks recompute, and by chunk the
    micro-batches in flight. Counted are those at the peak, and of several peaks the last one
    with most of them in the first chunk. Of a repeated pattern only the first and the last
    repetition are gone through: those in between are like the last.
    """
    needed, recomputed = 0, set[int]()
    now, at_peak, done = [0] * chunks, [0] * chunks, [0, 0, 0]
    most, total, before = 0, 0, -1
    for codes, repeats in runs:
        for time in range(min(repeats, 2)):
            done_before, now_before, once = done[:], now[:], 0
            for code in codes:
                chunk, work = code // 3, code % 3
                if work == RECOMPUTE:
                    recomputed.add(chunk)
                    spared = before == FORWARD and (
                        done[FORWARD] - 1 == done[RECOMPUTE] == done[BACKWARD]
                    )
                    once += not spared
                elif work == BACKWARD:
                    now[chunk] -= 1
                    total -= 1
                else:
                    now[chunk] += 1
                    total += 1
                    if total > most or (total == most and now[0] >= at_peak[0]):
                        most, at_peak = total, now[:]
                done[work] += 1
                before = work
            needed += once * (1 if time == 0 else repeats - 1)
            if time == 0 and repeats > 2:  # go on to the last time
                done = [n + (repeats - 2) * (n - b) for n, b in zip(done, done_before, strict=True)]
                now = [n + (repeats - 2) * (n - b) for n, b in zip(now, now_before, strict=True)]
                total = sum(now)
    return needed, recomputed, at_peak
