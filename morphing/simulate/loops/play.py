"""The mini-batch of one replica, event by event, as the runtime runs it."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from spottrain.morphing.schedules.compiled import jitable
from spottrain.morphing.schedules.rule import FORWARD, NOTHING, RECOMPUTE
from spottrain.morphing.schedules.stage import (
    ACTIVATIONS,
    BUSY,
    CHOSEN,
    CHUNK_BACKWARDS,
    CHUNK_FORWARDS,
    FINISH,
    GRADIENTS,
    QUEUED,
    QUEUED_NTH,
    QUEUED_TIME,
    RUNNING,
    RUNNING_NTH,
    UNTIL,
    choose,
    note,
)
from spottrain.morphing.schedules.types import Codes, Numbers
from spottrain.morphing.simulate.loops.heap import TIME, make_heap, pop, push
from spottrain.morphing.simulate.loops.steady_state import (
    equal,
    fast_forward,
    pending,
    remember,
    repetitions,
    same_links,
    same_state,
)

Wires: TypeAlias = tuple[Numbers, Numbers, Numbers]
"""Times of transfers and latencies by link, way (forward, backward) and micro-batch (or
one for all). And by link and way the two that carry its messages, such as the sending and
the receiving VM's NIC, or twice the same. A carrier takes a message at a time."""
Records: TypeAlias = tuple[Numbers, Numbers]
"""Tasks: stage, code, micro-batch, begin, end. Messages: sending stage, receiving stage,
way, micro-batch, begin of the transfer, arrival. One a row, from the second on."""
Room: TypeAlias = tuple[
    tuple[Numbers, Numbers, Numbers],
    tuple[Numbers, Numbers, Numbers],
    Numbers,
    Numbers,
    Numbers,
]
"""What a run changes: rows of ``stage``, those of chunks, and until when each carrier is
taken; the same at an earlier moment; what arrives last of each link and way; the events to
come; and of each stage when its task has begun, and to which something happened."""
TASK_FIELDS, MESSAGE_FIELDS = 5, 6
DONE = 2
"""Kinds of events: ``ACTIVATIONS`` or ``GRADIENTS`` for an arrival, or this."""
KINDS = 3
FIRST_CHECK = 16
"""Tasks of the slowest stage before the steady state is looked for; then at every
doubling a new moment is remembered (Brent's cycle detection)."""


