from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spottrain.eventlog.journal import Row
from spottrain.varuna_manager.jobs import segments
from spottrain.varuna_manager.jobs.packed import PackedError, pack
from spottrain.varuna_manager.jobs.segments import (
    Segment,
    chain,
    covered,
    ends,
    is_to_be_merged,
    restore,
    segment_of,
    unpacked,
)


def rows_of(first: int, last: int, body: str = "{}") -> list[Row]:
    return [Row(seq, float(seq), "VmHeard", body, "{}") for seq in range(first, last + 1)]


def read(stored: dict[Segment, bytes], tell: Callable[[str], None] = lambda _: None) -> list[Row]:
    def fetch(segment: Segment) -> list[Row]:
        return unpacked(segment, stored[segment])

    return [row for rows in restore(stored, fetch, tell) for row in rows]


@given(
    first=st.integers(1, 10**11),
    count=st.integers(1, 5),
    epoch=st.integers(0, 999_999),
    body=st.text(),
)
def test_a_segment_is_what_its_name_and_its_bytes_say(
    first: int, count: int, epoch: int, body: str
) -> None:
    segment = Segment(first, first + count - 1, epoch)
    rows = rows_of(segment.first, segment.last, body)
    assert segment_of(segment.name) == segment
    assert unpacked(segment, pack(rows)) == rows


@pytest.mark.parametrize(
    "name", ["", "x.json.gz", Segment(5, 4, 1).name, Segment(1, 2, 1).name + "x"]
)
def test_other_files_are_no_segments(name: str) -> None:
    assert segment_of(name) is None


