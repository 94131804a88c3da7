"""The journal of what decides: all its events, in order, in one SQLite file.

An event is a fact; in the same row is what was decided because of it: the difference of the
states before and after it, so that one is never there without the other. State is a fold
over these differences. Readers decide nothing: they come to where the writer was, whatever
its code would decide today. One process writes; any number may read at the same time. An
event is durable when ``append`` returns.

A snapshot is a cache: it spares readers the rows before it, and can be left out.
"""

from __future__ import annotations

import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

from spottrain import database
from spottrain.codec import from_data, to_data
from spottrain.database import FormatError, Kind
from spottrain.errors import SpottrainError, WireError
from spottrain.eventlog.difference import apply, difference

_SCHEMA = """
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY,
        at_s REAL NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,
        decision TEXT NOT NULL
    ) STRICT;
    CREATE TABLE snapshots (
        seq INTEGER PRIMARY KEY,
        state TEXT NOT NULL,
        extra TEXT NOT NULL
    ) STRICT;
"""
_SELECT = "SELECT seq, at_s, kind, body, decision FROM events"
_PAGE = 1000
_END = 1 << 62


class JournalError(SpottrainError):
    """The journal is missing, damaged, or of another version of spottrain."""


class JournalWriteError(JournalError):
    """The disk refused an event; it may have room again later."""


class Timed(Protocol):
    """An event."""

    @property
    def at_s(self) -> float:
        """When it was learned of, in seconds since the epoch."""


S = TypeVar("S")
E = TypeVar("E", bound=Timed)
C = TypeVar("C")


class Step(NamedTuple, Generic[S, E, C]):
    """An event, and what followed from it."""

    before: S
    event: E
    after: S
    commands: tuple[C, ...] = ()
    """What was asked for; none if the step was read from a journal."""


class Row(NamedTuple):
    """An event as stored."""

    seq: int
    at_s: float
    kind: str
    body: str
    decision: str
    """JSON: ``changes``, see ``difference``, and what was ``asked`` for."""

    def parts(self) -> dict[str, Any]:
        """Return what was decided.

        Raises:
            JournalError: It is damaged.
        """
        try:
            parts: dict[str, Any] = json.loads(self.decision)
        except (ValueError, RecursionError) as error:
            raise JournalError(f"event {self.seq}: its decision is damaged: {error}") from error
        return parts


class Snapshot(NamedTuple, Generic[S]):
    """What readers need not fold again."""

    seq: int
    """The newest event in it."""
    state: S
    extra: str
    """As the one who saved it wrote it."""


