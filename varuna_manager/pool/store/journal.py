"""The journal of a pool: its events, each with what was decided because of it.

As a job's journal (``jobs.replay``): the state is put together again from what was decided,
nothing is decided anew. Every ``BASE_EVENTS`` a row holds the whole state, so that little
has to be read. One process writes; any number may read at the same time.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from spottrain import database
from spottrain.codec import from_data, to_data
from spottrain.database import FormatError, Kind
from spottrain.errors import SpottrainError, WireError
from spottrain.varuna_manager.jobs.replay.changes import apply, difference
from spottrain.varuna_manager.pool.core.model import PoolEvent, PoolState

BASE_EVENTS = 200
_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY,
    at_s REAL NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    base TEXT,
    changes TEXT
) STRICT;
"""


class PoolJournalError(SpottrainError):
    """The journal of a pool is missing, damaged, or of another version."""


class PoolJournalWriteError(PoolJournalError):
    """The disk refused an event; it may have room again later."""


class PoolEntry(NamedTuple):
    """One event of a pool, and the state after it."""

    seq: int
    at_s: float
    kind: str
    state: PoolState


class PoolJournal:
    """The events of one pool.

    Args:
        path: The SQLite file.
        read_only: Only read, while another process may write.

    Raises:
        PoolJournalError: The file cannot be opened, is damaged or of another format.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        mode = "ro" if read_only else "rwc"
        with self._translating_errors():
            uri = f"{path.absolute().as_uri()}?mode={mode}"
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None)
            database.is_new(self._db, path, Kind.POOL)
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                database.create(self._db, path, Kind.POOL, _SCHEMA)

    def append(
        self, before: PoolState | None, event: PoolEvent, after: PoolState
    ) -> None:
        """Add an event; it is durable when this returns.

        Args:
            before: The state before it; None: readers cannot know it.
            event: What happened.
            after: The state that it led to.

        Raises:
            PoolJournalWriteError: The disk refused; nothing was added.
        """
        with self._translating_errors():
            last = self._db.execute("SELECT max(seq) FROM events").fetchone()[0] or 0
            whole = before is None or last % BASE_EVENTS == 0
            base = json.dumps(to_data(after)) if whole else None
            changes = None if whole else json.dumps(difference(before, after))
            body = json.dumps(to_data(event))
            row = (event.at_s, type(event).__name__, body, base, changes)
            self._db.execute(
                "INSERT INTO events (at_s, kind, body, base, changes) "
                "VALUES (?, ?, ?, ?, ?)",
                row,
            )

    def replay(self) -> PoolState | None:
        """Return the present state; None if there are no events."""
        state = None
        for entry in self.entries(newest_base=True):
            state = entry.state
        return state

    def entries(self, *, newest_base: bool = False) -> Iterator[PoolEntry]:
        """Yield the events, each with the state after it.

        Args:
            newest_base: Begin with the newest event that holds the whole state.

        Raises:
            PoolJournalError: The file is damaged.
        """
        with self._translating_errors():
            begin = 0
            if newest_base:
                found = self._db.execute(
                    "SELECT max(seq) FROM events WHERE base IS NOT NULL"
                )
                begin = found.fetchone()[0] or 0
            rows = self._db.execute(
                "SELECT seq, at_s, kind, base, changes FROM events WHERE seq >= ? "
                "ORDER BY seq",
                (begin,),
            )
            state: PoolState | None = None
            for seq, at_s, kind, base, changes in rows:
                if base is not None:
                    state = from_data(PoolState, json.loads(base))
                elif state is not None and changes is not None:
                    state = apply(state, json.loads(changes))
                else:
                    raise WireError(f"event {seq} does not say what was decided")
                yield PoolEntry(seq, at_s, kind, state)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        """Translate errors into one line with what to do."""
        try:
            yield
        except FormatError as error:
            raise PoolJournalError(str(error)) from error
        except sqlite3.OperationalError as error:
            raise PoolJournalWriteError(
                f"{self._path}: cannot use the pool's journal: {error}; free disk space, or "
                "see to it that the folder can be written"
            ) from error
        except (sqlite3.Error, WireError, ValueError, TypeError) as error:
            raise PoolJournalError(
                f"{self._path}: the pool's journal cannot be used: {error}; restore a copy "
                "of it; its jobs are in their own journals, 'spottrain down JOB' ends them"
            ) from error
