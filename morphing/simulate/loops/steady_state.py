"""Fast-forwards over a pipeline's steady state, which a long mini-batch repeats.

When everything that decides what happens next is the same as at an earlier moment, the
events between repeat. "Everything" is equal except for counts; a count that has changed
must stay clear of the bounds that it is compared with during all repetitions. So a
fast-forward ends in the state of the run without it, to the nanosecond.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spottrain.morphing.schedules.rule import BACKWARD, FORWARD, NOTHING, OPPORTUNISTIC
from spottrain.morphing.schedules.stage import (
    ACTIVATIONS,
    CHUNK_BACKWARDS,
    CHUNK_FORWARDS,
    GRADIENTS,
    Stage,
)

ENDLESS = 1 << 62
Event: TypeAlias = tuple[int, int, int, int]
"""When, what (see ``play.DONE``), and the stage and its chunk."""


@dataclass(slots=True)
class Counts:
    """What grows from repetition to repetition: see ``Stage``."""

    repeat: int
    done: list[int]
    passed: list[int]
    chunks: list[list[int]]
    busy: int


def counts_of(stages: Sequence[Stage]) -> list[Counts]:
    """Return a copy of the counts of all stages."""
    return [
        Counts(s.repeat, s.done[:], s.passed[:], [chunk[:] for chunk in s.chunks], s.busy)
        for s in stages
    ]


def state_of(
    stages: Sequence[Stage], free: Sequence[int], events: Sequence[Event], now: int
) -> Iterator[tuple[int, ...]]:
    """Yield what decides, besides counts, what happens next; times are from ``now`` on.

    Args:
        stages: All of them.
        free: Until when each carrier is taken.
        events: Those to come.
        now: The moment.
    """
    for s in stages:
        until = s.until - now if s.running != NOTHING else 0
        yield s.run, s.offset, s.listed, s.graph_kept, s.queued, s.chosen, s.running, until
    yield tuple([max(until - now, 0) for until in free])
    yield from sorted([(time - now, what, p, chunk) for time, what, p, chunk in events])


def same(state: Iterator[tuple[int, ...]], then: Sequence[tuple[int, ...]]) -> bool:
    """Return whether a state is one of an earlier moment; most differ in their first stage."""
    return all(a == b for a, b in itertools.zip_longest(state, then))


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


def repetitions(order_policy: int, then: Sequence[Counts], stages: Sequence[Stage]) -> int:
    """Return how often the events since ``then`` repeat, one more left to be played."""
    times = ENDLESS
    for a, b in zip(then, stages, strict=True):
        repeated = b.repeat - a.repeat
        if repeated > 0:
            left = b.runs[b.run][1] - 1 - b.repeat
            times = min(times, left // repeated - 1)
        a_flight, b_flight = a.done[FORWARD] - a.done[BACKWARD], b.in_flight
        times = min(times, clear(a_flight, b_flight, b.done[BACKWARD] - a.done[BACKWARD]))
        if order_policy == OPPORTUNISTIC:
            more = b.done[FORWARD] - a.done[FORWARD]
            times = min(times, clear(b.bound - a_flight, b.bound - b_flight, more))
        for work in range(3):
            fell = b.passed[work] - a.passed[work]
            ahead = clear(a.done[work] - a.passed[work], b.done[work] - b.passed[work], fell)
            times = min(times, ahead)
        for earlier, later in zip(a.chunks, b.chunks, strict=True):
            times = min(times, _chunk_clear(earlier, later))
    return times


def _chunk_clear(a: Sequence[int], b: Sequence[int]) -> int:
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


def fast_forward(
    times: int,
    then: Sequence[Counts],
    passed_time: int,
    stages: Sequence[Stage],
    free: list[int],
    events: list[Event],
    now: int,
) -> None:
    """Advance the state as if the events since ``then`` came ``times`` more times.

    Args:
        times: How often.
        then: The counts of an earlier moment.
        passed_time: Time since then.
        stages: All of them.
        free: Until when each carrier is taken.
        events: Those to come.
        now: The moment from which on they come.
    """
    later = times * passed_time
    for a, b in zip(then, stages, strict=True):
        if sum(b.done) > sum(a.done):
            b.finish += later
        b.until += later
        b.repeat += times * (b.repeat - a.repeat)
        b.busy += times * (b.busy - a.busy)
        pairs = [(a.done, b.done), (a.passed, b.passed), *zip(a.chunks, b.chunks, strict=True)]
        for before, counts in pairs:
            for k in range(len(counts)):
                counts[k] += times * (counts[k] - before[k])
    for carrier, until in enumerate(free):
        if until > now:
            free[carrier] = until + later
    events[:] = [(time + later, what, p, chunk) for time, what, p, chunk in events]
