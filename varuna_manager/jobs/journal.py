"""The journal of a job: all its events, in order, in one SQLite file.

State is a fold over it. One process writes (it holds the job's manager.lock); any number
may read at the same time. An event is durable when ``append`` returns. The measurements
of the job lie in the same file (``measurements``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from spottrain.cloud.port.stored import FORMER_FIELDS, with_current_names
from spottrain.errors import SpottrainError
from spottrain.varuna_manager.core.model.events import (
    EVENT_TYPES,
    Event,
    ReportReceived,
)
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs import measurements
from spottrain.varuna_manager.jobs.fold import Fold
from spottrain.varuna_manager.jobs.measurements import Measurements, Sample
from spottrain.varuna_manager.jobs.samples import Sampler

_MIGRATIONS = (
    """
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY,
        at_s REAL NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    """,
    measurements.SCHEMA,
)
"""Entry n takes a file from ``user_version`` n to n + 1."""

_PAGE = 1000
_BUSY_S = 1.0


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


class Journal:
    """The events of one job.

    Args:
        path: The SQLite file.
        read_only: Only read, while another process may write; the file must exist.

    Raises:
        JournalError: The file cannot be opened, is damaged or from a newer version.
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
                self._check_version()
                if not read_only:
                    self._prepare()
        except BaseException:
            self._db.close()
            raise

    def append(self, *events: Event, samples: Iterable[Sample] | None = None) -> int:
        """Add events, all or none; return the number of the last one in the journal.

        Args:
            events: In order.
            samples: What they measure. Without them the measurements of these events,
                if they have any, are made up for by ``measure``.

        Raises:
            JournalWriteError: The disk refused; nothing was added.
            JournalError: The file is damaged.
        """
        rows = [(e.at_s, type(e).__name__, _encode(e)) for e in events]
        reports = any(isinstance(event, ReportReceived) for event in events)
        with self._transaction():
            before = self.last_seq()
            self._db.executemany(
                "INSERT INTO events (at_s, kind, body) VALUES (?, ?, ?)", rows
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
        while True:
            with self._translating_errors():
                # Pages, since an open cursor would keep the writer from checkpointing.
                rows = self._db.execute(
                    "SELECT seq, kind, body FROM events WHERE seq > ? "
                    "ORDER BY seq LIMIT ?",
                    (after_seq, _PAGE),
                ).fetchall()
            for seq, kind, body in rows:
                yield seq, self._decode(seq, kind, body)
            if not rows:
                return
            after_seq = rows[-1][0]

    def rows(self, first: int, last: int) -> list[JournalRow]:
        """Return the events numbered ``first`` to ``last`` as stored.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            found = self._db.execute(
                "SELECT seq, at_s, kind, body FROM events WHERE seq BETWEEN ? AND ? "
                "ORDER BY seq",
                (first, last),
            )
            return [JournalRow(*row) for row in found]

    def take_over(self, rows: Iterable[JournalRow]) -> None:
        """Add events with the numbers of another journal, all or none.

        Raises:
            JournalError: The disk refused, or a number is taken.
        """
        with self._transaction():
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", rows)

    def last_seq(self) -> int:
        """Return the number of the newest event; 0 if there is none.

        Raises:
            JournalError: The file is damaged.
        """
        with self._translating_errors():
            last = self._db.execute("SELECT max(seq) FROM events").fetchone()[0]
            return int(last or 0)

    def replay(self) -> State:
        """Return the state that the events lead to.

        Raises:
            JournalError: The file is damaged.
        """
        fold = Fold()
        for _, event in self.read():
            fold.take(event)
        return fold.state

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
            if self._db.execute("PRAGMA user_version").fetchone()[0] < len(_MIGRATIONS):
                return False
            found = self._db.execute(
                "SELECT seq = (SELECT coalesce(max(seq), 0) FROM events) FROM measured"
            )
            return bool(found.fetchone()[0])

    def _measure_into(self, db: sqlite3.Connection, after_seq: int = 0) -> None:
        """Write what the events above ``after_seq`` measure."""
        store, sampler, fold = Measurements(db), Sampler(), Fold()
        for seq, event in self.read():
            fold.take(event)
            if seq > after_seq:
                store.write(sampler.samples(event, fold.state))

    def _check_version(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(_MIGRATIONS):
            raise JournalError(
                f"{self._path}: journal has version {version}, this spottrain reads "
                f"up to {len(_MIGRATIONS)}; use the newer spottrain that wrote it"
            )

    def _prepare(self) -> None:
        """Prepare the file for writing: settings, a check, the newest schema."""
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        verdict = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        for number, script in enumerate(_MIGRATIONS[version:], version + 1):
            self._db.executescript(
                f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;"
            )

    def _decode(self, seq: int, kind: str, body: str) -> Event:
        try:
            return event_of(seq, kind, body)
        except JournalError as error:
            raise JournalError(f"{self._path}: {error}") from error

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Translate SQLite's errors into one line with what to do."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise JournalWriteError(
                f"{self._path}: cannot use the journal: {error}"
            ) from error
        except sqlite3.DatabaseError as error:
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
        if any(f'"{name}":' in body for name in FORMER_FIELDS):
            body = _with_current_names(kind, body)
        event: Event = _adapter(kind).validate_json(body)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise JournalError(
            f"event {seq} is not a valid {kind} ({reason}); it is damaged or was written by "
            "another version: use the version that launched the job"
        ) from error
    return event


def _with_current_names(kind: str, body: str) -> str:
    """Return a stored event with the present names of its fields.

    A former name may also be data, such as the name of a zone: what reads back as it was
    written stays.
    """
    stored = json.loads(body)
    with suppress(ValueError):
        if json.loads(_encode(_adapter(kind).validate_json(body))) == stored:
            return body
    return json.dumps(with_current_names(stored))


def _encode(event: Event) -> str:
    text = json.dumps(
        dataclasses.asdict(event), separators=(",", ":"), ensure_ascii=False
    )
    # Lone surrogates, as in undecodable file names, cannot be encoded.
    return text.encode("utf-8", "replace").decode()


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(EVENT_TYPES[kind])
