"""Schedules as data, and the rule by which a stage departs from its schedule.

A schedule is one list of tasks per stage, made before the mini-batch begins (``lists`` makes
it). ``next_task`` reads a stage's list and ``StageProgress`` and says what to run now. The
executor asks it; the simulator's loops ask the functions beneath it (``loops.rule``), so
that what is simulated is what runs.

On every stage forwards and backwards run in ascending order of their micro-batch, for each
of an interleaved schedule's chunks. Links are first in, first out, so activations and
gradients arrive in the order in which the neighbours' lists make them (``arrivals``), and
the whole state of a stage is a handful of counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from spottrain.morphing.schedules import rule
from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.wire.model import ScheduleKind


class Work(StrEnum):
    """Kinds of tasks of a micro-batch."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"


WORKS = tuple(Work)
"""By their numbers in ``loops.rule``."""
NUMBERS = {work: number for number, work in enumerate(WORKS)}


class OrderPolicy(IntEnum):
    """How strictly a stage follows its list."""

    OPPORTUNISTIC = rule.OPPORTUNISTIC
    """As the runtime does: see ``next_task``."""
    STRICT = rule.STRICT
    """Exactly: the stage waits for whatever is next. Only under this policy a slower
    task never makes the mini-batch finish earlier."""


class Task(NamedTuple):
    """One entry of a stage's list."""

    work: Work
    microbatch: int
    """Number within the replica's share of the mini-batch, from 0."""
    chunk: int = 0
    """Of an interleaved schedule: which of the stage's parts of the model."""

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.work}{self.microbatch}{chunk}"


StageSchedule = tuple[Task, ...]


def make_schedule(
    kind: ScheduleKind,
    pipeline_depth: int,
    num_microbatches: int,
    *,
    recompute: bool,
    chunks: int = 1,
) -> tuple[StageSchedule, ...]:
    """Return the list of every stage of one replica: ``compact_schedule`` at length."""
    return expand(
        compact_schedule(kind, pipeline_depth, num_microbatches, recompute=recompute, chunks=chunks)
    )


def expand(schedule: Schedule) -> tuple[StageSchedule, ...]:
    """Return the list of every stage at length."""
    return tuple(
        tuple(
            Task(WORKS[work], microbatch, chunk) for work, chunk, microbatch in schedule.tasks_of(p)
        )
        for p in range(schedule.pipeline_depth)
    )


def format_schedule(schedule: Schedule) -> list[str]:
    """Return every stage's list as text: ``F0 F1 R0 B0 R1 B1``.

    A chunk but the first is named after a point: ``F0.1``.
    """
    names = [
        (work.value, f".{chunk}" if chunk else "")
        for chunk in range(schedule.chunks)
        for work in WORKS
    ]
    return [
        " ".join(
            f"{names[3 * chunk + work][0]}{microbatch}{names[3 * chunk + work][1]}"
            for work, chunk, microbatch in schedule.tasks_of(p)
        )
        for p in range(schedule.pipeline_depth)
    ]


def max_in_flight(tasks: Iterable[Task]) -> int:
    """Return the maximum micro-batches in flight of a stage following ``tasks``.

    In flight: forwarded, and not yet through the backward. Each holds its stashed input
    or, on a stage that does not recompute, its saved tensors. A micro-batch counts once
    for each chunk of an interleaved schedule.
    """
    in_flight = peak = 0
    for task in tasks:
        if task.work is Work.FORWARD:
            in_flight += 1
            peak = max(peak, in_flight)
        elif task.work is Work.BACKWARD:
            in_flight -= 1
    return peak


Unit = tuple[int, int]
"""A micro-batch in one of a stage's chunks: what one forward and one backward deal with."""


def arrivals(
    lists: Sequence[StageSchedule], stage: int
) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Return what comes in at a stage, activations and gradients, each in its order.

    The neighbours' lists say it, and no message has to. Activations come from the stage
    before; those of chunks after the first come to stage 0 from the last stage, so that
    the stages of an interleaved schedule form a ring. Gradients go the other way.

    Args:
        lists: Of all stages.
        stage: Whose neighbours' lists are read.
    """
    last = len(lists) - 1
    chunks = 1 + max(task.chunk for task in lists[stage])
    before, up = (stage - 1, 0) if stage else (last, 1)
    after, down = (stage + 1, 0) if stage < last else (0, 1)
    return (
        tuple(
            (task.microbatch, task.chunk + up)
            for task in lists[before]
            if task.work is Work.FORWARD and task.chunk + up < chunks
        ),
        tuple(
            (task.microbatch, task.chunk - down)
            for task in lists[after]
            if task.work is Work.BACKWARD and task.chunk >= down
        ),
    )


@dataclass(slots=True)
class ChunkCounts:
    """Counts of arrivals and completed tasks of one of a stage's chunks."""

    recomputes: bool
    activations: int = 0
    gradients: int = 0
    forwards: int = 0
    backwards: int = 0


