"""How many micro-batches each stage deals with at once, from its list in little room."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.morphing.memory.counts import CHUNK, NEEDED, RECOMPUTED, count_loads
from spottrain.morphing.schedules.compiled import fast
from spottrain.morphing.schedules.lists import Schedule, compact_schedule
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

    A plan's own bound permits every stage as many, also those whose list would need
    less, for what is ready may run before its turn (``rule.decide``). But for the last
    one: no gradient keeps it waiting, so it never goes beyond its list.

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
    counted = fast(count_loads, len(compact.codes))(compact.codes, compact.runs, chunks)
    rows: list[list[int]] = counted.tolist()
    listed = [sum(row[CHUNK:]) for row in rows]
    in_flight = listed
    if in_flight_bound is not None:
        most = min(in_flight_bound, num_microbatches)
        in_flight = [most] * (pipeline_depth - 1) + [min(most, listed[-1])]
    return tuple(
        StageLoad(
            in_flight=in_flight[p],
            # In a ring of several chunks some come from the last stage; see docs.
            inputs_held=in_flight[p - 1] if p else in_flight[0] + (chunks > 1),
            gradients_waiting=_waiting(compact, p, min(listed[p], in_flight[p])),
            recomputes=row[NEEDED],
            by_chunk=tuple(row[CHUNK:]) if chunks > 1 else (),
            keeps=tuple(not row[RECOMPUTED] >> chunk & 1 for chunk in range(chunks))
            if chunks > 1
            else (),
        )
        for p, row in enumerate(rows)
    )


def _waiting(compact: Schedule, stage: int, in_flight: int) -> int:
    """Return how many gradients may have come before their turn.

    Stages by turns forward and backward take each gradient as it comes, but one. Where
    all forwards come first, the stage after has backwards to run as often as it would
    have to wait, which is about one time in three.
    """
    if compact.chunks > 1:
        return 1
    if stage == compact.pipeline_depth - 1:
        return 0
    return 1 if in_flight <= compact.pipeline_depth else -(-in_flight // 3)
