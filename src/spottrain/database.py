"""SQLite files of ours: of which kind and format one is, seen before it is touched."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path

from spottrain.errors import SpottrainError

FORMAT = 1
"""Of all kinds; what is released stays readable."""
_BUSY_S = 5.0
"""How long one try waits for another process that writes, which takes milliseconds; journals
are tried again."""

SHARED = "SPOTTRAIN_SHARED_FILES"
"""Environment variable of processes whose files other machines read. A write-ahead log is indexed
in memory that only processes of one machine share (sqlite.org, "Write-Ahead Logging")."""


class Kind(IntEnum):
    """What a file holds: its ``application_id``."""

    JOB = 0x73706A31
    POOL = 0x73707031
    PRICES = 0x73706331
    MEASUREMENTS = 0x73706D31


class FormatError(SpottrainError):
    """A file is of another kind or format; it was left as it is."""


def _is_new(db: sqlite3.Connection, path: Path, kind: Kind) -> bool:
    """Return whether a file has no tables yet.

    Raises:
        FormatError: It has tables of another kind, or of another format.
    """
    if not db.execute("PRAGMA schema_version").fetchone()[0]:
        return True
    found = db.execute("PRAGMA application_id").fetchone()[0]
    if found != kind:
        raise FormatError(
            f"{path} was not written by this spottrain: its mark is {found:#x}, not "
            f"{kind:#x}; it was left as it is: move it away, or use what wrote it (of a "
            "spottrain before 0.1.0, that one)"
        )
    number = db.execute("PRAGMA user_version").fetchone()[0]
    if number != FORMAT:
        raise FormatError(
            f"{path} has format {number}, this spottrain reads {FORMAT}; use the newer "
            "spottrain that wrote it"
        )
    return False


def connect(path: Path, kind: Kind, schema: str, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a file, in autocommit mode, that any number of processes may read.

    Args:
        kind: What it holds.
        schema: Statements that make its tables.
        read_only: Only read; the file must exist.

    Raises:
        FormatError: It has tables of another kind, or of another format.
        sqlite3.Error: It cannot be opened, or is damaged.
    """
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    db = sqlite3.connect(uri, timeout=_BUSY_S, uri=True, isolation_level=None)
    try:
        _is_new(db, path, kind)
        if not read_only:
            with suppress(sqlite3.OperationalError):  # others have it open: it stays as it is
                mode = "TRUNCATE" if os.environ.get(SHARED) else "WAL"
                db.execute(f"PRAGMA journal_mode = {mode}")
            db.execute("PRAGMA synchronous = FULL")
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":  # in several lines, the last of which says what is wrong
                raise sqlite3.DatabaseError(verdict.splitlines()[-1])
            with transaction(db):
                if _is_new(db, path, kind):  # another process may have been faster
                    for statement in schema.split(";"):  # executescript would commit first
                        db.execute(statement)
                    db.execute(f"PRAGMA application_id = {kind:d}")
                    db.execute(f"PRAGMA user_version = {FORMAT}")
    except BaseException:
        db.close()
        raise
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """What is written within the block is written all or none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
