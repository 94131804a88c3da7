"""Segments of a journal: their format, which of them count, and when they are merged.

A segment is a range of events in a file that is written once and never changed: what was
journalled since the one before, or now and then the whole journal, in place of all. Managers
of a job have increasing epochs and mark their segments with them. From the first event of
an epoch on, nothing of earlier epochs counts: those managers were fenced by then, even if
their last writes arrived late.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from spottrain.eventlog.journal import Row
from spottrain.varuna_manager.jobs.packed import PackedError, unpack

MAX_SEGMENTS = 64
"""So many make up a copy before they become one; of long journals more, so that all that is
written stays in proportion to what there is."""
EVENTS_PER_SEGMENT = 256
_NAME = re.compile(r"(\d{12})-(\d{12})-(\d{6})\.json\.gz")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A file with events ``first`` to ``last``, written by the manager of ``epoch``."""

    first: int
    last: int
    epoch: int

    @property
    def name(self) -> str:
        """Name of the file; names sort by the first event."""
        return f"{self.first:012d}-{self.last:012d}-{self.epoch:06d}.json.gz"


def segment_of(name: str) -> Segment | None:
    """Return the segment that a file name denotes; None for other files."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    first, last, epoch = map(int, match.groups())
    return Segment(first, last, epoch) if 1 <= first <= last else None


def unpacked(segment: Segment, data: bytes) -> list[Row]:
    """Return the events of a file.

    Raises:
        PackedError: Its contents do not match its name.
    """
    rows = unpack(Row, segment.name, data)
    if [row.seq for row in rows] != list(range(segment.first, segment.last + 1)):
        raise PackedError(f"{segment.name} is damaged: events are missing")
    return rows


def ends(segments: Iterable[Segment]) -> dict[int, int]:
    """Return for each epoch the number of the first event that no longer counts.

    That is where the first later epoch begins.
    """
    begins: dict[int, int] = {}
    for segment in segments:
        begins[segment.epoch] = min(segment.first, begins.get(segment.epoch, segment.first))
    found, end = {}, 1 << 62
    for epoch in sorted(begins, reverse=True):
        found[epoch] = end
        end = min(end, begins[epoch])
    return found


def chain(
    segments: Iterable[Segment], end_of: dict[int, int], at: int = 1
) -> Iterator[tuple[Segment, int]]:
    """Yield the segments to read, in order, with the last event that counts in each.

    Args:
        segments: All that are readable.
        end_of: From ``ends`` of all segments, including damaged ones.
        at: Number of the first event to return.

    It ends at the first gap.
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
    fetch: Callable[[Segment], list[Row]],
    say: Callable[[str], None],
    at: int = 1,
) -> Iterator[list[Row]]:
    """Yield the events that count, in order, up to the first gap.

    Args:
        segments: Those of all epochs.
        fetch: Returns the events of a segment or raises ``PackedError``.
        say: Called with a line about what is damaged or missing.
        at: Number of the first event to return.
    """
    left = set(segments)
    end_of = ends(left)
    begun = True
    while begun:
        begun = False
        for segment, last in chain(left, end_of, at):
            try:
                rows = fetch(segment)
            except PackedError as error:
                say(str(error))
                left.remove(segment)
                begun = True  # again from here: another segment may have the same events
                break
            yield rows[at - segment.first : last + 1 - segment.first]
            at = last + 1
    lost = [s.first for s in left if s.first > at and s.first < end_of[s.epoch]]
    if lost:
        say(f"events {at} to {min(lost) - 1} are missing; later events are ignored")


def covered(whole: Segment, segments: Iterable[Segment]) -> list[Segment]:
    """Return the segments in whose place ``whole`` was written."""
    return [
        one
        for one in segments
        if one != whole and one.last <= whole.last and one.epoch <= whole.epoch
    ]


def is_to_be_merged(held: Sequence[Segment]) -> bool:
    """Return whether so many segments make up a journal that one is to take their place."""
    return len(held) > MAX_SEGMENTS + held[-1].last // EVENTS_PER_SEGMENT
