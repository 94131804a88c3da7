"""Fast-forwards over a pipeline's steady state, which a long mini-batch repeats.

When everything that decides what happens next is the same as at an earlier moment, the
events between repeat. "Everything" is equal except for counts; a count that has changed
must stay clear of the bounds that it is compared with during all repetitions. So a
fast-forward ends in the state of the run without it, to the nanosecond.
"""

from __future__ import annotations

import numpy as np

from spottrain.morphing.schedules.compiled import jitable
from spottrain.morphing.schedules.rule import NOTHING, OPPORTUNISTIC
from spottrain.morphing.schedules.stage import (
    ACTIVATIONS,
    BACKWARDS,
    BOUND,
    BUSY,
    CHOSEN,
    CHUNK_BACKWARDS,
    CHUNK_FORWARDS,
    COUNTS,
    FIELDS,
    FINISH,
    FORWARDS,
    GRADIENTS,
    GRAPH_KEPT,
    LISTED,
    OFFSET,
    PASSED,
    QUEUED,
    RECOMPUTED,
    REPEAT,
    REPEATS,
    RUN,
    RUNNING,
    UNTIL,
)
from spottrain.morphing.schedules.types import Numbers
from spottrain.morphing.simulate.loops.heap import TIME, WHAT, make_heap, pop, push

ENDLESS = 1 << 62


@jitable
def pending(heap: Numbers, now: int, kinds: int) -> Numbers:
    """Return the pending events and the time until each, in order."""
    ordered = make_heap(heap[0][0])
    for event in range(1, heap[0][0] + 1):
        key = (heap[event][TIME] - now) * kinds + heap[event][WHAT]
        ordered = push(ordered, key, 0)
    times = np.zeros(heap[0][0], np.int64)
    for event in range(len(times)):
        times[event] = ordered[1][TIME]
        pop(ordered)
    return times


@jitable
def remember(
    stages: Numbers,
    counts: Numbers,
    free: Numbers,
    then: Numbers,
    then_counts: Numbers,
    then_free: Numbers,
) -> None:
    """Copy the state of stages, chunks and carriers."""
    for p in range(len(stages)):
        for field in range(FIELDS):
            then[p][field] = stages[p][field]
        for chunk in range(len(counts[p])):
            for count in range(COUNTS):
                then_counts[p][chunk][count] = counts[p][chunk][count]
    for carrier in range(len(free)):
        then_free[carrier] = free[carrier]


@jitable
def equal(a: Numbers, b: Numbers) -> bool:
    """Return whether the numbers are the same."""
    same = len(a) == len(b)
    for i in range(len(a) if same else 0):
        same = same and a[i] == b[i]
    return same


@jitable
def same_state(then: Numbers, then_at: int, stages: Numbers, now: int) -> bool:
    """Return whether all stages are at the same place in the same work."""
    for p in range(len(stages)):
        a, b = then[p], stages[p]
        if a[OFFSET] != b[OFFSET] or a[RUN] != b[RUN] or a[RUNNING] != b[RUNNING]:
            return False
        if a[LISTED] != b[LISTED] or a[GRAPH_KEPT] != b[GRAPH_KEPT]:
            return False
        if a[QUEUED] != b[QUEUED] or a[CHOSEN] != b[CHOSEN]:
            return False
        if a[RUNNING] != NOTHING and a[UNTIL] - then_at != b[UNTIL] - now:
            return False
    return True


@jitable
def same_links(then: Numbers, then_at: int, free: Numbers, now: int) -> bool:
    """Return whether the carriers are busy for as long as they were."""
    for carrier in range(len(free)):
        if max(then[carrier] - then_at, 0) != max(free[carrier] - now, 0):
            return False
    return True


@jitable
def clear(before: int, after: int, falls: int) -> int:
    """Return how often a difference may change as it did and stay above 0 throughout.

    It falls by at most ``falls`` within one repetition.
    """
    change = after - before
    if change == 0:
        return ENDLESS
    if min(before, after) <= falls:
        return 0
    return ENDLESS if change > 0 else (after - falls - 1) // -change


@jitable
def repetitions(
    order_policy: int,
    then: Numbers,
    then_counts: Numbers,
    stages: Numbers,
    counts: Numbers,
    runs: Numbers,
) -> int:
    """Return how often the events since ``then`` repeat, one more left to be played."""
    times = ENDLESS
    for p in range(len(stages)):
        a, b = then[p], stages[p]
        repeated = b[REPEAT] - a[REPEAT]
        if repeated > 0:
            left = runs[p][b[RUN]][REPEATS] - 1 - b[REPEAT]
            times = min(times, left // repeated - 1)
        a_flight, b_flight = a[FORWARDS] - a[BACKWARDS], b[FORWARDS] - b[BACKWARDS]
        times = min(times, clear(a_flight, b_flight, b[BACKWARDS] - a[BACKWARDS]))
        if order_policy == OPPORTUNISTIC:
            more = b[FORWARDS] - a[FORWARDS]
            room = clear(a[BOUND] - a_flight, b[BOUND] - b_flight, more)
            times = min(times, room)
        for work in range(3):
            done, passed = FORWARDS + work, PASSED + work
            fell = b[passed] - a[passed]
            ahead = clear(a[done] - a[passed], b[done] - b[passed], fell)
            times = min(times, ahead)
        for chunk in range(len(counts[p])):
            times = min(times, _chunk_clear(then_counts[p][chunk], counts[p][chunk]))
    return times


@jitable
def _chunk_clear(a: Numbers, b: Numbers) -> int:
    forwards = b[CHUNK_FORWARDS] - a[CHUNK_FORWARDS]
    backwards = b[CHUNK_BACKWARDS] - a[CHUNK_BACKWARDS]
    times = clear(a[ACTIVATIONS] - a[CHUNK_FORWARDS], b[ACTIVATIONS] - b[CHUNK_FORWARDS], forwards)
    waiting = clear(a[GRADIENTS] - a[CHUNK_BACKWARDS], b[GRADIENTS] - b[CHUNK_BACKWARDS], backwards)
    in_flight = clear(
        a[CHUNK_FORWARDS] - a[CHUNK_BACKWARDS],
        b[CHUNK_FORWARDS] - b[CHUNK_BACKWARDS],
        backwards,
    )
    return min(times, waiting, in_flight)


@jitable
def fast_forward(
    times: int,
    then: Numbers,
    then_counts: Numbers,
    then_at: int,
    stages: Numbers,
    counts: Numbers,
    free: Numbers,
    heap: Numbers,
    now: int,
) -> None:
    """Advance the state as if the events since ``then`` came ``times`` more times."""
    later = times * (now - then_at)
    for p in range(len(stages)):
        a, b = then[p], stages[p]
        if b[FORWARDS] + b[BACKWARDS] > a[FORWARDS] + a[BACKWARDS]:
            b[FINISH] += later
        b[UNTIL] += later
        for field in (REPEAT, FORWARDS, RECOMPUTED, BACKWARDS, BUSY):
            b[field] += times * (b[field] - a[field])
        for work in range(3):
            b[PASSED + work] += times * (b[PASSED + work] - a[PASSED + work])
        for chunk in range(len(counts[p])):
            for count in range(COUNTS):
                more = counts[p][chunk][count] - then_counts[p][chunk][count]
                counts[p][chunk][count] += times * more
    for carrier in range(len(free)):
        if free[carrier] > now:
            free[carrier] += later
    for event in range(1, heap[0][0] + 1):
        heap[event][TIME] += later
