"""The memory of a job: every event, in order, in one SQLite file.

State is a fold over it. One process writes (it holds the job's manager.lock); any number
may read at the same time. An event is durable when ``append`` returns.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from spottrain.cloud.port.stored import FORMER_FIELDS, with_current_names
from spottrain.errors import SpottrainError
from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model.events import EVENT_TYPES, Event
from spottrain.varuna_manager.core.model.state import State

_MIGRATIONS = (
    """
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY,
        at_s REAL NOT NULL,
        kind TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
    """,
)
"""Entry n takes a file from ``user_version`` n to n + 1."""

_PAGE = 1000
_BUSY_S = 1.0


class JournalError(SpottrainError):
    """The journal is missing, damaged, or of another version of spottrain."""


class JournalWriteError(JournalError):
    """The disk refused an event; it may have room again later."""


class JournalRow(NamedTuple):
    """An event as it is written down."""

    seq: int
    at_s: float
    kind: str
    body: str


class Journal:
    """The events of one job.

    Args:
        path: The SQLite file.
        read_only: Look on while another process writes; the file must exist.

    Raises:
        JournalError: the file cannot be opened, is damaged or from a newer version.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        mode = "ro" if read_only else "rwc"
        with self._explained():
            # Autocommit: transactions are exactly where this class says BEGIN.
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                timeout=_BUSY_S,
                uri=True,
                isolation_level=None,
            )
        try:
            with self._explained():
                self._check_version()
                if not read_only:
                    self._prepare()
        except BaseException:
            self._db.close()
            raise

    def append(self, *events: Event) -> int:
        """Add events, all or none; return the number of the last one in the journal.

        Raises:
            JournalWriteError: the disk refused; nothing was added.
            JournalError: the file is damaged.
        """
        rows = [(e.at_s, type(e).__name__, _encode(e)) for e in events]
        self._insert("INSERT INTO events (at_s, kind, body) VALUES (?, ?, ?)", rows)
        return self.last_seq()

    def read(self, after_seq: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield (number, event) of every event numbered above ``after_seq``.

        Events that arrive while reading are yielded too. Numbers count from 1.

        Raises:
            JournalError: the file is damaged.
        """
        while True:
            with self._explained():
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
        """Return the events numbered ``first`` to ``last`` as they are written down.

        Raises:
            JournalError: the file is damaged.
        """
        with self._explained():
            found = self._db.execute(
                "SELECT seq, at_s, kind, body FROM events WHERE seq BETWEEN ? AND ? "
                "ORDER BY seq",
                (first, last),
            )
            return [JournalRow(*row) for row in found]

    def take_over(self, rows: Iterable[JournalRow]) -> None:
        """Add events under the numbers that they had in another journal, all or none.

        Raises:
            JournalError: the disk refused, or a number is taken.
        """
        self._insert("INSERT INTO events VALUES (?, ?, ?, ?)", rows)

    def last_seq(self) -> int:
        """Return the number of the newest event; 0 if there is none.

        Raises:
            JournalError: the file is damaged.
        """
        with self._explained():
            last = self._db.execute("SELECT max(seq) FROM events").fetchone()[0]
            return int(last or 0)

    def replay(self) -> State:
        """Return the state that the events lead to.

        Raises:
            JournalError: the file is damaged.
        """
        state = State()
        for _, event in self.read():
            state, _ = step.step(state, event)
        return state

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _insert(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Add rows, all or none."""
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(statement, rows)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _check_version(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(_MIGRATIONS):
            raise JournalError(
                f"{self._path}: journal has version {version}, this spottrain knows "
                f"up to {len(_MIGRATIONS)}; use the newer spottrain that wrote it"
            )

    def _prepare(self) -> None:
        """Make the file ours to write: settings, a check, the newest schema."""
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
    def _explained(self) -> Iterator[None]:
        """Turn what SQLite says into one line with what to do."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise JournalWriteError(
                f"{self._path}: cannot use the journal: {error}"
            ) from error
        except sqlite3.DatabaseError as error:
            raise JournalError(
                f"{self._path}: journal is damaged: {error}; put a copy of it back, or "
                "end the job with 'spottrain down' (checkpoints are kept)"
            ) from error


def event_of(seq: int, kind: str, body: str) -> Event:
    """Return an event from what is written down of it.

    Raises:
        JournalError: It is none.
    """
    try:
        if any(f'"{name}":' in body for name in FORMER_FIELDS):
            body = json.dumps(with_current_names(json.loads(body)))
        event: Event = _adapter(kind).validate_json(body)
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise JournalError(
            f"event {seq} is no {kind} ({reason}); it was damaged or written by "
            "another version: use the version that launched the job"
        ) from error
    return event


def _encode(event: Event) -> str:
    text = json.dumps(
        dataclasses.asdict(event), separators=(",", ":"), ensure_ascii=False
    )
    # Half a surrogate pair, as in odd file names, has no place in UTF-8.
    return text.encode("utf-8", "replace").decode()


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(EVENT_TYPES[kind])
