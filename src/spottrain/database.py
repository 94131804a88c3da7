"""SQLite files of ours: of which kind and format one is, seen before it is touched."""

from __future__ import annotations

import sqlite3
from enum import IntEnum
from pathlib import Path

from spottrain.errors import SpottrainError

FORMAT = 1
"""Of all kinds; what is released stays readable."""


class Kind(IntEnum):
    """What a file holds: its ``application_id``."""

    JOB = 0x73706A31
    POOL = 0x73707031
    PRICES = 0x73706331


class FormatError(SpottrainError):
    """A file is of another kind or format; it was left as it is."""


def is_new(db: sqlite3.Connection, path: Path, kind: Kind) -> bool:
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


def create(db: sqlite3.Connection, path: Path, kind: Kind, schema: str) -> None:
    """Make the tables of a file, unless it has them.

    Args:
        db: In autocommit mode.
        path: Of the file.
        kind: What it holds.
        schema: Statements.

    Raises:
        FormatError: It has tables of another kind, or of another format.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        if is_new(db, path, kind):
            for statement in schema.split(";"):  # executescript would commit first
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {kind:d}")
            db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
