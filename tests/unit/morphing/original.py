"""The mini-batch of one replica, event by event, as Varuna's published simulator plays it.

What a simulator of strict schedules is compared with. Differences from ``loops.play``: a
recompute waits for its gradient, and while that is missing a forward is put before it
for good; no forward keeps its tensors, so no recompute is skipped. A stage sends up to
four messages at once, activations before gradients, each as fast as if it were alone.
Events at the same microsecond happen one after the other, and a stage acts on each
before it knows of the next; their order is left to chance: an event whose time is taken
is put off by a random number of nanoseconds below 1000. Chance is the C library's
``random()``, never seeded, so the same numbers come every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from spottrain.morphing.schedules.lists import Schedule
from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, NOTHING, RECOMPUTE
from spottrain.morphing.schedules.stage import (
    ACTIVATIONS,
    GRADIENTS,
    Stage,
    make_stages,
)
from spottrain.morphing.simulate.replica import NANOSECONDS, Link, StageTimes

CONCURRENT_SENDS = 4
MICROSECOND = 1000
PUT_OFF_TRIES = 10
SENT, START, DONE, SEND = range(2, 6)
"""Kinds of events, beside an arrival (``ACTIVATIONS``, ``GRADIENTS``): a message has
left; a task begins, or is done. A send begins: SEND plus the message's way."""
WORD = 0xFFFFFFFF
DEGREE, SEPARATION = 31, 3


class Random:
    """glibc's ``random()`` with seed 1: an additive feedback generator over 31 words."""

    def __init__(self) -> None:
        self._words = [1]
        for _ in range(1, DEGREE):
            self._words.append(16807 * self._words[-1] % 2147483647)
        self._at = 0
        for _ in range(10 * DEGREE):
            self.draw()

    def draw(self) -> int:
        front = (self._at + SEPARATION) % DEGREE
        self._words[front] = (self._words[front] + self._words[self._at]) & WORD
        self._at = (self._at + 1) % DEGREE
        return self._words[front] >> 1


class Agenda:
    """Events to come: when, kind, stage and micro-batch of an activation."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, int, int]] = []
        self._taken: set[int] = set()
        self._random = Random()

    def plan(self, time: int, kind: int, p: int, nth: int = 0) -> None:
        """Add an event, put off if its time is taken."""
        at, tries = time, 0
        while at in self._taken and tries < PUT_OFF_TRIES:
            at = time + self._random.draw() % MICROSECOND
            tries += 1
        self._taken.add(at)
        heappush(self._events, (at, kind, p, nth))

    def next(self) -> tuple[int, int, int, int] | None:
        if not self._events:
            return None
        event = heappop(self._events)
        if not self._events or self._events[0][0] != event[0]:
            self._taken.discard(event[0])
        return event


@dataclass
class Mail:
    """A stage's messages."""

    waiting: list[int] = field(default_factory=lambda: [0, 0])
    """To be sent, by way."""
    sending: int = 0
    """On their way from it."""
    next: int = 0
    """Micro-batch of the next activation to send."""
    early: int = 0
    """Activations that came before their turn, as bits from the one that is awaited."""
    expects: bool = False
    """Whether a forward was put before the listed recompute."""


def act(p: int, stage: Stage, mail: Mail, agenda: Agenda, now: int, num_microbatches: int) -> None:
    """Let stage ``p`` begin what it may.

    It is not busy, and a message does not count, before the planned event has happened.
    """
    if stage.running == NOTHING and stage.listed != NOTHING:
        activations, gradients, forwards, backwards = stage.chunks[0]
        no_gradient = backwards >= gradients
        if stage.listed == RECOMPUTE and no_gradient and forwards < num_microbatches:
            mail.expects = True
        code = FORWARD if mail.expects else stage.listed
        if code == FORWARD:
            ready = forwards < activations
        else:
            ready = backwards < forwards and not no_gradient
        if ready:
            stage.running = code
            agenda.plan(now, START, p)
    for way in (ACTIVATIONS, GRADIENTS):
        if mail.sending < CONCURRENT_SENDS and mail.waiting[way] > 0:
            mail.waiting[way] -= 1
            nth = 0
            if way == ACTIVATIONS:
                nth = mail.next
                mail.next += 1
            agenda.plan(now, SEND + way, p, nth)


def play_original(
    stages: list[Stage], durations: list[list[int]], send: list[int], num_microbatches: int
) -> None:
    """Play the lists to their end; all times are in nanoseconds, whole microseconds.

    Args:
        stages: That have done nothing yet.
        durations: By stage and work.
        send: What a message takes, by link.
        num_microbatches: Of the replica.
    """
    for stage in stages:
        stage.recomputes = False  # else a forward could keep its tensors
    mails = [Mail() for _ in stages]
    agenda = Agenda()
    act(0, stages[0], mails[0], agenda, 0, num_microbatches)
    while (event := agenda.next()) is not None:
        time, kind, p, nth = event
        now = time // MICROSECOND * MICROSECOND
        stage, mail = stages[p], mails[p]
        counts = stage.chunks[0]
        if kind == START:
            duration = durations[p][stage.running]
            stage.busy += duration
            agenda.plan(now + duration, DONE, p)
        elif kind == DONE:
            code = stage.running
            stage.running = NOTHING
            stage.finish = now
            stage.note(code)
            mail.expects = mail.expects and code != FORWARD
            if code == FORWARD and p < len(stages) - 1:
                mail.waiting[ACTIVATIONS] += 1
            elif code == BACKWARD and p > 0:
                mail.waiting[GRADIENTS] += 1
        elif kind == SENT:
            mail.sending -= 1
        elif kind == ACTIVATIONS:
            mail.early |= 1 << (nth - counts[ACTIVATIONS])
            while mail.early & 1:
                mail.early >>= 1
                counts[ACTIVATIONS] += 1
        elif kind == GRADIENTS:
            counts[GRADIENTS] += 1
        else:
            way = kind - SEND
            link, to = (p, p + 1) if way == ACTIVATIONS else (p - 1, p - 1)
            mail.sending += 1
            arrives = now + send[link]
            agenda.plan(arrives, SENT, p)
            agenda.plan(arrives, way, to, nth)
        act(p, stage, mail, agenda, now, num_microbatches)


def original_finish_s(
    schedule: Schedule, stages: Sequence[StageTimes], links: Sequence[Link]
) -> float:
    """Return when the published simulator has drained the pipeline."""

    def whole(time_s: float) -> int:
        return round(time_s * (NANOSECONDS // MICROSECOND)) * MICROSECOND

    count = schedule.num_microbatches
    played = make_stages(schedule.lists, 1, count, schedule.max_in_flight)
    works = [[whole(s.forward_s), whole(s.recompute_s), whole(s.backward_s)] for s in stages]
    sends = [whole(link.latency_s + link.transfer_s) for link in links]
    play_original(played, works, sends, count)
    return max(stage.finish for stage in played) / NANOSECONDS