@jitable
def start(
    order_policy: int,
    is_asynchronous: bool,
    stage: Numbers,
    counts: Numbers,
    durations: Numbers,
    runs: Numbers,
    codes: Codes,
    now: int,
) -> bool:
    """Let a stage choose and queue what it may; return whether a task has begun.

    One whose device computes by itself chooses as the executor does: a task as soon as the
    one before is queued, which is once the device has no more than one task left. Others
    choose when they have done the task before.
    """
    has_begun = False
    while True:
        if stage[RUNNING] == NOTHING and stage[QUEUED] != NOTHING:
            stage[RUNNING], stage[RUNNING_NTH] = stage[QUEUED], stage[QUEUED_NTH]
            stage[UNTIL] = now + stage[QUEUED_TIME]
            stage[BUSY] += stage[QUEUED_TIME]
            stage[QUEUED] = NOTHING
            has_begun = True
        if stage[CHOSEN] == NOTHING and (is_asynchronous or stage[RUNNING] == NOTHING):
            stage[CHOSEN] = choose(order_policy, stage, counts)
        code = stage[CHOSEN]
        if code == NOTHING or stage[QUEUED] != NOTHING:
            return has_begun
        nth = counts[code // 3][CHUNK_FORWARDS if code % 3 == FORWARD else CHUNK_BACKWARDS]
        stage[QUEUED], stage[QUEUED_NTH] = code, nth
        stage[QUEUED_TIME] = durations[code][nth % len(durations[code])]
        stage[CHOSEN] = NOTHING
        note(code, stage, counts, runs, codes)


@jitable
def send(
    p: int,
    code: int,
    microbatch: int,
    counts: Numbers,
    wires: Wires,
    traffic: tuple[Numbers, Numbers],
    messages: Numbers,
    heap: Numbers,
    now: int,
) -> Numbers:
    """Send what task ``code`` of stage ``p`` has made of a micro-batch; return the heap.

    It leaves when both its carriers are free, and arrives after all that was sent before;
    ``traffic`` says until when each carrier is taken, and what arrives last of each link
    and way. Where it is asked for, the message is recorded in ``messages``: see ``play``.

    The last stage's link leads on to the first, whose next chunk follows.
    """
    transfer, latency, carriers = wires
    free, latest = traffic
    depth, chunks = len(counts), len(counts[p])
    chunk, forward = code // 3, code % 3 == FORWARD
    link, to, to_chunk = p, p + 1, chunk
    if not forward:
        link, to = p - 1, p - 1
    if to == depth:
        to, to_chunk = 0, chunk + 1
    elif to < 0:
        link, to, to_chunk = depth - 1, depth - 1, chunk - 1
    if not 0 <= to_chunk < chunks:
        return heap
    way = ACTIVATIONS if forward else GRADIENTS
    times = transfer[link][way]
    nth = microbatch % len(times)
    out, into = carriers[link][way]
    sent = max(now, free[out], free[into]) + times[nth]
    free[out] = free[into] = sent
    arrives = max(latest[link][way], sent + latency[link][way][nth])
    latest[link][way] = arrives
    if len(messages) > 0:
        messages[0, 0] += 1
        row = messages[messages[0, 0]]
        row[0], row[1], row[2], row[3] = p, to, way, microbatch
        row[4], row[5] = sent - times[nth], arrives
    return push(heap, arrives, way + KINDS * (to + depth * to_chunk))


def make_room(stages: Numbers, counts: Numbers, carriers: Numbers) -> Room:
    """Return room to play in from the rows of stages and chunks that have done nothing yet."""
    depth, free = len(stages), np.zeros(carriers.max() + 1, np.int64)
    return (
        (stages, counts, free),
        (stages.copy(), counts.copy(), free.copy()),
        np.zeros((depth, 2), np.int64),
        make_heap(8 * depth),
        np.zeros((3, depth), np.int64),
    )


def play(
    codes: Codes,
    runs: Numbers,
    durations: Numbers,
    wires: Wires,
    order_policy: int,
    is_asynchronous: bool,
    watched: int,
    room: Room,
    records: Records,
) -> tuple[Numbers, int]:
    """Play the lists to their end; all times are in nanoseconds.

    All that happens at an instant is known before anything starts at it. Numbers are arrays,
    or lists, of which Python reads single numbers several times as fast.

    Args:
        codes: Patterns of all lists.
        runs: Of each stage: see ``stage``.
        durations: By stage, code and micro-batch (or one for all micro-batches).
        wires: Times and carriers of links.
        order_policy: ``OPPORTUNISTIC`` or ``STRICT``.
        is_asynchronous: Whether devices compute by themselves: see ``start``.
        watched: Stage after whose tasks the steady state is looked for and
            fast-forwarded, best the slowest; -1 to play every micro-batch, as is
            necessary where they differ.
        room: See ``make_room``.
        records: Empty arrays, or ones to be filled, of a row more than there are tasks and
            messages; their first number is how many there are.

    Returns:
        The rows of ``stage`` at the end, and how many instants were played.
    """
    (stages, counts, free), (then, then_counts, then_free), latest, heap, (touched, begun, news) = (
        room
    )
    depth, chunks = len(runs), len(counts[0])
    kinds = KINDS * depth * chunks
    now = instants = seen = 0
    save_at, then_at = FIRST_CHECK, -1
    then_pending = pending(heap, now, kinds)
    tasks, messages = records
    traffic, is_recorded = (free, latest), len(tasks) > 0
    # Stages to which something happened at this instant, each once, and how many.
    num_touched = depth
    for p in range(depth):
        touched[p] = p
    while True:
        for i in range(num_touched):
            p = touched[i]
            stage = stages[p]
            news[p] = 0
            if start(
                order_policy,
                is_asynchronous,
                stage,
                counts[p],
                durations[p],
                runs[p],
                codes,
                now,
            ):
                heap = push(heap, stage[UNTIL], DONE + KINDS * p)
                begun[p] = now
        num_touched = 0
        if heap[0][0] == 0:
            return stages, instants
        now = heap[1][TIME]
        instants += 1
        checks = False
        while heap[0][0] > 0 and heap[1][TIME] == now:
            what = pop(heap)
            to = what // KINDS
            p = to % depth
            if news[p] == 0:
                news[p] = 1
                touched[num_touched] = p
                num_touched += 1
            if what % KINDS != DONE:
                counts[p][to // depth][what % KINDS] += 1
                continue
            stage = stages[p]
            code, nth = stage[RUNNING], stage[RUNNING_NTH]
            stage[RUNNING] = NOTHING
            stage[FINISH] = now
            if is_recorded:
                tasks[0, 0] += 1
                row = tasks[tasks[0, 0]]
                row[0], row[1], row[2], row[3], row[4] = p, code, nth, begun[p], now
            if code % 3 != RECOMPUTE:
                heap = send(p, code, nth, counts, wires, traffic, messages, heap, now)
            checks = checks or p == watched
        if not checks:
            continue
        seen += 1
        if seen == save_at:
            save_at *= 2
            then_at = now
            remember(stages, counts, free, then, then_counts, then_free)
            then_pending = pending(heap, now, kinds)
        elif then_at >= 0 and same_state(then, then_at, stages, now):
            if not same_links(then_free, then_at, free, now):
                continue
            if not equal(then_pending, pending(heap, now, kinds)):
                continue
            times = repetitions(order_policy, then, then_counts, stages, counts, runs)
            if times > 0:
                fast_forward(times, then, then_counts, then_at, stages, counts, free, heap, now)
                now += times * (now - then_at)
                seen, save_at, then_at = 0, FIRST_CHECK, -1
