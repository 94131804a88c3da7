"""Run-length-encoded schedules: patterns of tasks and their numbers of repetitions.

Schedules repeat themselves. So a list is at most three runs, each a pattern of tasks and
a number of times, which is as short for a million micro-batches as for a hundred.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.quanta import play_quanta
from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.morphing.schedules.stage import peak_in_flight
from spottrain.morphing.schedules.types import Runs
from spottrain.wire.plan import MAX_CHUNKS, ScheduleKind

MAX_TASKS = 1 << 62
"""Maximum that the loops can count."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The lists of all stages of one replica."""

    num_microbatches: int
    chunks: int
    """Parts of the model on each stage: more than 1 if interleaved."""
    lists: tuple[Runs, ...]
    """Of each stage, at most three runs."""

    @property
    def pipeline_depth(self) -> int:
        """Stages."""
        return len(self.lists)

    @cached_property
    def num_tasks(self) -> int:
        """Tasks of all stages."""
        return sum(len(pattern) * repeats for runs in self.lists for pattern, repeats in runs)

    @cached_property
    def max_in_flight(self) -> tuple[int, ...]:
        """Maximum micro-batches in flight on each stage that follows its list."""
        return tuple(map(peak_in_flight, self.lists))

    def tasks_of(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """Yield work, chunk and micro-batch of each task of a stage."""
        done = [0] * (3 * self.chunks)
        for pattern, repeats in self.lists[stage]:
            for _ in range(repeats):
                for code in pattern:
                    yield code % 3, code // 3, done[code]
                    done[code] += 1


def compact_schedule(
    kind: ScheduleKind,
    pipeline_depth: int,
    num_microbatches: int,
    *,
    recompute: bool,
    chunks: int = 1,
) -> Schedule:
    """Return the lists of all stages of one replica.

    With ``recompute`` every stage but the last, which never does, has a recompute
    before each backward: it keeps no more of a micro-batch than the stage's input.

    Args:
        kind: ``varuna`` (Varuna, section 3.2), ``1f1b``, ``gpipe`` (with its backwards
            in ascending order) or ``interleaved`` (Megatron-LM's 1F1B over ``chunks``
            parts of the model on each stage; Narayanan et al. 2021, section 2.2).
        pipeline_depth: Stages, at least 1.
        num_microbatches: Micro-batches of the replica, at least 1; no upper limit but
            that all tasks can be counted in 62 bits.
        recompute: Whether stages compute their forward again before the backward.
        chunks: Parts of the model on each stage; only ``interleaved`` has more than 1.

    Raises:
        PlanError: There is no stage or no micro-batch; ``chunks`` do not fit the kind; or
            interleaved micro-batches are no multiple of the stages.
    """
    return _compact(kind, pipeline_depth, num_microbatches, recompute, chunks)


@lru_cache(maxsize=16)  # a choice of a plan asks for the same ones again and again
def _compact(
    kind: ScheduleKind, pipeline_depth: int, num_microbatches: int, recompute: bool, chunks: int
) -> Schedule:
    _check(kind, pipeline_depth, num_microbatches, chunks)
    if kind == "varuna" and pipeline_depth > 1:
        played = play_quanta(pipeline_depth, num_microbatches, recompute)
        return Schedule(num_microbatches, chunks, tuple(played))
    if chunks > 1:
        rings = [
            _interleaved(p, pipeline_depth, num_microbatches, chunks, recompute)
            for p in range(pipeline_depth)
        ]
        return pack(rings, num_microbatches, chunks)
    last = pipeline_depth - 1
    lists: list[list[tuple[Sequence[int], int]]] = []
    for stage in range(pipeline_depth):
        back = (RECOMPUTE, BACKWARD) if recompute and stage < last else (BACKWARD,)
        # Of one stage alone, Varuna's rule makes the list of 1F1B.
        lead = num_microbatches if kind == "gpipe" else pipeline_depth - stage
        lead = min(lead, num_microbatches)
        steady = num_microbatches - lead
        lists.append([((FORWARD,), lead), ((*back, FORWARD), steady), (back, lead)])
    return pack(lists, num_microbatches, 1)


def pack(
    lists: Sequence[Sequence[tuple[Sequence[int], int]]], num_microbatches: int, chunks: int
) -> Schedule:
    """Return the schedule of these runs of codes, of which some may be empty."""
    packed = (
        [(bytes(codes), repeats) for codes, repeats in runs if codes and repeats] for runs in lists
    )
    return Schedule(num_microbatches, chunks, tuple(packed))


def _check(kind: ScheduleKind, depth: int, num_microbatches: int, chunks: int) -> None:
    if depth < 1 or num_microbatches < 1:
        raise PlanError(
            "a schedule needs a stage and a micro-batch: got pipeline_depth "
            f"{depth}, num_microbatches {num_microbatches}; give at least 1"
        )
    if 3 * chunks * depth * num_microbatches > MAX_TASKS:
        raise PlanError(
            f"a schedule has at most {MAX_TASKS:.0e} tasks: got {num_microbatches} "
            f"micro-batches on {depth} stages; take fewer"
        )
    if kind != "interleaved" and chunks != 1:
        raise PlanError(
            f"only interleaved schedules have several chunks per stage: got {chunks} "
            f"for {kind}; use 1"
        )
    if kind == "interleaved" and not 1 <= chunks <= MAX_CHUNKS:
        raise PlanError(f"interleaved needs 1 to {MAX_CHUNKS} chunks per stage: got {chunks}")
    if kind == "interleaved" and num_microbatches % depth:
        raise PlanError(
            "interleaved needs micro-batches in multiples of the stages: got "
            f"{num_microbatches} for {depth}; take "
            f"{num_microbatches // depth * depth or depth} or "
            f"{(num_microbatches // depth + 1) * depth}"
        )


def _interleaved(
    stage: int, depth: int, num_microbatches: int, chunks: int, recompute: bool
) -> list[tuple[Sequence[int], int]]:
    """Return one stage's runs: warm-up, one forward one backward, the rest.

    Micro-batches go through the chunks in groups of ``depth``: a group through the first
    chunk, the same through the second, and so on.
    """
    group = depth * chunks
    total = num_microbatches * chunks
    lead = min(2 * (depth - stage - 1) + (chunks - 1) * depth, total - 1) + 1
    forwards = [3 * (k % group // depth) + FORWARD for k in range(group)]
    backwards: list[list[int]] = []
    for k in range(group):
        chunk = chunks - 1 - k % group // depth
        whole = stage == depth - 1 and chunk == chunks - 1
        again = [] if whole or not recompute else [3 * chunk + RECOMPUTE]
        backwards.append([*again, 3 * chunk + BACKWARD])

    def alternating(begin: int, end: int) -> list[int]:
        codes: list[int] = []
        for k in range(begin, end):
            codes += backwards[k % group]
            codes.append(forwards[(k + lead) % group])
        return codes

    whole_groups, rest = divmod(total - lead, group)
    tail = alternating(0, rest)
    for k in range(total - lead, total):
        tail += backwards[k % group]
    warm_up = [forwards[k % group] for k in range(lead)]
    return [(warm_up, 1), (alternating(0, group), whole_groups), (tail, 1)]
