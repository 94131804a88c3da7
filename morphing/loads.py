"""How many micro-batches each stage deals with at once, from its list in little room."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.morphing.lists import Schedule, compact_schedule
from spottrain.morphing.loops.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.wire import ScheduleKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """How many micro-batches a stage deals with at once."""

    in_flight: int
    """Forwarded and not yet through the backward; a stage with several runs of sections
    counts a micro-batch once for each."""
    inputs_held: int
    """Arrived and not yet through the backward: never more than are in flight in the
    stage before."""
    gradients_waiting: int = 0
    """Arrived and not yet in their backward. A guess: none has to wait in theory, but
    nothing keeps the stage after from being ahead."""
    recomputes: int
    """Recomputes that its list cannot do without (see ``Progress.keeps_graph``)."""
    by_chunk: tuple[int, ...] = ()
    """Of those in flight, how many in each run of sections; empty: there is one run."""
    keeps: tuple[bool, ...] = ()
    """Whether a run of sections keeps every graph; empty: all do if there are no
    recomputes."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Micro-batches in flight of each run of sections."""
        return self.by_chunk or (self.in_flight,)

    @property
    def keeping(self) -> tuple[bool, ...]:
        """Whether each run of sections keeps every graph."""
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
    bound = in_flight_bound or num_microbatches * chunks
    in_flight = [min(bound, peak) for peak in compact.max_in_flight]
    return tuple(_load(compact, p, in_flight) for p in range(pipeline_depth))


def _load(compact: Schedule, stage: int, in_flight: list[int]) -> StageLoad:
    recomputes = _recomputes(compact, stage)
    if compact.chunks == 1:
        return StageLoad(
            in_flight=in_flight[stage],
            inputs_held=in_flight[max(stage - 1, 0)],
            gradients_waiting=_waiting(compact, stage, in_flight[stage]),
            recomputes=recomputes,
        )
    counts = _peak_counts(compact, stage)
    again = {
        int(code) // 3
        for codes, _ in compact.runs_of(stage)
        for code in codes
        if code % 3 == RECOMPUTE
    }
    return StageLoad(
        in_flight=in_flight[stage],
        # The stage before is at most two ahead, and so on around the ring.
        inputs_held=in_flight[stage] + 1,
        gradients_waiting=1,
        recomputes=recomputes,
        by_chunk=counts,
        keeps=tuple(chunk not in again for chunk in range(compact.chunks)),
    )


def _waiting(compact: Schedule, stage: int, in_flight: int) -> int:
    """Return how many gradients may have come before their turn.

    Stages by turns forward and backward take each gradient as it comes, but one. Where
    all forwards come first, the stage after has backwards to run as often as it would
    have to wait, which is about one time in three.
    """
    if stage == compact.pipeline_depth - 1:
        return 0
    return 1 if in_flight <= compact.pipeline_depth else -(-in_flight // 3)


def _recomputes(compact: Schedule, stage: int) -> int:
    """Count the recomputes but for those that come right after their forward.

    From one repeat of a pattern to the next only the first differs, by what came before.
    """
    done = [0, 0, 0]
    before, total = -1, 0
    for codes, repeats in compact.runs_of(stage):
        works = [int(code) % 3 for code in codes]
        counted = 0
        for _ in range(min(repeats, 2)):
            counted = 0
            for work in works:
                spared = (
                    before == FORWARD
                    and done[FORWARD] - 1 == done[RECOMPUTE] == done[BACKWARD]
                )
                counted += work == RECOMPUTE and not spared
                done[work] += 1
                before = work
            total += counted
        more = max(0, repeats - 2)
        total += more * counted
        for work in works:
            done[work] += more
    return total


def _peak_counts(compact: Schedule, stage: int) -> tuple[int, ...]:
    """Return how many micro-batches of each chunk are in flight when most are."""
    now = [0] * compact.chunks
    peak, most = tuple(now), 0

    def play(pattern: list[int]) -> None:
        nonlocal peak, most
        for code in pattern:
            chunk, work = divmod(code, 3)
            now[chunk] += (work == FORWARD) - (work == BACKWARD)
            if sum(now) > most:
                peak, most = tuple(now), sum(now)

    for codes, repeats in compact.runs_of(stage):
        pattern = codes.tolist()
        before = tuple(now)
        play(pattern)
        grown = [a - b for a, b in zip(now, before, strict=True)]
        for chunk, more in enumerate(grown):
            now[chunk] += max(0, repeats - 2) * more
        if repeats > 1:
            play(pattern)
    return peak
