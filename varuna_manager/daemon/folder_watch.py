"""Watches what a manager relies on in its job's folder.

A manager goes on with files that were deleted, or are on a file system that was unmounted:
it has them open. But then no command finds it, and no later manager learns what it rents.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from spottrain.files import PRIVATE, write_whole
from spottrain.varuna_manager.jobs.folder import JobDir


class FolderSight(NamedTuple):
    """What was seen; the fields are those of ``events.FolderSeen``."""

    trouble: str = ""
    is_gone: bool = False


KEPT = ("identity.pem", "manager.json", "ca.pem", "metrics.token")
"""Small files by which agents, commands and the next manager reach this one: a manager that
misses one knows what was in it."""


class _Identity(NamedTuple):
    """What tells a file from another one that is put in its place."""

    device: int
    inode: int


class FolderWatch:
    """The folder of a job as it was when its manager began, and what has become of it.

    Args:
        job: With its journal open and its lock held.
    """

    def __init__(self, job: JobDir) -> None:
        self._job = job
        known = {
            path: _identity(path) for path in (job.path, job.journal, job.measurements, job.lock)
        }
        self._known = {path: one for path, one in known.items() if one is not None}
        files = (job.path / name for name in KEPT)
        self._kept = {path: path.read_text() for path in files if path.exists()}

    def restore(self) -> list[str]:
        """Write deleted files anew whose contents are known; return their names.

        Where that is not possible, ``look`` says what is wrong with the folder.
        """
        restored = []
        for path, content in self._kept.items():
            with contextlib.suppress(OSError):
                if not path.exists() and not self._has_moved(self._job.path):
                    write_whole(path, content, mode=PRIVATE)
                    restored.append(path.name)
        return restored

    def look(self) -> FolderSight:
        """Return what is wrong with the folder now."""
        folder = self._job.path
        try:
            if self._has_moved(folder):
                if self._is_unmounted(folder):
                    return FolderSight(f"the file system of {folder} is not mounted any more")
                return FolderSight(f"{folder} was deleted or moved", is_gone=True)
            for path in self._known:
                if self._has_moved(path):
                    return FolderSight(f"{path} was deleted or replaced", is_gone=True)
            if os.statvfs(folder).f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
                return FolderSight(f"{folder} is read-only")
        except OSError as error:  # of a network file system
            return FolderSight(f"{folder} cannot be read: {error.strerror}")
        try:
            self._job.workdir.open("rb").close()
        except OSError as error:
            return FolderSight(f"{self._job.workdir} cannot be read: {error.strerror}")
        return FolderSight()

    def _has_moved(self, path: Path) -> bool:
        """Return whether a path no longer leads to what was there."""
        return path in self._known and _identity(path) != self._known[path]

    def _is_unmounted(self, folder: Path) -> bool:
        """Return whether another file system is now where the folder's was."""
        nearest = next(one for one in (folder, *folder.parents) if _identity(one))
        return os.stat(nearest).st_dev != self._known[folder].device


def _identity(path: Path) -> _Identity | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _Identity(found.st_dev, found.st_ino)
