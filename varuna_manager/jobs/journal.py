"""The journal of a job: all its events, in order, in one SQLite file.

An event is a fact; in the same row is what was decided because of it (``replay.fold``), so
that one is never there without the other. State is a fold over these decisions. One process
writes (it holds the job's manager.lock); any number may read at the same time. An event is
durable when ``append`` returns.

Snapshots are a cache: they spare readers the rows before them, and can be left out. The
measurements of the job lie in the same file (``measurements``).

A journal that was taken over from a bucket may begin with a snapshot: the rows before it
are ``Absent`` until the next manager has filled them in. Nothing that needs them is
answered by guessing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from spottrain import database
from spottrain.database import FormatError, Kind
from spottrain.errors import SpottrainError
from spottrain.varuna_manager.core.model.events import (
    EVENT_TYPES,
    Event,
    ReportReceived,
)
from spottrain.varuna_manager.core.model.recent import (
    KEPT_EVENTS,
    RecentEvent,
    with_event,
)
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs import measurements
from spottrain.varuna_manager.jobs.measurements import (
    Measurements,
    Minibatch,
    Sample,
)
from spottrain.varuna_manager.jobs.replay.fold import (
    BASE,
    DecisionError,
    Fold,
    Step,
    news_of,
    snapshot_of,
)
from spottrain.varuna_manager.jobs.samples import Sampler, told_by

_IS_BASE = f"substr(decision, 1, {len(BASE)}) = '{BASE}'"
"""Of decisions that say the whole state."""
_SCHEMA = f"""
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY,
        at_s REAL NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL,
        decision TEXT
    ) STRICT;
    CREATE INDEX bases ON events (seq) WHERE {_IS_BASE};
    CREATE TABLE snapshots (
        seq INTEGER PRIMARY KEY,
        state TEXT NOT NULL,
        history TEXT NOT NULL
    ) STRICT;
    CREATE TABLE absent (
        first INTEGER NOT NULL,
        last INTEGER NOT NULL,
        steps INTEGER NOT NULL
    ) STRICT;
    {measurements.SCHEMA}