@given(cut=st.integers(0, 200), flip=st.integers(0, 200))
def test_a_segment_that_is_not_whole_is_refused(cut: int, flip: int) -> None:
    segment = Segment(1, 20, 1)
    data = pack(rows_of(1, 20))
    with pytest.raises(PackedError, match="is damaged"):
        unpacked(segment, data[: min(cut, len(data) - 1)])
    at = flip % len(data)
    try:
        rows = unpacked(segment, data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
    except PackedError:
        return
    assert rows == rows_of(1, 20)  # a bit of gzip's header that means nothing


def test_a_segment_under_another_name_is_refused() -> None:
    data = pack(rows_of(1, 2))
    with pytest.raises(PackedError, match="events are missing"):
        unpacked(Segment(1, 3, 1), data)


def test_a_newer_format_is_refused_with_what_to_do() -> None:
    data = gzip.compress(b'{"rows": [], "schema_version": 9}')
    with pytest.raises(PackedError, match="schema_version must be 1: got 9"):
        unpacked(Segment(1, 1, 1), data)


def test_what_is_damaged_is_named_and_what_is_whole_before_it_is_used() -> None:
    parts = [Segment(1, 3, 1), Segment(4, 6, 1), Segment(7, 9, 1)]
    stored = {one: pack(rows_of(one.first, one.last)) for one in parts}
    stored[parts[1]] = stored[parts[1]][:-3]
    told: list[str] = []
    assert read(stored, told.append) == rows_of(1, 3)
    assert parts[1].name in told[0]
    assert told[1] == "events 4 to 6 are missing; later events are ignored"


def test_pieces_stand_in_for_a_damaged_merged_one() -> None:
    parts = [Segment(1, 3, 1), Segment(4, 6, 1)]
    stored = {one: pack(rows_of(one.first, one.last)) for one in parts}
    stored[Segment(1, 6, 1)] = b"half"
    told: list[str] = []
    assert read(stored, told.append) == rows_of(1, 6)
    assert len(told) == 1


def test_where_a_later_manager_began_an_earlier_ones_events_do_not_count() -> None:
    stored = {
        one: pack(rows_of(one.first, one.last, body))
        for one, body in (
            (Segment(1, 4, 1), "old"),
            (Segment(5, 9, 1), "late"),
            (Segment(5, 6, 2), "new"),
        )
    }
    assert [row.body for row in read(stored)] == ["old"] * 4 + ["new"] * 2


@dataclass
class Manager:
    """What copies as ``JournalCopy`` does, one put or delete at a time."""

    epoch: int
    journal: list[Row]
    held: list[Segment]
    whole: Segment | None = None
    """Written in place of what it covers, which is still there."""

    @property
    def copied(self) -> int:
        return self.held[-1].last if self.held else 0


class Copies(RuleBasedStateMachine):
    """Managers that follow each other, die at any moment, and come back too late."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[Segment, bytes] = {}
        self.now = Manager(1, [], [])
        self.dead: list[Manager] = []
        self.acknowledged: list[Row] = []

    @rule(count=st.integers(1, 4))
    def happen(self, count: int) -> None:
        for manager in (self.now, *self.dead):
            first = len(manager.journal) + 1
            body = f"of {manager.epoch}"
            manager.journal += rows_of(first, first + count - 1, body)

    @rule()
    def copy(self) -> None:
        self._put(self.now)
        self.acknowledged = self.now.journal[: self.now.copied]

    @rule()
    def merge(self) -> None:
        self._merge(self.now)

    @rule()
    def delete(self) -> None:
        self._delete(self.now)

    @rule(late=st.data())
    def come_late(self, late: st.DataObject) -> None:
        if self.dead:
            manager = late.draw(st.sampled_from(self.dead))
            act = late.draw(st.sampled_from([self._put, self._merge, self._delete]))
            act(manager)

    @rule(same_journal=st.booleans())
    def start_again(self, same_journal: bool) -> None:
        """Here, with the journal of before, or elsewhere, with what the store has."""
        epoch = self.now.epoch + 1
        journal = list(self.now.journal)
        if not same_journal:
            self.dead.append(self.now)
            journal = read(self.stored)
            at = len(journal) + 1
            journal += rows_of(at, at, f"moved in {epoch}")
            moved = Segment(at, at, epoch)
            self.stored[moved] = pack(journal[-1:])
        held = [one for one, _ in chain(self.stored, ends(self.stored))]
        self.now = Manager(epoch, journal, held)
        self.acknowledged = journal[: self.now.copied]

    @invariant()
    def what_was_acknowledged_is_read_and_nothing_that_did_not_happen(self) -> None:
        found = read(self.stored)
        assert found == self.now.journal[: len(found)]
        assert found[: len(self.acknowledged)] == self.acknowledged

    def _put(self, manager: Manager) -> None:
        rows = manager.journal[manager.copied :]
        if rows:
            segment = Segment(rows[0].seq, rows[-1].seq, manager.epoch)
            self.stored[segment] = pack(rows)
            manager.held.append(segment)

    def _merge(self, manager: Manager) -> None:
        if manager.copied:
            whole = manager.whole = Segment(1, manager.copied, manager.epoch)
            self.stored[whole] = pack(manager.journal[: whole.last])
            manager.held = [whole]

    def _delete(self, manager: Manager) -> None:
        if manager.whole is not None:
            for segment in covered(manager.whole, self.stored):
                del self.stored[segment]


TestCopies = Copies.TestCase
TestCopies.settings = settings(stateful_step_count=40)


@given(counts=st.lists(st.integers(1, 30), max_size=2000))
def test_a_long_job_has_few_segments_and_writes_little_more_than_it_has(
    counts: list[int],
) -> None:
    held: list[Segment] = []
    written = 0
    for count in counts:
        first = held[-1].last + 1 if held else 1
        held.append(Segment(first, first + count - 1, 1))
        written += count
        if is_to_be_merged(held):
            held = [Segment(1, held[-1].last, 1)]
            written += held[0].last
    events = sum(counts)
    assert len(held) <= segments.MAX_SEGMENTS + events / segments.EVENTS_PER_SEGMENT
    assert written <= events * (1 + events / segments.MAX_SEGMENTS)
