"""Schedules as data, and the rule by which a stage departs from its schedule.

A schedule is one list of tasks a stage, made before the mini-batch begins. ``next_task``
reads a stage's list and ``Progress`` and says what to run now; executor and simulator
both ask it, so that what is simulated is what runs.

On every stage forwards and backwards run in ascending order of their micro-batch. Links
are first in, first out, so activations and gradients arrive in that order too, and the
whole state of a stage is a handful of counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from spottrain.morphing.errors import PlanError
from spottrain.wire import ScheduleKind


class Work(StrEnum):
    """What a task does with its micro-batch."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"


class Task(NamedTuple):
    """One entry of a stage's list."""

    work: Work
    microbatch: int
    """Number within the replica's share of the mini-batch, from 0."""

    def __str__(self) -> str:
        return f"{self.work}{self.microbatch}"


StageSchedule = tuple[Task, ...]


def make_schedule(
    kind: ScheduleKind, pipeline_depth: int, num_microbatches: int, *, recompute: bool
) -> tuple[StageSchedule, ...]:
    """Return the list of every stage of one replica.

    With ``recompute`` every stage but the last, which never does, has a recompute
    before each backward: it keeps no more of a micro-batch than the stage's input.

    Args:
        kind: ``varuna`` (Varuna, section 3.2), ``1f1b`` or ``gpipe``; the last with its
            backwards in ascending order.
        pipeline_depth: Stages, at least 1.
        num_microbatches: Micro-batches of the replica, at least 1; no upper limit.
        recompute: Whether stages compute their forward again before the backward.

    Raises:
        PlanError: There is no stage or no micro-batch.
    """
    if pipeline_depth < 1 or num_microbatches < 1:
        raise PlanError(
            "a schedule needs a stage and a micro-batch: got pipeline_depth "
            f"{pipeline_depth}, num_microbatches {num_microbatches}; give at least 1"
        )
    if kind == "varuna":
        return _varuna(pipeline_depth, num_microbatches, recompute)
    last = pipeline_depth - 1
    lists = []
    for stage in range(pipeline_depth):
        lead = num_microbatches if kind == "gpipe" else pipeline_depth - stage
        lead = min(lead, num_microbatches)
        lists.append(_lead(lead, num_microbatches, recompute and stage < last))
    return tuple(lists)


def format_stage(tasks: Iterable[Task]) -> str:
    """Return a stage's list as text: ``F0 F1 R0 B0 R1 B1``."""
    return " ".join(map(str, tasks))


def max_in_flight(tasks: Iterable[Task]) -> int:
    """Return the most micro-batches that a stage following ``tasks`` has in flight.

    In flight: forwarded, and not yet through the backward. Each holds its stashed input
    or, on a stage that does not recompute, its saved tensors.
    """
    in_flight = peak = 0
    for task in tasks:
        if task.work is Work.FORWARD:
            in_flight += 1
            peak = max(peak, in_flight)
        elif task.work is Work.BACKWARD:
            in_flight -= 1
    return peak


def _lead(lead: int, num_microbatches: int, recompute: bool) -> StageSchedule:
    """Return ``lead`` forwards, then backwards and forwards by turns."""
    tasks = [Task(Work.FORWARD, j) for j in range(lead)]
    for j in range(num_microbatches):
        if recompute:
            tasks.append(Task(Work.RECOMPUTE, j))
        tasks.append(Task(Work.BACKWARD, j))
        if lead + j < num_microbatches:
            tasks.append(Task(Work.FORWARD, lead + j))
    return tuple(tasks)


class _Stage:
    """One stage while the rule of ``_varuna`` plays: what it has done, what it may do."""

    __slots__ = ("arrived", "backwards", "busy", "forwards", "tasks", "turns")

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.arrived = 0
        """Micro-batches whose activation is here."""
        self.turns = 0
        """Micro-batches whose turn to recompute, or to go backward, has come."""
        self.forwards = 0
        self.backwards = 0
        self.busy = 0
        """Quanta still to run of the recompute and backward under way."""


def _varuna(
    depth: int, num_microbatches: int, recompute: bool
) -> tuple[StageSchedule, ...]:
    """Play Varuna's rule in quanta of one forward (section 3.2, constraints 1 to 3).

    Forward and recompute take one quantum, a backward two: first the gradient of the
    stage's input, then that of its weights. A stage prefers going backward, and goes
    from a recompute straight to its backward. When a stage has its input gradient, the
    stage before begins to recompute, so that it is done when the backward is and the
    gradient arrives. Without recompute that stage begins its backward a quantum later,
    for the gradient is sent when the backward is done.
    """
    forward, again, backward = (
        [Task(work, j) for j in range(num_microbatches)] for work in Work
    )
    stages = [_Stage() for _ in range(depth)]
    stages[0].arrived = num_microbatches
    last = depth - 1
    turn_at = 1 if recompute else 0
    while stages[0].backwards < num_microbatches or stages[0].busy:
        arrivals: list[_Stage] = []
        turns: list[_Stage] = []
        for p, stage in enumerate(stages):
            if not stage.busy and stage.backwards < stage.turns:
                stage.busy = 2
                if recompute and p < last:
                    stage.busy = 3
                    stage.tasks.append(again[stage.backwards])
                stage.tasks.append(backward[stage.backwards])
                stage.backwards += 1
            if stage.busy:
                stage.busy -= 1
                if stage.busy == turn_at and p > 0:
                    turns.append(stages[p - 1])
            elif stage.forwards < stage.arrived:
                stage.tasks.append(forward[stage.forwards])
                stage.forwards += 1
                arrivals.append(stages[p + 1]) if p < last else turns.append(stage)
        # What a quantum brings can be used from the next one on.
        for stage in arrivals:
            stage.arrived += 1
        for stage in turns:
            stage.turns += 1
    return tuple(tuple(stage.tasks) for stage in stages)


