"""Schedules as data, and the rule by which a stage departs from its schedule.

A schedule is one list of tasks per stage, made before the mini-batch begins (``lists`` makes
it). ``next_task`` reads a stage's list and its progress and says what to run now. The
executor asks it; the simulator's loops ask the ``Stage`` beneath it, so that what is
simulated is what runs.

On every stage forwards and backwards run in ascending order of their micro-batch, for each
of an interleaved schedule's chunks. Links are first in, first out, so activations and
gradients arrive in the order in which the neighbours' lists make them (``arrivals``), and
the whole state of a stage is a handful of counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple

from spottrain.morphing.schedules import rule
from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.schedules.stage import ACTIVATIONS, GRADIENTS, Stage
from spottrain.wire.plan import ScheduleKind


class Work(StrEnum):
    """Kinds of tasks of a micro-batch."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"


WORKS = tuple(Work)
"""By their numbers in ``rule``."""
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


class StageProgress:
    """State of one stage for the executor: its place in its list, arrivals, and limits.

    The simulator keeps the same ``Stage``: both report arrivals and completed tasks to it, and
    ask what to run next.

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

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        first: bool,
        last: bool,
        bound: int | None = None,
        order_policy: OrderPolicy = OrderPolicy.OPPORTUNISTIC,
    ) -> None:
        codes = bytes(map(_code, tasks))
        chunks = [[0, 0, 0, 0] for _ in range(1 + max(codes, default=0) // 3)]
        self.num_microbatches = codes.count(rule.BACKWARD)
        self.bound = max_in_flight(tasks) if bound is None else bound
        if first:
            chunks[0][ACTIVATIONS] = self.num_microbatches
        if last:
            chunks[-1][GRADIENTS] = self.num_microbatches
        self._stage = Stage([(codes, 1)], chunks, self.bound)
        self._order_policy = order_policy if len(chunks) == 1 else OrderPolicy.STRICT
        self._recomputed = {task.chunk for task in tasks if task.work is Work.RECOMPUTE}

    @property
    def recomputes(self) -> bool:
        """Whether any of the stage's chunks recomputes."""
        return self._stage.recomputes

    @property
    def forwards(self) -> int:
        """Forwards done, of all chunks."""
        return self._stage.done[rule.FORWARD]

    @property
    def in_flight(self) -> int:
        """Micro-batches forwarded and not yet through the backward, in all chunks."""
        return self._stage.in_flight

    @property
    def peak_in_flight(self) -> int:
        """Maximum micro-batches in flight so far."""
        return self._stage.peak

    @property
    def done(self) -> bool:
        """True if the whole list has been run."""
        return self._stage.listed == rule.NOTHING

    def activation_arrived(self, chunk: int = 0) -> None:
        """Note that the activation of the next micro-batch of a chunk has arrived."""
        self._stage.chunks[chunk][ACTIVATIONS] += 1

    def gradient_arrived(self, chunk: int = 0) -> None:
        """Note that the gradient of the next micro-batch of a chunk has arrived."""
        self._stage.chunks[chunk][GRADIENTS] += 1

    def keeps_graph(self, task: Task) -> bool:
        """Return whether this forward is to keep its tensors for the backward.

        In a chunk that does not recompute all do. Elsewhere only one whose recompute
        comes next in the list, nothing else being in flight: its recompute is skipped.
        Ask before the task is completed.
        """
        if task.chunk not in self._recomputed:
            return True
        return task.work is Work.FORWARD and self._stage.keeps_graph()

    def completed(self, task: Task) -> None:
        """Note that ``task``, which ``next_task`` gave, is done."""
        self._stage.note(_code(task))

    def next_task(self) -> Task | None:
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
        code = self._stage.choose(self._order_policy)
        if code == rule.NOTHING:
            return None
        chunk, work = divmod(code, 3)
        return Task(WORKS[work], self._stage.next_of(code), chunk)


def _code(task: Task) -> int:
    return 3 * task.chunk + NUMBERS[task.work]
