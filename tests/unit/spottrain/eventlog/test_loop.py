"""A loop that sums numbers: what is journalled, performed and answered, and in which order."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.database import Kind
from spottrain.eventlog import loop as loops
from spottrain.eventlog.journal import Journal, JournalError, Step
from spottrain.eventlog.loop import Loop


@dataclass(frozen=True)
class Sum:
    total: int = 0


@dataclass(frozen=True)
class Added:
    number: int
    at_s: float = 0.0


class Sums(Journal[Sum, Added, str]):
    KIND, STATE, EVENTS, REMEDY = Kind.POOL, Sum, {"Added": Added}, "add again"

    @staticmethod
    def step(state: Sum, event: Added) -> tuple[Sum, Sequence[str]]:
        after = Sum(state.total + event.number)
        return after, (f"say {after.total}",) if event.number else ()


class Adder(Loop[Sum, Added, str]):
    """Says each total, ends when it is told to, and doubles what comes in pairs."""

    def __init__(self, journal: Sums, log: list[Any]) -> None:
        super().__init__(journal, journal.replay())
        self.log = log

    def _events_of(self, item: Any) -> Iterator[Added]:
        if isinstance(item, tuple):
            yield item[0]
            yield Added(self._ahead.total)
        else:
            yield item

    def pair(self, item: tuple[Added]) -> Awaitable[Any]:
        return self._put(item)

    def _append(self, steps: Sequence[Step[Sum, Added, str]]) -> None:
        super()._append(steps)
        self.log.append(("journalled", len(steps)))

    def _perform(self, command: str) -> None:
        self.log.append(command)

    def end(self, outcome: object) -> None:
        self._end(outcome)

    def begin(self, work: Any) -> None:
        self._start(work)


@dataclass
class Served:
    path: Path
    log: list[Any] = field(default_factory=list)

    def run(self, story: Callable[[Adder], Awaitable[None]]) -> Any:
        async def run() -> Any:
            with closing(Sums(self.path)) as journal:
                adder = Adder(journal, self.log)

                async def tell() -> None:
                    await story(adder)
                    adder.end("over")

                adder.begin(tell())
                return await adder.take_events()

        return asyncio.run(run())

    def journalled(self) -> list[int]:
        with closing(Sums(self.path, read_only=True)) as journal:
            return [event.number for _, event in journal.read()]

    def state(self) -> Sum:
        with closing(Sums(self.path, read_only=True)) as journal:
            return journal.replay()


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path / "journal.sqlite")


def test_who_fed_an_event_gets_its_commands_once_it_is_journalled(served: Served) -> None:
    async def story(adder: Adder) -> None:
        assert await adder.feed(Added(2)) == ["say 2"]
        assert served.journalled() == [2]
        assert adder.state == Sum(2)
        assert await adder.feed(Added(0)) == []

    assert served.run(story) == "over"


@given(batches=st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=6))
def test_what_waits_is_journalled_at_once_and_only_then_performed(
    batches: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    served = Served(tmp_path_factory.mktemp("loop") / "journal.sqlite")

    async def story(adder: Adder) -> None:
        for batch in batches:
            await asyncio.gather(*[adder.feed(Added(number)) for number in batch])

    served.run(story)
    totals = iter(itertools.accumulate(itertools.chain.from_iterable(batches)))
    expected: list[Any] = []
    for batch in filter(None, batches):
        expected.append(("journalled", len(batch)))
        expected += [f"say {total}" for total in [next(totals) for _ in batch]]
    assert served.log == expected
    assert served.state() == Sum(sum(map(sum, batches)))


def test_an_item_may_become_events_each_made_on_the_state_before_it(served: Served) -> None:
    async def story(adder: Adder) -> None:
        first, second = adder.feed(Added(1)), adder.pair((Added(2),))
        assert await first == ["say 1"]
        assert await second == ["say 3", "say 6"]

    served.run(story)
    assert served.journalled() == [1, 2, 3]


def test_who_went_away_does_not_keep_others_waiting(served: Served) -> None:
    async def story(adder: Adder) -> None:
        adder.feed(Added(1)).cancel()
        assert await adder.feed(Added(1)) == ["say 2"]

    served.run(story)


def test_a_task_that_fails_ends_the_loop_with_its_error(served: Served) -> None:
    async def story(adder: Adder) -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        served.run(story)


def test_nothing_is_performed_after_the_end(served: Served) -> None:
    async def story(adder: Adder) -> None:
        waiting = adder.feed(Added(1))
        adder.end("at once")
        await waiting

    assert served.run(story) == "at once"
    assert "say 1" not in served.log


def test_who_goes_on_begins_where_the_last_one_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "SNAPSHOT_EVENTS", 2)

    async def story(adder: Adder) -> None:
        for number in range(5):
            await adder.feed(Added(number))

    for total in (10, 20):
        served.run(story)
        assert served.state() == Sum(total)
    with closing(Sums(served.path, read_only=True)) as journal:
        known = journal.snapshot()
    assert known is not None
    assert known.seq == 10


class Busy:
    """Holds the journal, as a full disk would, until ``free``."""

    def __init__(self, path: Path) -> None:
        self._other = sqlite3.connect(path, isolation_level=None)
        self._other.execute("BEGIN IMMEDIATE")

    def free(self) -> None:
        self._other.execute("ROLLBACK")
        self._other.close()


class AtFirstLine(logging.Handler):
    """Does something when the first line is logged."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._left = [act]

    def emit(self, record: logging.LogRecord) -> None:
        for act in self._left:
            act()
        self._left = []


def test_a_journal_that_cannot_be_written_for_a_moment_is_written_again(served: Served) -> None:
    async def story(adder: Adder) -> None:
        busy = Busy(served.path)

        def free() -> None:
            served.log.append("tried")
            busy.free()

        tried = AtFirstLine(free)
        loops.logger.addHandler(tried)
        try:
            assert await adder.feed(Added(1)) == ["say 1"]
        finally:
            loops.logger.removeHandler(tried)

    served.run(story)
    assert served.log == ["tried", ("journalled", 1), "say 1"]


def test_a_journal_that_stays_so_ends_the_loop_and_nothing_is_performed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "JOURNAL_WAIT_S", 0.0)
    held: list[Busy] = []

    async def story(adder: Adder) -> None:
        held.append(Busy(served.path))
        await adder.feed(Added(1))

    with pytest.raises(JournalError, match="has room") as raised:
        served.run(story)
    assert "add again" not in str(raised.value), "a full disk is no damage"
    assert served.log == []
    held[0].free()
    assert served.journalled() == []