class Progress:
    """Where one stage stands in its list, what has arrived, and what it may hold.

    The one object that executor and simulator keep for each stage: they report arrivals
    and completed tasks to it, and ask ``next_task``.

    Args:
        tasks: The stage's list.
        bound: Most micro-batches in flight; ``max_in_flight(tasks)`` if not given.
            Any bound from 1 on is free of deadlock: the oldest micro-batch of the
            pipeline is always permitted.
        first: Whether the stage reads its input itself, so that no activation is
            awaited.
        last: Whether the stage computes the loss, so that no gradient is awaited.
    """

    __slots__ = (
        "_position",
        "activations",
        "backwards",
        "bound",
        "forwards",
        "gradients",
        "graph_kept",
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
    ) -> None:
        num_microbatches = sum(task.work is Work.BACKWARD for task in tasks)
        self.tasks = tasks
        self.bound = max_in_flight(tasks) if bound is None else bound
        self.recomputes = any(task.work is Work.RECOMPUTE for task in tasks)
        self.activations = num_microbatches if first else 0
        """Activations that have arrived."""
        self.gradients = num_microbatches if last else 0
        """Gradients that have arrived."""
        self.forwards = 0
        """Forwards done."""
        self.backwards = 0
        """Backwards done."""
        self.graph_kept = False
        """On a stage that recomputes: whether its one set of activations is held, which
        is always by micro-batch ``backwards``, the next to go backward."""
        self.peak_in_flight = 0
        self._position = 0

    @property
    def in_flight(self) -> int:
        """Micro-batches forwarded and not yet through the backward."""
        return self.forwards - self.backwards

    @property
    def done(self) -> bool:
        """Whether the whole list has been run."""
        return self._position == len(self.tasks)

    def activation_arrived(self) -> None:
        """Note that the activation of the next micro-batch has arrived."""
        self.activations += 1

    def gradient_arrived(self) -> None:
        """Note that the gradient of the next micro-batch has arrived."""
        self.gradients += 1

    def keeps_graph(self, task: Task) -> bool:
        """Whether this forward is to keep its tensors for the backward.

        On a stage that does not recompute all do. Elsewhere only one whose recompute
        comes next in the list, nothing else being in flight: its recompute is skipped.
        Ask before the task is completed.
        """
        if not self.recomputes:
            return True
        following = self._position + 1
        return (
            self.in_flight == 0
            and self.tasks[self._position] == task
            and self.tasks[following].microbatch == task.microbatch
        )

    def completed(self, task: Task) -> None:
        """Note that ``task``, which ``next_task`` gave, is done."""
        if task.work is Work.FORWARD:
            if self.recomputes and self.keeps_graph(task):
                self.graph_kept = True
            self.forwards += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        elif task.work is Work.RECOMPUTE:
            self.graph_kept = True
        else:
            self.graph_kept = False
            self.backwards += 1
        self._advance()

    def _advance(self) -> None:
        """Pass the entries of the list that are done or no longer needed."""
        recomputed = self.backwards + self.graph_kept
        for position in range(self._position, len(self.tasks)):
            work, microbatch = self.tasks[position]
            if work is Work.FORWARD:
                done = self.forwards
            elif work is Work.BACKWARD:
                done = self.backwards
            else:
                done = recomputed
            if microbatch >= done:
                self._position = position
                return
        self._position = len(self.tasks)


def next_task(progress: Progress) -> Task | None:
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
    forwards, backwards = progress.forwards, progress.backwards
    can_forward = forwards < progress.activations and (
        forwards - backwards < progress.bound
    )
    can_backward = backwards < forwards and backwards < progress.gradients
    if can_forward and (listed.work is Work.FORWARD or not can_backward):
        work, microbatch = Work.FORWARD, forwards
    elif progress.recomputes and not progress.graph_kept:
        full = forwards - backwards == progress.bound
        if not (can_backward or full or listed.work is Work.RECOMPUTE):
            return None
        work, microbatch = Work.RECOMPUTE, backwards
    elif can_backward:
        work, microbatch = Work.BACKWARD, backwards
    else:
        return None
    return listed if listed.work is work else Task(work, microbatch)
