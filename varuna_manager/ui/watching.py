"""Notices that what a page shows has changed, without opening a journal."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping

from starlette.concurrency import run_in_threadpool

from spottrain.eventlog.folder import Folder, is_folder_name
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.pool.store.folder import PoolDir

LOOK_S = 0.5
"""Between two looks of a page that is open."""
_FILES = (
    "journal.sqlite",
    "journal.sqlite-wal",
    "measurements.sqlite",
    "measurements.sqlite-wal",
    "gpus.json",
)
_ALIVE_S = 15.0
"""Between signs of life, by which a browser notices that a tunnel is cut."""
_TICK_S = 10
"""Money and time go on while nothing happens: what runs changes so often at least."""


async def changes(name: str, is_closing: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events: one at first, and one whenever a page has changed.

    Args:
        name: As ``jobs/NAME``, ``logs/NAME`` or ``pools/NAME``; empty: all jobs and pools.
        is_closing: Returns whether to end.
    """
    look, seen, silent_s = _look(name), None, 0.0
    while not is_closing():
        now = await run_in_threadpool(look)
        if now != seen or silent_s >= _ALIVE_S:
            yield ": alive\n\n" if now == seen else "data: changed\n\n"
            seen, silent_s = now, 0.0
        await asyncio.sleep(LOOK_S)
        silent_s += LOOK_S


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
    # A reader leaves an empty file beside a journal.
    return (found.st_mtime_ns, found.st_size) if found.st_size else None


def _look(name: str) -> Callable[[], Hashable]:
    """Return a function that returns what differs once a page has changed."""
    kinds: Mapping[str, type[Folder]] = {"jobs": JobDir, "logs": JobDir, "pools": PoolDir}
    kind, _, one = name.partition("/")
    if kind in kinds and is_folder_name(one):
        folder = kinds[kind].named(one)
        return lambda: fingerprint([folder], logs=kind == "logs")
    return lambda: fingerprint([*JobDir.all(), *PoolDir.all()])
