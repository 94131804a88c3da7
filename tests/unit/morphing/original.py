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

import numpy as np

from spottrain.morphing.schedules.compiled import jitable, jitted
from spottrain.morphing.schedules.lists import Schedule
from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, NOTHING, RECOMPUTE
from spottrain.morphing.schedules.stage import (
    ACTIVATIONS,
    BUSY,
    CHUNK_BACKWARDS,
    CHUNK_FORWARDS,
    FINISH,
    GRADIENTS,
    LISTED,
    RECOMPUTES,
    RUNNING,
    make_counts,
    make_stages,
    note,
)
from spottrain.morphing.schedules.types import Codes, Numbers
from spottrain.morphing.simulate.loops.heap import TIME, make_heap, pop, push
from spottrain.morphing.simulate.replica import NANOSECONDS, Link, StageTimes

CONCURRENT_SENDS = 4
SENDING, NEXT, EARLY, EXPECTS, OUTBOX = range(2, 7)
"""Of a stage's mail: messages on their way from it; micro-batch of the next activation to
send; activations that came before their turn, as bits from the one that is awaited;
whether a forward was put before the listed recompute.
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


@jitable
def make_random() -> Numbers:
    """Return the state of glibc's ``random()`` before its first number (seed 1)."""
    state = np.zeros(DEGREE + 1, np.int64)
    state[0] = 1
    for i in range(1, DEGREE):
        state[i] = 16807 * state[i - 1] % 2147483647
    for _ in range(10 * DEGREE):
        draw(state)
    return state


@jitable
def draw(state: Numbers) -> int:
    """Return the next number: an additive feedback generator over the last 31 words."""
    at = state[DEGREE]
    front = (at + SEPARATION) % DEGREE
    state[front] = (state[front] + state[at]) & WORD
    state[DEGREE] = (at + 1) % DEGREE
    return int(state[front] >> 1)


@jitable
def is_taken(heap: Numbers, time: int) -> bool:
    """Return whether an event is to happen at just that nanosecond."""
    found = False
    for event in range(1, heap[0, 0] + 1):
        found = found or heap[event, TIME] == time
    return found


@jitable
def plan(heap: Numbers, random: Numbers, time: int, what: int) -> Numbers:
    """Add an event, put off if its time is taken; returns the heap."""
    at = time
    tries = 0
    while is_taken(heap, at) and tries < PUT_OFF_TRIES:
        at = time + draw(random) % MICROSECOND
        tries += 1
    return push(heap, at, what)


@jitable
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
        forwards, backwards = counts[0, CHUNK_FORWARDS], counts[0, CHUNK_BACKWARDS]
        no_gradient = backwards >= counts[0, GRADIENTS]
        if stage[LISTED] == RECOMPUTE and no_gradient and forwards < num_microbatches:
            mail[EXPECTS] = 1
        code = FORWARD if mail[EXPECTS] else stage[LISTED]
        if code == FORWARD:
            ready = forwards < counts[0, ACTIVATIONS]
        else:
            ready = backwards < forwards and not no_gradient
        if not ready:
            code = NOTHING
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
    stages = make_stages(codes, runs)
    stages[:, RECOMPUTES] = 0  # else a forward could keep its tensors
    counts = make_counts(depth, 1, num_microbatches)
    mails = np.zeros((depth, OUTBOX), np.int64)
    heap, random = make_heap(16 * depth), make_random()
    heap = act(0, depth, stages[0], counts[0], mails[0], heap, random, 0, num_microbatches)
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
            code = stage[RUNNING]
            stage[RUNNING] = NOTHING
            stage[FINISH] = now
            note(code, stage, counts[p], runs[p], codes)
            mail[EXPECTS] = mail[EXPECTS] and code != FORWARD
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
        heap = act(p, depth, stage, counts[p], mail, heap, random, now, num_microbatches)
    return stages


def original_finish_s(
    schedule: Schedule, stages: Sequence[StageTimes], links: Sequence[Link]
) -> float:
    """Return when the published simulator has drained the pipeline."""
    works = [[s.forward_s, s.recompute_s, s.backward_s] for s in stages]
    sends = [link.latency_s + link.transfer_s for link in links]
    times = [
        np.rint(np.array(times_s) * (NANOSECONDS // MICROSECOND)).astype(np.int64) * MICROSECOND
        for times_s in (works, sends)
    ]
    rows: Numbers = jitted(play_original, schedule.num_tasks)(
        schedule.codes, schedule.runs, times[0], times[1], schedule.num_microbatches
    )
    return float(rows[:, FINISH].max()) / NANOSECONDS
