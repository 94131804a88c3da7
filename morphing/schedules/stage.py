"""A stage, simulated or real: what it has done, and its way through its list."""

from __future__ import annotations

from dataclasses import dataclass, field

from spottrain.morphing.schedules.rule import (
    BACKWARD,
    FORWARD,
    NOTHING,
    RECOMPUTE,
    decide,
    keeps_graph,
)
from spottrain.morphing.schedules.types import Runs

ACTIVATIONS, GRADIENTS, CHUNK_FORWARDS, CHUNK_BACKWARDS = range(4)
"""Of a chunk: arrived, arrived, done, done."""


@dataclass(slots=True, eq=False)
class Stage:
    """What a stage has done, and what it does."""

    runs: Runs
    """Its list."""
    chunks: list[list[int]]
    """Counts of each chunk: see ``ACTIVATIONS``."""
    bound: int
    """Maximum micro-batches in flight."""
    recomputes: bool = False
    """Whether its list has recomputes."""
    run: int = 0
    """This and the next two: the place of the list's next task."""
    offset: int = 0
    repeat: int = 0
    listed: int = NOTHING
    """Code of the list's next task."""
    done: list[int] = field(default_factory=lambda: [0, 0, 0])
    """By work; of recomputes also those no longer needed."""
    passed: list[int] = field(default_factory=lambda: [0, 0, 0])
    """By work, how many the list has before its next task."""
    graph_kept: bool = False
    running: int = NOTHING
    """Code of the running task, its micro-batch, when it began, and its end."""
    running_nth: int = 0
    begun: int = 0
    until: int = 0
    queued: int = NOTHING
    """Code of the task that the device runs next, its micro-batch, and for how long."""
    queued_nth: int = 0
    queued_time: int = 0
    chosen: int = NOTHING
    """Code of the task that the host has chosen, and not queued yet."""
    busy: int = 0
    """Nanoseconds."""
    finish: int = 0
    peak: int = 0
    """Maximum micro-batches in flight so far."""

    def __post_init__(self) -> None:
        self.recomputes = any(
            code in pattern
            for pattern, _ in self.runs
            for code in range(RECOMPUTE, 3 * len(self.chunks), 3)
        )
        self._advance()

    @property
    def in_flight(self) -> int:
        """Micro-batches forwarded and not yet through the backward."""
        return self.done[FORWARD] - self.done[BACKWARD]

    def choose(self, order_policy: int) -> int:
        """Return the code of the task to run now, or ``NOTHING``."""
        if self.listed == NOTHING:
            return NOTHING
        chunk, listed = divmod(self.listed, 3)
        activations, gradients, forwards, backwards = self.chunks[chunk]
        work = decide(
            order_policy,
            listed,
            forwards,
            backwards,
            activations,
            gradients,
            self.bound,
            self.recomputes,
            self.graph_kept,
        )
        return NOTHING if work == NOTHING else 3 * chunk + work

    def next_of(self, code: int) -> int:
        """Return the micro-batch of the next task of a code."""
        return self.chunks[code // 3][CHUNK_FORWARDS if code % 3 == FORWARD else CHUNK_BACKWARDS]

    def keeps_graph(self) -> bool:
        """Return whether the list's next task is a forward that keeps its tensors for its
        backward, and so saves its recompute."""
        return self.recomputes and keeps_graph(
            self.listed % 3,
            self._following() % 3,
            self.done[FORWARD],
            self.done[BACKWARD],
            self.passed[RECOMPUTE],
        )

    def note(self, code: int) -> None:
        """Count a task, after which the next one may be chosen."""
        chunk, work = divmod(code, 3)
        done = self.done
        if work == FORWARD:
            if self.keeps_graph():
                self.graph_kept = True
                done[RECOMPUTE] += 1
            done[FORWARD] += 1
            self.chunks[chunk][CHUNK_FORWARDS] += 1
            self.peak = max(self.peak, self.in_flight)
        elif work == RECOMPUTE:
            self.graph_kept = True
            done[RECOMPUTE] += 1
        else:
            self.graph_kept = False
            done[BACKWARD] += 1
            self.chunks[chunk][CHUNK_BACKWARDS] += 1
        self._advance()

    def _advance(self) -> None:
        """Pass the entries of the list that are done or no longer needed."""
        while self.run < len(self.runs):
            pattern, repeats = self.runs[self.run]
            while self.offset < len(pattern):
                code = pattern[self.offset]
                work = code % 3
                if self.passed[work] >= self.done[work]:
                    self.listed = code
                    return
                self.passed[work] += 1
                self.offset += 1
            self.offset = 0
            self.repeat += 1
            if self.repeat == repeats:
                self.run += 1
                self.repeat = 0
        self.listed = NOTHING

    def _following(self) -> int:
        """Return the code after the listed one, or ``NOTHING``."""
        pattern, repeats = self.runs[self.run]
        if self.offset + 1 < len(pattern):
            return pattern[self.offset + 1]
        if self.repeat + 1 < repeats:
            return pattern[0]
        return self.runs[self.run + 1][0][0] if self.run + 1 < len(self.runs) else NOTHING


def make_stages(
    lists: tuple[Runs, ...], chunks: int, num_microbatches: int, bounds: tuple[int, ...]
) -> list[Stage]:
    """Return stages that have done nothing yet.

    The first reads its input and the last has its loss, so these wait for nothing.
    """
    stages = [
        Stage(runs, [[0, 0, 0, 0] for _ in range(chunks)], bound)
        for runs, bound in zip(lists, bounds, strict=True)
    ]
    stages[0].chunks[0][ACTIVATIONS] = num_microbatches
    stages[-1].chunks[-1][GRADIENTS] = num_microbatches
    return stages


def peak_in_flight(runs: Runs) -> int:
    """Return the maximum micro-batches in flight of a stage that follows its list."""
    level = peak = 0
    for pattern, repeats in runs:
        grows = top = 0
        for code in pattern:
            if code % 3 == FORWARD:
                grows += 1
                top = max(top, grows)
            elif code % 3 == BACKWARD:
                grows -= 1
        peak = max(peak, level + (repeats - 1) * max(0, grows) + top)
        level += repeats * grows
    return peak
