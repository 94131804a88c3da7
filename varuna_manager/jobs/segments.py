"""A journal in pieces: what segments hold, which of them count, and when they are merged.

A segment is a run of events in a file that is written whole and never changed. Managers
of one job follow each other; each has an epoch, a number that grows, and marks its
segments with it. Where a manager began, nothing counts that an earlier one wrote from
there on: it was dead to the others by then, even if its last write came late.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from spottrain.errors import SpottrainError
from spottrain.varuna_manager.jobs.journal import JournalRow

SCHEMA_VERSION = 1
FANOUT = 32
"""Segments of one level that become one of the next."""
TOP_LEVEL = 2
"""Segments of this level stay as they are."""
_NAME = re.compile(r"(\d{12})-(\d{12})-(\d{6})-(\d)\.jsonl\.gz")


class SegmentError(SpottrainError):
    """A segment is damaged."""


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One file: events ``first`` to ``last``, as the manager of ``epoch`` wrote them."""

    first: int
    last: int
    epoch: int
    level: int = 0
    """How often its events have been merged."""

    @property
    def name(self) -> str:
        """The name of the file; sorts by the first event."""
        return (
            f"{self.first:012d}-{self.last:012d}-{self.epoch:06d}-{self.level}.jsonl.gz"
        )


def segment_of(name: str) -> Segment | None:
    """Return the segment that a file is by its name; None for any other file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    first, last, epoch, level = map(int, match.groups())
    return Segment(first, last, epoch, level) if 1 <= first <= last else None


def pack(segment: Segment, rows: Sequence[JournalRow]) -> bytes:
    """Return what the file of ``segment`` holds: JSON lines, compressed, with a sum.

    Args:
        segment: Its events are those of ``rows``.
        rows: In order.
    """
    head = {"schema_version": SCHEMA_VERSION, "first": segment.first}
    lines = [json.dumps(head | {"last": segment.last})]
    lines += [json.dumps(row) for row in rows]
    return gzip.compress("\n".join(lines).encode(), compresslevel=6, mtime=0)


def unpack(segment: Segment, data: bytes) -> list[JournalRow]:
    """Return the events of a file.

    Raises:
        SegmentError: It does not hold what its name says.
    """
    try:
        head, *lines = gzip.decompress(data).decode().split("\n")
        version = json.loads(head)["schema_version"]
        rows = [JournalRow(*json.loads(line)) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
        raise SegmentError(f"{segment.name} is damaged: {error}") from error
    if version != SCHEMA_VERSION:
        raise SegmentError(
            f"{segment.name} has version {version}, this spottrain knows "
            f"{SCHEMA_VERSION}: use the version that launched the job"
        )
    if [row.seq for row in rows] != list(range(segment.first, segment.last + 1)):
        raise SegmentError(f"{segment.name} is damaged: events are missing")
    return rows


def ends(segments: Iterable[Segment]) -> dict[int, int]:
    """Return for each epoch the number before which its events count.

    That is where the earliest later epoch began.
    """
    begins: dict[int, int] = {}
    for segment in segments:
        begins[segment.epoch] = min(
            segment.first, begins.get(segment.epoch, segment.first)
        )
    found, end = {}, 1 << 62
    for epoch in sorted(begins, reverse=True):
        found[epoch] = end
        end = min(end, begins[epoch])
    return found


def chain(
    segments: Iterable[Segment], end_of: dict[int, int], at: int = 1
) -> Iterator[tuple[Segment, int]]:
    """Yield what to read, in order: segments, and the last event that counts in each.

    Args:
        segments: What there is.
        end_of: From ``ends``; of all segments, also of damaged ones.
        at: The first event wanted.

    It ends where no segment goes on.
    """
    ordered = sorted(segments, reverse=True)
    fitting: list[tuple[int, int, Segment]] = []
    while True:
        while ordered and ordered[-1].first <= at:
            one = ordered.pop()
            fitting.append((min(one.last, end_of[one.epoch] - 1), one.epoch, one))
        fitting = [fit for fit in fitting if fit[0] >= at]
        if not fitting:
            return
        last, _, segment = max(fitting)
        yield segment, last
        at = last + 1


def restore(
    segments: Iterable[Segment],
    fetch: Callable[[Segment], list[JournalRow]],
    say: Callable[[str], None],
    at: int = 1,
) -> Iterator[list[JournalRow]]:
    """Yield the events that count, in order, from the first to the last that is whole.

    Args:
        segments: What there is, of all epochs.
        fetch: Returns the events of one, or raises ``SegmentError``.
        say: Told in one line what is damaged or missing.
        at: The first event wanted.
    """
    left = set(segments)
    end_of = ends(left)
    begun = True
    while begun:
        begun = False
        for segment, last in chain(left, end_of, at):
            try:
                rows = fetch(segment)
            except SegmentError as error:
                say(str(error))
                left.remove(segment)
                begun = True  # again from here: another one may hold the same events
                break
            yield rows[at - segment.first : last + 1 - segment.first]
            at = last + 1
    lost = [s.first for s in left if s.first > at and s.first < end_of[s.epoch]]
    if lost:
        say(f"events {at} to {min(lost) - 1} are missing: what follows is not used")


def to_merge(held: Sequence[Segment]) -> Sequence[Segment]:
    """Return the newest segments that are to become one now; none is most usual."""
    tail = held[-FANOUT:]
    level = tail[-1].level if tail else TOP_LEVEL
    due = len(tail) == FANOUT and level < TOP_LEVEL
    return tail if due and all(one.level == level for one in tail) else ()


def merged(parts: Sequence[Segment], epoch: int) -> Segment:
    """Return the segment that takes the place of ``parts``, which follow each other."""
    return Segment(parts[0].first, parts[-1].last, epoch, parts[-1].level + 1)
