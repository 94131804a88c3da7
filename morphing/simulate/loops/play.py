"""The mini-batch of one replica, event by event, as the runtime runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, NOTHING, RECOMPUTE
from spottrain.morphing.schedules.stage import (
    ACTIVATIONS,
    GRADIENTS,
    Stage,
)
from spottrain.morphing.simulate.loops.steady_state import (
    Event,
    counts_of,
    fast_forward,
    repetitions,
    same,
    state_of,
)

DONE = 2
"""Kinds of events: ``ACTIVATIONS`` or ``GRADIENTS`` for an arrival, or this."""
FILLED = 4
"""Micro-batches that are through, for each stage and each that may be in flight, before a pace
is taken."""
MARGIN = 0.02
"""Share of a mini-batch by which it may end earlier than at the pace of a part of its first half:
0.3 % at most over drawn plans."""
FIRST_CHECK = 16
"""Tasks of the slowest stage before the steady state is looked for; then at every
doubling a new moment is remembered (Brent's cycle detection)."""
Times: TypeAlias = list[list[list[int]]]
"""Nanoseconds by stage and code, or by link and way (``ACTIVATIONS``, ``GRADIENTS``); of
each the times of all micro-batches, or one for all."""


class TooSlowError(Exception):
    """A mini-batch was given up: at its pace it would end too late."""


class PlayedTask(NamedTuple):
    """A task that ran, in nanoseconds."""

    stage: int
    code: int
    microbatch: int
    begin: int
    end: int


class PlayedMessage(NamedTuple):
    """A message that was sent, from the begin of its transfer until it arrived."""

    sender: int
    receiver: int
    is_gradient: bool
    microbatch: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Records:
    """Everything that happened."""

    tasks: list[PlayedTask] = field(default_factory=list)
    messages: list[PlayedMessage] = field(default_factory=list)


class Wires:
    """The links between stages, and what is on them.

    A message leaves when both its carriers are free, and arrives after all that was sent
    before it the same way. The last stage's link leads on to the first, whose next chunk
    follows.

    Args:
        transfer: How long a message takes its carriers.
        latency: How long after that it arrives.
        carriers: By link and way the two that carry its messages, such as the sending and
            the receiving VM's NIC, or twice the same. A carrier takes a message at a time.
    """

    def __init__(
        self, transfer: Times, latency: Times, carriers: list[list[tuple[int, int]]]
    ) -> None:
        self._transfer, self._latency, self._carriers = transfer, latency, carriers
        self.free = [0] * (
            1 + max((c for link in carriers for way in link for c in way), default=0)
        )
        """Until when each carrier is taken."""
        self._latest = [[0, 0] for _ in carriers]

    def send(
        self, stages: Sequence[Stage], p: int, code: int, microbatch: int, now: int
    ) -> tuple[Event, int] | None:
        """Send what a task of stage ``p`` has made; return its arrival and when it left."""
        link, to, way = p, p + 1, ACTIVATIONS
        chunk, work = divmod(code, 3)
        if work != FORWARD:
            link, to, way = p - 1, p - 1, GRADIENTS
        if to == len(stages):
            to, chunk = 0, chunk + 1
        elif to < 0:
            link = to = len(stages) - 1
            chunk -= 1
        if not 0 <= chunk < len(stages[p].chunks):
            return None
        times, free, latest = self._transfer[link][way], self.free, self._latest[link]
        nth = microbatch % len(times)
        out, into = self._carriers[link][way]
        begin = max(now, free[out], free[into])
        free[out] = free[into] = sent = begin + times[nth]
        arrives = latest[way] = max(latest[way], sent + self._latency[link][way][nth])
        return (arrives, way, to, chunk), begin


def _start(
    order_policy: int, is_asynchronous: bool, stage: Stage, durations: list[list[int]], now: int
) -> bool:
    """Let a stage choose and queue what it may; return whether a task has begun.

    One whose device computes by itself chooses as the executor does: a task as soon as the
    one before is queued, which is once the device has no more than one task left. Others
    choose when they have done the task before.
    """
    has_begun = False
    while True:
        if stage.running == NOTHING and stage.queued != NOTHING:
            stage.running, stage.running_nth = stage.queued, stage.queued_nth
            stage.begun, stage.until = now, now + stage.queued_time
            stage.busy += stage.queued_time
            stage.queued = NOTHING
            has_begun = True
        if stage.chosen == NOTHING and (is_asynchronous or stage.running == NOTHING):
            stage.chosen = stage.choose(order_policy)
        code = stage.chosen
        if code == NOTHING or stage.queued != NOTHING:
            return has_begun
        nth = stage.next_of(code)
        stage.queued, stage.queued_nth = code, nth
        stage.queued_time = durations[code][nth % len(durations[code])]
        stage.chosen = NOTHING
        stage.note(code)


def play(
    stages: list[Stage],
    durations: Times,
    wires: Wires,
    order_policy: int,
    *,
    is_asynchronous: bool = False,
    watched: int | None = None,
    records: Records | None = None,
    deadline: float = math.inf,
) -> int:
    """Play the lists of stages to their end; all times are in nanoseconds.

    All that happens at an instant is known before anything starts at it. Of what happens
    at the same instant, arrivals come first, then stages in their order.

    Args:
        stages: That have done nothing yet.
        durations: Of their tasks.
        wires: Links on which nothing was sent yet.
        order_policy: ``OPPORTUNISTIC`` or ``STRICT``.
        is_asynchronous: Whether devices compute by themselves: see ``_start``.
        watched: Stage after whose tasks the steady state is looked for and fast-forwarded,
            best the slowest; ``None`` to play every micro-batch, as is necessary where they
            differ.
        records: Where all that happens is recorded, if given.
        deadline: When the watched stage has to be done.

    Returns:
        How many instants were played.

    Raises:
        TooSlowError: At the pace that it keeps the watched stage would not be done by the deadline.
    """
    all_tasks = 2 * stages[0].chunks[0][ACTIVATIONS] * len(stages[0].chunks)
    events: list[Event] = []
    now = instants = seen = 0
    save_at, then_at = FIRST_CHECK, -1
    then_counts = counts_of(stages)
    then_state: list[tuple[int, ...]] = []
    touched = set(range(len(stages)))
    """Stages to which something happened at this instant."""
    while True:
        for p in touched:
            stage = stages[p]
            if _start(order_policy, is_asynchronous, stage, durations[p], now):
                heappush(events, (stage.until, DONE, p, 0))
        if not events:
            return instants
        touched = set()
        now = events[0][0]
        instants += 1
        checks = False
        while events and events[0][0] == now:
            _, what, p, chunk = heappop(events)
            touched.add(p)
            stage = stages[p]
            if what != DONE:
                stage.chunks[chunk][what] += 1
                continue
            code, nth = stage.running, stage.running_nth
            stage.running = NOTHING
            stage.finish = now
            if records is not None:
                records.tasks.append(PlayedTask(p, code, nth, stage.begun, now))
            if code % 3 != RECOMPUTE and (sent := wires.send(stages, p, code, nth, now)):
                arrival, begin = sent
                heappush(events, arrival)
                if records is not None:
                    arrives, way, to, _ = arrival
                    records.messages.append(
                        PlayedMessage(p, to, way == GRADIENTS, nth, begin, arrives)
                    )
            checks = checks or p == watched
        if not checks:
            continue
        seen += 1
        if seen == save_at:
            assert watched is not None
            slowest, then = stages[watched], then_counts[watched]
            done = slowest.done[FORWARD] + slowest.done[BACKWARD]
            is_filled = then.done[BACKWARD] >= FILLED * max(slowest.bound, len(stages))
            if is_filled and done <= all_tasks / 2:
                passed = done - then.done[FORWARD] - then.done[BACKWARD]
                end = now + (now - then_at) * (all_tasks - done) / passed
                if end > (1 + MARGIN) * deadline:
                    raise TooSlowError
            save_at *= 2
            then_at, then_counts = now, counts_of(stages)
            then_state = list(state_of(stages, wires.free, events, now))
        elif then_at >= 0 and same(state_of(stages, wires.free, events, now), then_state):
            times = repetitions(order_policy, then_counts, stages)
            if times > 0:
                passed_time = now - then_at
                fast_forward(times, then_counts, passed_time, stages, wires.free, events, now)
                now += times * passed_time
                seen, save_at, then_at = 0, FIRST_CHECK, -1
