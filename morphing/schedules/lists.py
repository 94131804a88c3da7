"""Run-length-encoded schedules: patterns of tasks and their numbers of repetitions.

Schedules repeat themselves. So a list is at most three runs, each a pattern of tasks and
a number of times, which is as short for a million micro-batches as for a hundred.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.compiled import run_loop
from spottrain.morphing.schedules.quanta import make_room, play_quanta
from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, RECOMPUTE
from spottrain.morphing.schedules.stage import BOUND, RUNS, make_stages
from spottrain.morphing.schedules.types import Codes, Numbers
from spottrain.wire.model import MAX_CHUNKS, ScheduleKind

Run: TypeAlias = tuple[Sequence[int], int]
"""Codes of a pattern, and the number of its repetitions."""
MAX_TASKS = 1 << 62
"""Maximum that the loops can count."""
QUANTA_PER_STAGE = 8
"""Quanta per stage before Varuna's rule repeats itself: an estimate."""
TASKS_PER_STAGE = 64
"""Tasks per stage of a list before Varuna's rule repeats itself: a first estimate."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The lists of all stages of one replica."""

    num_microbatches: int
    chunks: int
    """Parts of the model on each stage: more than 1 if interleaved."""
    codes: Codes
    """Patterns, one after the other. A code is 3 times the chunk plus the work."""
    runs: Numbers
    """Of each stage, three: begin among the codes, length, repeats."""

    @property
    def pipeline_depth(self) -> int:
        """Stages."""
        return len(self.runs)

    @cached_property
    def num_tasks(self) -> int:
        """Tasks of all stages."""
        runs = self.runs.tolist()
        return sum(length * repeats for own in runs for _, length, repeats in own)

    @cached_property
    def stages(self) -> Numbers:
        """The rows of stages that have done nothing yet: see ``stage``."""
        rows: Numbers = run_loop(make_stages, len(self.codes), self.codes, self.runs)
        return rows

    @property
    def max_in_flight(self) -> tuple[int, ...]:
        """Maximum micro-batches in flight on each stage that follows its list."""
        return tuple(self.stages[:, BOUND].tolist())

    def runs_of(self, stage: int) -> list[tuple[Codes, int]]:
        """Return the runs of a stage: the codes of the pattern, and its repetitions."""
        return [
            (self.codes[start : start + length], repeats)
            for start, length, repeats in self.runs[stage].tolist()
            if length and repeats
        ]

    def tasks_of(self, stage: int) -> Iterator[tuple[int, int, int]]:
        """Yield work, chunk and micro-batch of each task of a stage."""
        done = [0] * (3 * self.chunks)
        for codes, repeats in self.runs_of(stage):
            pattern = codes.tolist()
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
        return _varuna(pipeline_depth, num_microbatches, recompute)
    if chunks > 1:
        lists = [
            _interleaved(p, pipeline_depth, num_microbatches, chunks, recompute)
            for p in range(pipeline_depth)
        ]
        return pack(lists, num_microbatches, chunks)
    last = pipeline_depth - 1
    lists = []
    for stage in range(pipeline_depth):
        back = (RECOMPUTE, BACKWARD) if recompute and stage < last else (BACKWARD,)
        # Of one stage alone, Varuna's rule makes the list of 1F1B.
        lead = num_microbatches if kind == "gpipe" else pipeline_depth - stage
        lead = min(lead, num_microbatches)
        runs = [((FORWARD,), lead), ((*back, FORWARD), num_microbatches - lead)]
        lists.append([*runs, (back, lead)])
    return pack(lists, num_microbatches, 1)


def pack(lists: Sequence[Sequence[Run]], num_microbatches: int, chunks: int) -> Schedule:
    """Return the schedule of these runs, at most three a stage."""
    codes: list[int] = []
    runs: list[list[tuple[int, int, int]]] = []
    for own in lists:
        placed = []
        for pattern, repeats in own:
            placed.append((len(codes), len(pattern), repeats))
            codes.extend(pattern)
        runs.append(placed + [(0, 0, 0)] * (RUNS - len(placed)))
    return Schedule(num_microbatches, chunks, np.array(codes, np.int8), np.array(runs, np.int64))


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
) -> list[Run]:
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


def _varuna(depth: int, num_microbatches: int, recompute: bool) -> Schedule:
    """Play Varuna's rule; keep a pattern that repeats once."""
    whole = 3 * num_microbatches + 2
    capacity = min(whole, TASKS_PER_STAGE * depth)
    while True:
        quanta = depth * min(num_microbatches, QUANTA_PER_STAGE * depth)
        room = make_room(depth, capacity)
        works, runs, fits = run_loop(play_quanta, quanta, depth, num_microbatches, recompute, room)
        if fits:
            codes = np.asarray(works, np.int8).ravel()
            return Schedule(num_microbatches, 1, codes, np.asarray(runs, np.int64))
        capacity = min(whole, 4 * capacity)