class StageProgress:
    """State of one stage: its place in its list, arrivals, and limits.

    The one object that executor and simulator keep for each stage: they report arrivals
    and completed tasks to it, and ask ``next_task``.

    Args:
        tasks: The stage's list.
        bound: Maximum micro-batches in flight; ``max_in_flight(tasks)`` if not given.
            Any bound from 1 on is free of deadlock: the oldest micro-batch of the
            pipeline is always permitted.
        first: Whether the stage reads the model's input itself, so that its first chunk
            awaits no activation.
        last: Whether the stage computes the loss, so that its last chunk awaits no
            gradient.
        order_policy: How strictly the stage follows its list. A list with chunks is
            always followed in order, so that the neighbours know what comes next.
    """

    __slots__ = (
        "_passed",
        "_position",
        "_promised",
        "_recomputed",
        "backwards",
        "bound",
        "chunks",
        "forwards",
        "graph_kept",
        "num_microbatches",
        "order_policy",
        "peak_in_flight",
        "recomputes",
        "tasks",
    )

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        first: bool,
        last: bool,
        bound: int | None = None,
        order_policy: OrderPolicy = OrderPolicy.OPPORTUNISTIC,
    ) -> None:
        recompute = {task.chunk for task in tasks if task.work is Work.RECOMPUTE}
        self.chunks = [
            ChunkCounts(chunk in recompute)
            for chunk in range(1 + max((task.chunk for task in tasks), default=0))
        ]
        backwards = sum(task.work is Work.BACKWARD for task in tasks)
        self.num_microbatches = backwards // len(self.chunks)
        self.tasks = tasks
        one_run = len(self.chunks) == 1
        self.order_policy = order_policy if one_run else OrderPolicy.STRICT
        self.bound = max_in_flight(tasks) if bound is None else bound
        self.recomputes = bool(recompute)
        self.chunks[0].activations = self.num_microbatches if first else 0
        self.chunks[-1].gradients = self.num_microbatches if last else 0
        self.forwards = 0
        """Forwards done, of all chunks."""
        self.backwards = 0
        """Backwards done, of all chunks."""
        self.graph_kept = False
        """On a stage that recomputes: whether its one set of activations is held, which
        is always by the next to go backward."""
        self.peak_in_flight = 0
        self._position = 0
        self._recomputed = 0
        self._passed = dict.fromkeys(Work, 0)

    @property
    def in_flight(self) -> int:
        """Micro-batches forwarded and not yet through the backward, in all chunks."""
        return self.forwards - self.backwards

    @property
    def done(self) -> bool:
        """True if the whole list has been run."""
        return self._position == len(self.tasks)

    def activation_arrived(self, chunk: int = 0) -> None:
        """Note that the activation of the next micro-batch of a chunk has arrived."""
        self.chunks[chunk].activations += 1

    def gradient_arrived(self, chunk: int = 0) -> None:
        """Note that the gradient of the next micro-batch of a chunk has arrived."""
        self.chunks[chunk].gradients += 1

    def keeps_graph(self, task: Task) -> bool:
        """Return whether this forward is to keep its tensors for the backward.

        In a chunk that does not recompute all do. Elsewhere only one whose recompute
        comes next in the list, nothing else being in flight: its recompute is skipped.
        Ask before the task is completed.
        """
        if not self.chunks[task.chunk].recomputes:
            return True
        following = self._position + 1
        if task.work is not Work.FORWARD or following >= len(self.tasks):
            return False
        return rule.keeps_graph(
            NUMBERS[self.tasks[self._position].work],
            NUMBERS[self.tasks[following].work],
            self.forwards,
            self.backwards,
            self._passed[Work.RECOMPUTE],
        )

    def completed(self, task: Task) -> None:
        """Note that ``task``, which ``next_task`` gave, is done."""
        counts = self.chunks[task.chunk]
        if task.work is Work.FORWARD:
            if counts.recomputes and self.keeps_graph(task):
                self.graph_kept = True
                self._recomputed += 1
            counts.forwards += 1
            self.forwards += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        elif task.work is Work.RECOMPUTE:
            self.graph_kept = True
            self._recomputed += 1
        else:
            self.graph_kept = False
            counts.backwards += 1
            self.backwards += 1
        self._advance()

    def _advance(self) -> None:
        """Pass the entries of the list that are done or no longer needed."""
        done = {
            Work.FORWARD: self.forwards,
            Work.RECOMPUTE: self._recomputed,
            Work.BACKWARD: self.backwards,
        }
        for position in range(self._position, len(self.tasks)):
            work = self.tasks[position].work
            if self._passed[work] >= done[work]:
                self._position = position
                return
            self._passed[work] += 1
        self._position = len(self.tasks)


def next_task(progress: StageProgress) -> Task | None:
    """Return the task to run now, or ``None`` to wait for an arrival.

    The list's next task, if its input is here. Otherwise the stage is opportunistic
    (section 3.2): it runs another task whose input is here, forward first. What may
    run at all, so that memory never exceeds ``bound`` micro-batches in flight and,
    on a stage that recomputes, one set of activations:

    - a forward, when its activation is here and fewer than ``bound`` are in flight;
      next to a held set of activations too, for it keeps its input only;
    - a recompute, only of the oldest micro-batch in flight, while no set is held;
      if its gradient is missing, only in its turn or when no forward is permitted,
      and a forward that is ready goes first;
    - a backward, only of the oldest one in flight, when its gradient is here.

    A list whose forwards exceed ``bound`` is followed as far as ``bound`` permits.
    """
    if progress.done:
        return None
    listed = progress.tasks[progress._position]
    counts = progress.chunks[listed.chunk]
    chosen = rule.decide(
        progress.order_policy,
        NUMBERS[listed.work],
        counts.forwards,
        counts.backwards,
        counts.activations,
        counts.gradients,
        progress.bound,
        progress.recomputes,
        progress.graph_kept,
    )
    if chosen == rule.NOTHING:
        return None
    if chosen == NUMBERS[listed.work]:
        return listed
    is_forward = chosen == rule.FORWARD
    return Task(WORKS[chosen], counts.forwards if is_forward else counts.backwards)
