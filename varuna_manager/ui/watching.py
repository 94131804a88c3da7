"""Notices that a job or pool has changed, without opening its journal."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable

from spottrain.eventlog.folder import Folder

LOOK_S = 0.5
"""Between two looks of a page that is open."""
_FILES = ("journal.sqlite", "journal.sqlite-wal", "measurements.sqlite", "measurements.sqlite-wal")
_TICK_S = 10
"""Money and time go on while nothing happens: what runs changes so often at least."""


def fingerprint(folders: Iterable[Folder], *, logs: bool = False) -> Hashable:
    """Return what differs once one of them has changed, is there or is gone.

    Args:
        folders: Of jobs and pools.
        logs: Whether their logs count, too.
    """
    tick = int(time.time() // _TICK_S)
    return tuple(
        (
            str(folder.path),
            *(_stamp(f"{folder.path}/{name}") for name in _FILES),
            tick if folder.is_managed() else None,
            *(map(_stamp, sorted(map(str, folder.path.rglob("*.log")))) if logs else ()),
        )
        for folder in folders
    )


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
