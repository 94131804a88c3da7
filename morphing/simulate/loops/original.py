"""The mini-batch of one replica, event by event, as Varuna's published simulator plays it.

Differences from ``play``: stages follow ``OrderPolicy.ORIGINAL``. A stage sends up to
four messages at once, activations before gradients, each as fast as if it were alone.
Events at the same microsecond happen one after the other, and a stage acts on each
before it knows of the next; their order is left to chance: an event whose time is taken
is put off by a random number of nanoseconds below 1000. Chance is the C library's
``random()``, never seeded, so the same numbers come every time.
"""

from __future__ import annotations

import numpy as np

from spottrain.morphing.schedules.compiled import part
from spottrain.morphing.schedules.rule import (
    BACKWARD,
    FORWARD,
    NOTHING,
    ORIGINAL,
    expects_forward,
)
from spottrain.morphing.schedules.stage import (
    ACTIVATIONS,
    BUSY,
    CHUNK_BACKWARDS,
    CHUNK_FORWARDS,
    GRADIENTS,
    LISTED,
    PROMISED,
    RUNNING,
    choose,
    complete,
    make_counts,
    make_stages,
)
from spottrain.morphing.schedules.types import Codes, Numbers
from spottrain.morphing.simulate.loops.heap import TIME, make_heap, pop, push

CONCURRENT_SENDS = 4
SENDING, NEXT, EARLY, OUTBOX = range(2, 6)
"""Of a stage's mail: messages on their way from it; micro-batch of the next activation to
send; activations that came before their turn, as bits from the one that is awaited.
Before these, the messages that wait to be sent, by way."""
MICROSECOND = 1000
PUT_OFF_TRIES = 10
SENT, START, DONE, SEND = range(2, 6)
"""Kinds of events, beside an arrival (``ACTIVATIONS``, ``GRADIENTS``): a message has
left; a task begins, or is done. A send begins: SEND plus the message's way. What happens
is the kind plus KINDS times (the stage plus the depth times the activation's micro-batch).
"""
KINDS = 7
WORD = 0xFFFFFFFF
DEGREE, SEPARATION = 31, 3


@part
def make_random() -> Numbers:
    """Return the state of glibc's ``random()`` before its first number (seed 1)."""
    state = np.zeros(DEGREE + 1, np.int64)
    state[0] = 1
    for i in range(1, DEGREE):
        state[i] = 16807 * state[i - 1] % 2147483647
    for _ in range(10 * DEGREE):
        draw(state)
    return state


@part
def draw(state: Numbers) -> int:
    """Return the next number: an additive feedback generator over the last 31 words."""
    at = state[DEGREE]
    front = (at + SEPARATION) % DEGREE
    state[front] = (state[front] + state[at]) & WORD
    state[DEGREE] = (at + 1) % DEGREE
    return int(state[front] >> 1)


@part
def taken(heap: Numbers, time: int) -> bool:
    """Return whether an event is to happen at just that nanosecond."""
    found = False
    for event in range(1, heap[0, 0] + 1):
        found = found or heap[event, TIME] == time
    return found


@part
def plan(heap: Numbers, random: Numbers, time: int, what: int) -> Numbers:
    """Add an event, put off if its time is taken; returns the heap."""
    at = time
    tries = 0
    while taken(heap, at) and tries < PUT_OFF_TRIES:
        at = time + draw(random) % MICROSECOND
        tries += 1
    return push(heap, at, what)


@part
def act(
    p: int,
    depth: int,
    stage: Numbers,
    counts: Numbers,
    mail: Numbers,
    heap: Numbers,
    random: Numbers,
    now: int,
    num_microbatches: int,
) -> Numbers:
    """Let stage ``p`` begin what it may; returns the heap.

    It is not busy, and a message does not count, before the planned event has happened.
    """
    if stage[RUNNING] == NOTHING and stage[LISTED] != NOTHING:
        if expects_forward(
            ORIGINAL,
            stage[LISTED] % 3,
            counts[0, CHUNK_FORWARDS],
            counts[0, CHUNK_BACKWARDS],
            counts[0, GRADIENTS],
            num_microbatches,
        ):
            stage[PROMISED] = 1
        code = choose(ORIGINAL, stage, counts)
        if code != NOTHING:
            stage[RUNNING] = code
            heap = plan(heap, random, now, START + KINDS * p)
    for way in (ACTIVATIONS, GRADIENTS):
        if mail[SENDING] < CONCURRENT_SENDS and mail[way] > 0:
            mail[way] -= 1
            what = SEND + way + KINDS * p
            if way == ACTIVATIONS:
                what += KINDS * depth * mail[NEXT]
                mail[NEXT] += 1
            heap = plan(heap, random, now, what)
    return heap


def play_original(
    codes: Codes,
    runs: Numbers,
    durations: Numbers,
    send: Numbers,
    num_microbatches: int,
) -> Numbers:
    """Play the lists to their end; all times are in nanoseconds, whole microseconds.

    Args:
        codes: Patterns of all lists.
        runs: Of each stage: see ``stage``.
        durations: By stage and work.
        send: What a message takes, by link.
        num_microbatches: Of the replica.

    Returns:
        The rows of ``stage`` at the end.
    """
    depth = len(runs)
    stages = make_stages(codes, runs, 0)
    counts = make_counts(depth, 1, num_microbatches)
    mails = np.zeros((depth, OUTBOX), np.int64)
    heap, random = make_heap(16 * depth), make_random()
    heap = act(
        0, depth, stages[0], counts[0], mails[0], heap, random, 0, num_microbatches
    )
    while heap[0, 0] > 0:
        now = heap[1, TIME] // MICROSECOND * MICROSECOND
        what = pop(heap)
        kind, nth = what % KINDS, what // (KINDS * depth)
        p = what // KINDS % depth
        stage, mail = stages[p], mails[p]
        if kind == START:
            duration = durations[p, stage[RUNNING]]
            stage[BUSY] += duration
            heap = plan(heap, random, now + duration, DONE + KINDS * p)
        elif kind == DONE:
            code = complete(ORIGINAL, stage, counts[p], runs[p], codes, now)
            if code == FORWARD and p < depth - 1:
                mail[ACTIVATIONS] += 1
            elif code == BACKWARD and p > 0:
                mail[GRADIENTS] += 1
        elif kind == SENT:
            mail[SENDING] -= 1
        elif kind == ACTIVATIONS:
            mail[EARLY] |= 1 << (nth - counts[p, 0, ACTIVATIONS])
            while mail[EARLY] & 1:
                mail[EARLY] >>= 1
                counts[p, 0, ACTIVATIONS] += 1
        elif kind == GRADIENTS:
            counts[p, 0, GRADIENTS] += 1
        else:
            way = kind - SEND
            link, to = (p, p + 1) if way == ACTIVATIONS else (p - 1, p - 1)
            mail[SENDING] += 1
            arrives = now + send[link]
            heap = plan(heap, random, arrives, SENT + KINDS * p)
            heap = plan(heap, random, arrives, way + KINDS * (to + depth * nth))
        heap = act(
            p, depth, stage, counts[p], mail, heap, random, now, num_microbatches
        )
    return stages