class Journal(ABC, Generic[S, E, C]):
    """The events of one log; a class of them says what they are.

    Args:
        path: The SQLite file.
        read_only: Only read, while another process may write; the file must exist.

    Raises:
        JournalError: The file cannot be opened, is damaged or of another format.
    """

    KIND: ClassVar[Kind]
    STATE: ClassVar[type[Any]]
    EVENTS: ClassVar[Mapping[str, type[Any]]]
    """By the names of their classes."""
    REMEDY: ClassVar[str]
    """What to do about one that is damaged."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        with translating_errors(path, self.REMEDY):
            self._db = database.connect(path, self.KIND, _SCHEMA, read_only=read_only)

    @staticmethod
    @abstractmethod
    def step(state: S, event: E) -> tuple[S, Sequence[C]]:
        """Decide on an event: the state after it, and what is asked for."""

    @classmethod
    def step_alone(cls, state: S, event: E) -> tuple[S, Sequence[C]]:
        """Decide on an event while nothing runs that would perform commands."""
        return cls.step(state, event)

    @classmethod
    def asked(cls, commands: Sequence[C]) -> list[list[str]]:
        """Return what a row says of the commands that followed from its event."""
        return []

    # --- Writing --------------------------------------------------------------------------

    def append(self, *steps: Step[S, E, C]) -> int:
        """Add events and what was decided, all or none; return the number of the last
        event in the journal.

        Args:
            steps: In order, each from the state that the one before it led to.

        Raises:
            JournalWriteError: The disk refused; nothing was added.
            JournalError: The file is damaged.
        """
        rows = [self._row_of(step) for step in steps]
        with self._transaction():
            self._db.executemany(
                "INSERT INTO events (at_s, kind, body, decision) VALUES (?, ?, ?, ?)",
                rows,
            )
            return self.last_seq()

    def _row_of(self, step: Step[S, E, C]) -> tuple[float, str, str, str]:
        what: dict[str, Any] = {}
        if (changes := difference(step.before, step.after)) is not None:
            what["changes"] = changes
        if asked := self.asked(step.commands):
            what["asked"] = asked
        # Lone surrogates, as in undecodable file names, cannot be encoded.
        body = json.dumps(to_data(step.event), separators=(",", ":"), ensure_ascii=False)
        return (
            step.event.at_s,
            type(step.event).__name__,
            body.encode("utf-8", "replace").decode(),
            json.dumps(what, separators=(",", ":")),
        )

    def record(self, *events: E) -> S:
        """Decide on events and add them, all or none; return the state that they lead to.

        For commands, while nothing runs that decides. What is to be done because of the
        events is left to whoever goes on from here, and compares the state with the world.

        Raises:
            JournalError: The disk refuses, or the file is damaged.
        """
        state, steps = self.replay(), list[Step[S, E, C]]()
        for event in events:
            after, _ = self.step_alone(state, event)
            steps.append(Step(state, event, after))
            state = after
        self.append(*steps)
        return state

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Add events as another journal has them, with their numbers, all or none.

        Raises:
            JournalError: The disk refused, or a number is taken.
        """
        with self._transaction():
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)

    def save_snapshot(self, seq: int, state: S, extra: str = "") -> None:
        """Spare readers the events up to ``seq``.

        Args:
            seq: An event that is in the journal.
            state: The state after it.
            extra: What else its readers need, in their own form.

        Raises:
            JournalWriteError: The disk refused; the snapshot before is still there.
        """
        text = json.dumps(to_data(state), separators=(",", ":"))
        with self._transaction():
            self._db.execute("DELETE FROM snapshots")
            self._db.execute("INSERT INTO snapshots VALUES (?, ?, ?)", (seq, text, extra))

    # --- Reading --------------------------------------------------------------------------

    def last_seq(self) -> int:
        """Return the number of the newest event; 0 if there is none.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            last = self._db.execute("SELECT max(seq) FROM events").fetchone()[0]
            return int(last or 0)

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, E]]:
        """Yield (number, event) of every event numbered above ``after_seq``.

        Events that arrive while reading are yielded too. Numbers count from 1.

        Raises:
            JournalError: The file is damaged.
        """
        for row in self.rows_after(after_seq):
            yield row.seq, self.event_of(row)

    def steps(
        self, after_seq: int = 0, state: S | None = None
    ) -> Iterator[tuple[int, Step[S, E, C]]]:
        """Yield (number, step) of every event numbered above ``after_seq``.

        Args:
            after_seq: See ``read``.
            state: The state after that event, if it is known.

        Raises:
            JournalError: The file is damaged.
        """
        before = self.replay(after_seq) if state is None else state
        for row in self.rows_after(after_seq):
            after = self._after(before, row)
            yield row.seq, Step(before, self.event_of(row), after)
            before = after

    def replay(self, last: int = _END) -> S:
        """Return the state that the events up to ``last`` lead to.

        Raises:
            JournalError: The file is damaged.
        """
        known = self.snapshot(last)
        seq, state = (known.seq, known.state) if known else (0, cast(S, self.STATE()))
        while rows := self.rows(seq + 1, last, _PAGE):
            for row in rows:
                state = self._after(state, row)
            seq = rows[-1].seq
        return state

    def rows_after(self, seq: int) -> Iterator[Row]:
        """Yield the events numbered above ``seq``, also those that arrive meanwhile."""
        # Pages, since an open cursor would keep the writer from checkpointing.
        while rows := self.rows(seq + 1, _END, _PAGE):
            yield from rows
            seq = rows[-1].seq

    def rows(self, first: int, last: int, limit: int = -1) -> list[Row]:
        """Return the events numbered ``first`` to ``last`` as stored.

        Args:
            first: Number of the first one.
            last: Number of the last one.
            limit: No more than so many; negative: all.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            found = self._db.execute(
                f"{_SELECT} WHERE seq BETWEEN ? AND ? ORDER BY seq LIMIT ?",
                (first, last, limit),
            )
            return [Row(*row) for row in found]

    def search(self, text: str, *, before: int = _END, in_event: bool = False) -> Iterator[Row]:
        """Yield the events whose decision contains a text, the newest first.

        Args:
            text: As in the stored form, such as ``"outcome":``.
            before: Only events with lower numbers.
            in_event: Look into the events themselves instead.

        Raises:
            JournalError: The file is damaged.
        """
        column = "body" if in_event else "decision"
        while True:
            with self._translating_errors():
                found = self._db.execute(
                    f"{_SELECT} WHERE seq < ? AND instr({column}, ?) > 0 ORDER BY seq DESC LIMIT 1",
                    (before, text),
                ).fetchone()
            if found is None:
                return
            row = Row(*found)
            yield row
            before = row.seq

    def snapshot(self, last: int = _END) -> Snapshot[S] | None:
        """Return the newest snapshot up to event ``last``, if there is one for this
        version.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            found = self._db.execute(
                "SELECT seq, state, extra FROM snapshots WHERE seq <= ?", (last,)
            ).fetchone()
        if found is None:
            return None
        seq, text, extra = found
        try:
            return Snapshot(seq, from_data(self.STATE, json.loads(text)), extra)
        except (WireError, ValueError, RecursionError):
            return None  # it is damaged, or another version's; the rows say the same

    @classmethod
    def decoded(cls, row: Row) -> E:
        """Return an event from its stored form.

        Raises:
            JournalError: It is not an event.
        """
        try:
            event: E = from_data(cls.EVENTS[row.kind], json.loads(row.body))
        except (WireError, KeyError, ValueError, RecursionError) as error:
            raise JournalError(
                f"event {row.seq} is not a valid {row.kind} ({error}); it is damaged or was "
                "written by another version: use the version that wrote it"
            ) from error
        return event

    def event_of(self, row: Row) -> E:
        """Return an event of this journal.

        Raises:
            JournalError: It is not an event.
        """
        try:
            return self.decoded(row)
        except JournalError as error:
            raise JournalError(f"{self._path}: {error}") from error

    def _after(self, before: S, row: Row) -> S:
        """Return the state that an event led to.

        Raises:
            JournalError: It does not say so.
        """
        try:
            return apply(before, row.parts().get("changes"))
        except (WireError, JournalError, AttributeError, RecursionError) as error:
            raise JournalError(
                f"{self._path}: event {row.seq}: what was decided cannot be used ({error}): "
                "it is damaged, or another version wrote it: use the version that wrote it"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """What is written within the block is written all or none."""
        with self._translating_errors(), database.transaction(self._db):
            yield

    def _translating_errors(self) -> AbstractContextManager[None]:
        return translating_errors(self._path, self.REMEDY)


@contextmanager
def translating_errors(path: Path, remedy: str, what: str = "journal") -> Iterator[None]:
    """Translate SQLite's errors into one line with what to do.

    Args:
        remedy: What to do about one that is damaged.
        what: What the file holds.
    """
    try:
        yield
    except FormatError as error:
        raise JournalError(str(error)) from error
    except sqlite3.OperationalError as error:
        raise JournalWriteError(
            f"{path}: cannot use the {what}: {error}; see that its disk has room and its folder "
            "can be written"
        ) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise JournalError(f"{path}: {what} is damaged: {error}; {remedy}") from error