"""
_SELECT = "SELECT seq, at_s, kind, body, decision FROM events"
_PAGE = 1000
_BUSY_S = 1.0
_END = 1 << 62


class JournalError(SpottrainError):
    """The journal is missing, damaged, or of another version of spottrain."""


class JournalWriteError(JournalError):
    """The disk refused an event; it may have room again later."""


class JournalRow(NamedTuple):
    """An event as stored."""

    seq: int
    at_s: float
    kind: str
    body: str
    decision: str | None = None
    """What was decided because of it; None: nothing was yet."""


class Snapshot(NamedTuple):
    """What readers need not fold again."""

    seq: int
    """The newest event in it."""
    state: State
    history: str
    """As the one who saved it wrote it."""


class StoredSnapshot(NamedTuple):
    """A snapshot as it is kept."""

    seq: int
    state: str
    history: str


class Absent(NamedTuple):
    """What a journal lacks that its copy has."""

    first: int
    """Number of the first event that is not here; above ``last``: all are."""
    last: int
    steps: int
    """Mini-batches up to this one are not here, unless it is 0."""

    def text(self) -> str:
        """Return it in words."""
        parts = []
        if self.first <= self.last:
            parts.append(f"events {self.first} to {self.last}")
        if self.steps:
            parts.append(f"measurements of the first {self.steps} mini-batches")
        return f"{' and '.join(parts)} are still in the job's bucket"


class Journal:
    """The events of one job.

    Args:
        path: The SQLite file.
        read_only: Only read, while another process may write; the file must exist.

    Raises:
        JournalError: The file cannot be opened, is damaged or of another format.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        mode = "ro" if read_only else "rwc"
        with self._translating_errors():
            # Autocommit: transactions are exactly where this class says BEGIN.
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                timeout=_BUSY_S,
                uri=True,
                isolation_level=None,
            )
        try:
            with self._translating_errors():
                database.is_new(self._db, path, Kind.JOB)
                if not read_only:
                    self._prepare()
        except BaseException:
            self._db.close()
            raise

    def append(
        self, *events: Event | Step, samples: Iterable[Sample] | None = None
    ) -> int:
        """Add events, all or none; return the number of the last one in the journal.

        Args:
            events: In order; those that were decided on as the steps that were taken.
            samples: What they measure. Without them the measurements of these events,
                if they have any, are made up for by ``measure``.

        Raises:
            JournalWriteError: The disk refused; nothing was added.
            JournalError: The file is damaged.
        """
        facts = [one.event if isinstance(one, Step) else one for one in events]
        reports = any(isinstance(event, ReportReceived) for event in facts)
        with self._transaction():
            before = self.last_seq()
            known = self._is_decided(before)
            rows = []
            for one, fact in zip(events, facts, strict=True):
                decision = None
                if isinstance(one, Step):
                    decision, known = one.decision(whole=not known), True
                else:
                    known = False
                rows.append((fact.at_s, type(fact).__name__, _encode(fact), decision))
            self._db.executemany(
                "INSERT INTO events (at_s, kind, body, decision) VALUES (?, ?, ?, ?)",
                rows,
            )
            last = self.last_seq()
            if samples is not None or not reports:
                Measurements(self._db).write(samples or ())
                self._db.execute(
                    "UPDATE measured SET seq = ? WHERE seq = ?", (last, before)
                )
        return last

    def measure(self) -> None:
        """Take the measurements of events that lack them: those of a journal that was
        written before there were any, or copied from elsewhere.

        Raises:
            JournalError: The disk refused, or the file is damaged.
        """
        if not self.is_measured():
            with self._transaction():
                known = self._db.execute("SELECT seq FROM measured").fetchone()[0]
                self._measure_into(self._db, after_seq=known)
                self._db.execute("UPDATE measured SET seq = ?", (self.last_seq(),))

    def measurements(self) -> Measurements:
        """Return the measurements, to read them until the journal is closed.

        Those of a journal that lacks them are taken from its events, which takes as long
        as ``replay``.

        Raises:
            JournalError: The file is damaged.
        """
        if self.is_measured():
            return Measurements(self._db)
        memory = sqlite3.connect(":memory:", isolation_level=None)
        memory.executescript(measurements.SCHEMA)
        self._measure_into(memory)
        return Measurements(memory)

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield (number, event) of every event numbered above ``after_seq``.

        Events that arrive while reading are yielded too. Numbers count from 1.

        Raises:
            JournalError: The file is damaged.
        """
        for row in self._rows_after(after_seq):
            yield row.seq, self._decode(row)

    def steps(self, fold: Fold, after_seq: int = 0) -> Iterator[tuple[int, list[Step]]]:
        """Yield (number, its steps) of every event numbered above ``after_seq``.

        Args:
            fold: With the state after that event; it is brought forward.
            after_seq: See ``read``.

        Raises:
            JournalError: The file is damaged, or lacks some of them.
        """
        self._check_present(after_seq)
        for row in self._rows_after(after_seq):
            event = self._decode(row)
            with self._naming(row):
                steps = fold.take(event, row.decision)
            yield row.seq, steps

    def story(self, after_seq: int = 0) -> Iterator[tuple[int, Event, str]]:
        """Yield (number, event, news) of every event; news are empty if there are none.

        Nothing is folded but events that were not decided on.

        Args:
            after_seq: See ``read``.

        Raises:
            JournalError: The file is damaged.
        """
        fold, told = None, ""
        for row in self._rows_after(after_seq):
            event = self._decode(row)
            if row.decision is None:
                if fold is None:
                    fold = Fold(self.replay(row.seq - 1))
                    told = fold.state.last_news
                fold.take(event)
                told, before = fold.state.last_news, told
                yield row.seq, event, "" if told == before else told
                continue
            fold = None
            with self._naming(row):
                news = news_of(row.decision)
            whole = row.decision.startswith(BASE)
            yield row.seq, event, "" if whole and news == told else news
            told = news or told

    def _rows_after(self, seq: int) -> Iterator[JournalRow]:
        """Yield the events numbered above ``seq``, also those that arrive meanwhile."""
        # Pages, since an open cursor would keep the writer from checkpointing.
        while rows := self.rows(seq + 1, _END, _PAGE):
            yield from rows
            seq = rows[-1].seq

    def rows(self, first: int, last: int, limit: int = -1) -> list[JournalRow]:
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
            return [JournalRow(*row) for row in found]

    def _row_that(self, condition: str, *values: Any) -> JournalRow | None:
        """Return the newest event whose decision meets a condition."""
        with self._translating_errors():
            found = self._db.execute(
                f"{_SELECT} WHERE {condition} ORDER BY seq DESC LIMIT 1", values
            ).fetchone()
            return JournalRow(*found) if found else None

    def search(
        self, text: str, *, before: int = _END, in_event: bool = False
    ) -> Iterator[JournalRow]:
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
                    f"{_SELECT} WHERE seq < ? AND instr({column}, ?) > 0 "
                    "ORDER BY seq DESC LIMIT 1",
                    (before, text),
                ).fetchone()
            if found is None:
                return
            row = JournalRow(*found)
            yield row
            before = row.seq

    def take_over(self, rows: Iterable[JournalRow]) -> None:
        """Add events with the numbers of another journal, all or none.

        Raises:
            JournalError: The disk refused, or a number is taken.
        """
        with self._transaction():
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)

    def begin_with(
        self, first: JournalRow, snapshot: StoredSnapshot, row: JournalRow, steps: int
    ) -> None:
        """Fill an empty journal with what a takeover needs of the past, all or none.

        Args:
            first: The job's first event.
            snapshot: A snapshot of the job.
            row: The newest event in it; what follows is for ``take_over``.
            steps: Mini-batches up to this one are to be filled in.

        Raises:
            JournalError: The disk refused, or the journal is not empty.
        """
        with self._transaction():
            self._db.executemany(
                "INSERT INTO events VALUES (?, ?, ?, ?, ?)", {first, row}
            )
            self._db.execute("INSERT INTO snapshots VALUES (?, ?, ?)", snapshot)
            self._db.execute("UPDATE measured SET seq = ?", (snapshot.seq,))
            absent = Absent(first.seq + 1, snapshot.seq - 1, steps)
            if steps or absent.first <= absent.last:
                self._db.execute("INSERT INTO absent VALUES (?, ?, ?)", absent)

    def absent(self) -> Absent | None:
        """Return what is still to be filled in; None: nothing is.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            found = self._db.execute("SELECT first, last, steps FROM absent").fetchone()
            return None if found is None else Absent(*found)

    def whole_after(self, seq: int) -> int | None:
        """Return the first event above ``seq`` that says the whole state, if one does.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            found = self._db.execute(
                f"SELECT min(seq) FROM events WHERE {_IS_BASE} AND seq > ?", (seq,)
            ).fetchone()
            return found[0] if found else None

    def fill(
        self,
        rows: Sequence[JournalRow] = (),
        minibatches: Sequence[Minibatch] = (),
        steps: int | None = None,
    ) -> None:
        """Add something of what is absent, all or none.

        Args:
            rows: The next events, from ``Absent.first`` on.
            minibatches: Of those that are absent.
            steps: From now on only mini-batches up to this one are.

        Raises:
            JournalWriteError: The disk refused; nothing was added.
            JournalError: These are not the next events.
        """
        told = [one for row in rows for one in told_by(self._decode(row))]
        with self._transaction():
            absent = self.absent()
            if absent is None or (rows and rows[0].seq != absent.first):
                raise JournalError(f"{self._path}: there is nothing to fill in")
            rows = [row for row in rows if row.seq <= absent.last]
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)
            store = Measurements(self._db)
            store.fill([*told, *minibatches])
            left = Absent(
                absent.first + len(rows),
                absent.last,
                absent.steps if steps is None else steps,
            )
            self._db.execute("DELETE FROM absent")
            if left.steps or left.first <= left.last:
                self._db.execute("INSERT INTO absent VALUES (?, ?, ?)", left)
            else:
                store.filled()

    def _check_present(self, after_seq: int, last: int = _END) -> None:
        """Check that no event from ``after_seq`` to ``last`` is absent.

        Raises:
            JournalError: One is.
        """
        absent = self.absent()
        if (
            absent
            and absent.first <= min(absent.last, last)
            and after_seq < absent.last
        ):
            raise JournalError(
                f"{self._path}: {absent.text()}; the manager of the job copies them: try "
                "again when it has, or start it with 'spottrain resume'"
            )

    def recent(self) -> tuple[RecentEvent, ...]:
        """Return the newest events as a state keeps them, without what came of them.

        Raises:
            JournalError: The file is damaged.
        """
        recent: tuple[RecentEvent, ...] = ()
        last = self.last_seq()
        for row in self.rows(last - KEPT_EVENTS + 1, last):
            recent = with_event(recent, self._decode(row), row.seq)
        return recent

    def last_seq(self) -> int:
        """Return the number of the newest event; 0 if there is none.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            last = self._db.execute("SELECT max(seq) FROM events").fetchone()[0]
            return int(last or 0)

    def replay(self, last: int = _END) -> State:
        """Return the state that the events up to ``last`` lead to.

        Raises:
            JournalError: The file is damaged, or lacks events that are needed.
        """
        known = self.snapshot(last)
        base = self._row_that(f"{_IS_BASE} AND seq <= ?", last)
        if known is not None and (base is None or base.seq <= known.seq):
            fold, seq = Fold(known.state), known.seq
        else:
            fold, seq = Fold(), base.seq - 1 if base else 0
        self._check_present(seq, last)
        while rows := self.rows(seq + 1, last, _PAGE):
            for row in rows:
                with self._naming(row):
                    if row.decision is None:
                        fold.take(self._decode(row))
                    else:
                        fold.put(row.decision)
            seq = rows[-1].seq
        return fold.state

    def snapshot(self, last: int = _END) -> Snapshot | None:
        """Return the newest snapshot up to event ``last``, if there is one for this
        version.

        Raises:
            JournalError: The file is damaged.
        """
        found = self.stored_snapshot()
        if found is None or found.seq > last:
            return None
        fold = Fold()
        try:
            fold.put(found.state)
        except DecisionError:
            return None  # another version's; the rows say the same
        return Snapshot(found.seq, fold.state, found.history)

    def stored_snapshot(self, after_seq: int = 0) -> StoredSnapshot | None:
        """Return the newest snapshot as stored, of whatever version, if it goes beyond
        event ``after_seq``.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            found = self._db.execute(
                "SELECT seq, state, history FROM snapshots WHERE seq > ?", (after_seq,)
            ).fetchone()
            return None if found is None else StoredSnapshot(*found)

    def save_snapshot(self, seq: int, state: State, history: str) -> None:
        """Spare readers the events up to ``seq``.

        Args:
            seq: An event that is in the journal.
            state: The state after it.
            history: What else its readers need, in their own form.

        Raises:
            JournalWriteError: The disk refused; the snapshot before is still there.
        """
        with self._transaction():
            self._db.execute("DELETE FROM snapshots")
            self._db.execute(
                "INSERT INTO snapshots VALUES (?, ?, ?)",
                (seq, snapshot_of(state), history),
            )

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """What is written within the block is written all or none."""
        with self._translating_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def is_measured(self) -> bool:
        """Return whether the measurements of all events are in the file."""
        with self._translating_errors():
            found = self._db.execute(
                "SELECT seq = (SELECT coalesce(max(seq), 0) FROM events) FROM measured"
            )
            return bool(found.fetchone()[0])

    def _measure_into(self, db: sqlite3.Connection, after_seq: int = 0) -> None:
        """Write what the events above ``after_seq`` measure."""
        store, sampler = Measurements(db), Sampler()
        for _, steps in self.steps(Fold(self.replay(after_seq)), after_seq):
            store.write(sampler.samples(steps[0].event, steps[-1].after))

    def _prepare(self) -> None:
        """Prepare the file for writing: settings, a check, tables."""
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        verdict = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":  # in several lines, the last of which says what is wrong
            raise sqlite3.DatabaseError(verdict.splitlines()[-1])
        database.create(self._db, self._path, Kind.JOB, _SCHEMA)

    def _is_decided(self, seq: int) -> bool:
        """Return whether event ``seq`` was decided on: what follows may build on it."""
        found = self._db.execute("SELECT decision FROM events WHERE seq = ?", (seq,))
        return (found.fetchone() or (None,))[0] is not None

    @contextmanager
    def _naming(self, row: JournalRow) -> Iterator[None]:
        """Tell which decision cannot be read."""
        try:
            yield
        except DecisionError as error:
            raise JournalError(
                f"{self._path}: event {row.seq}: the decision cannot be used: {error}"
            ) from error

    def _decode(self, row: JournalRow) -> Event:
        try:
            return event_of(row.seq, row.kind, row.body)
        except JournalError as error:
            raise JournalError(f"{self._path}: {error}") from error

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Translate SQLite's errors into one line with what to do."""
        try:
            yield
        except FormatError as error:
            raise JournalError(str(error)) from error
        except sqlite3.OperationalError as error:
            raise JournalWriteError(
                f"{self._path}: cannot use the journal: {error}"
            ) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise JournalError(
                f"{self._path}: journal is damaged: {error}; restore a copy of it, or "
                "end the job with 'spottrain down' (checkpoints are kept)"
            ) from error


def event_of(seq: int, kind: str, body: str) -> Event:
    """Return an event from its stored form.

    Raises:
        JournalError: It is not an event.
    """
    try:
        event: Event = _adapter(kind).validate_json(body)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise JournalError(
            f"event {seq} is not a valid {kind} ({reason}); it is damaged or was written by "
            "another version: use the version that launched the job"
        ) from error
    return event


def _encode(event: Event) -> str:
    text = json.dumps(
        dataclasses.asdict(event), separators=(",", ":"), ensure_ascii=False
    )
    # Lone surrogates, as in undecodable file names, cannot be encoded.
    return text.encode("utf-8", "replace").decode()


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(EVENT_TYPES[kind])
