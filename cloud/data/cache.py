"""A folder of data that was fetched: each dataset whole or not at all, and only once.

    <folder>/<key>/        files of one version of one dataset
    <folder>/<key>.part/   files of one that is arriving
    <folder>/<key>.lock    held by whoever brings it

The key tells where it came from and which version it is, by the names, sizes and ETags of
its objects. Several processes may share a folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from spottrain.cloud.data.request import DataError, DataRequest, short_hash
from spottrain.cloud.data.sources import DataSource, SourceFile
from spottrain.cloud.data.unpacking import unpack

_IS_OURS = re.compile(r"[0-9a-f]{24}(\.part|\.archive)?")
"""Names of folders that may be removed; whatever else lies there is not ours."""
_BAD_NAME_ERRNOS = (
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOTEMPTY,
    errno.ENAMETOOLONG,
    errno.EILSEQ,
)
"""What a disk says to names that no two files, or no file at all, can have."""
_THREADS = 8
"""Files that are fetched at the same time."""

ReportProgress = Callable[[str], None]
"""Told how far it is, a line each time."""


class Cache:
    """What was fetched to this machine.

    Args:
        folder: Made on need.
        may_evict: Remove what was not used for longest when there is no room; only
            where no other job can be using it.
    """

    def __init__(self, folder: Path, *, may_evict: bool = False) -> None:
        self.folder = folder
        self._may_evict = may_evict
        self._used: set[str] = set()

    def ensure(
        self, request: DataRequest, source: DataSource, report: ReportProgress
    ) -> Path:
        """Fetch a dataset unless it is here; return where it lies.

        Args:
            request: What is wanted.
            source: Where it is.
            report: See ``ReportProgress``.

        Raises:
            DataError: there is no room, or it is not what the job file says.
            DataAwayError: it cannot be had now; what has arrived is kept.
        """
        files = source.files
        versions = [(file.name, file.num_bytes, file.etag) for file in files]
        key = short_hash(request.url, request.unpack, request.sha256, versions)
        self._used.add(key)
        with self._locked(key):
            target, part = self.folder / key, self.folder / f"{key}.part"
            if target.exists() and not (
                request.unpack or not missing_files(target, files)
            ):
                target.rename(part)  # somebody took a file away
            if target.exists():
                os.utime(target)  # it is used
                report(f"{request.name}: is here, {format_size(num_bytes(files))}")
            else:
                with translating_disk_errors(request, self.folder):
                    self._fetch(request, source, part, report)
                part.rename(target)
        return target if source.is_folder or request.unpack else target / files[0].name

    def _fetch(
        self,
        request: DataRequest,
        source: DataSource,
        part: Path,
        report: ReportProgress,
    ) -> None:
        part.mkdir(mode=0o700, parents=True, exist_ok=True)
        archive = part.with_suffix(".archive")
        folder = archive if request.unpack else part
        folder.mkdir(exist_ok=True)
        wanted = missing_files(folder, source.files)
        # Unpacked it takes at least as much again.
        more = num_bytes(source.files) if request.unpack else 0
        self._make_room(request, num_bytes(wanted) + more)
        arrived = num_bytes(source.files) - num_bytes(wanted)
        total = format_size(num_bytes(source.files))
        threads = ThreadPoolExecutor(_THREADS, "data")
        try:
            fetches = {
                threads.submit(source.fetch, x, folder / x.name): x for x in wanted
            }
            report(f"{request.name}: {format_size(arrived)} of {total} are here")
            for done in as_completed(fetches):
                done.result()
                arrived += fetches[done].num_bytes
                report(f"{request.name}: {format_size(arrived)} of {total} are here")
        finally:
            threads.shutdown(cancel_futures=True)
        if request.unpack:
            report(f"{request.name}: unpacking {total}")
            unpack(request, archive / source.files[0].name, part)
            shutil.rmtree(archive)

    def _make_room(self, request: DataRequest, wanted_bytes: int) -> None:
        """Check that so much fits on the disk; make room if that is allowed.

        Raises:
            DataError: it does not.
        """
        for old in self._oldest() if self._may_evict else ():
            if wanted_bytes <= self._free_bytes():
                break
            with self._locked(old.name, wait=False) as held:
                if held:
                    shutil.rmtree(old, ignore_errors=True)
        if wanted_bytes > (free_bytes := self._free_bytes()):
            raise DataError(
                f"{request.what}: needs {format_size(wanted_bytes)}, {format_size(free_bytes)} "
                f"are free in {self.folder}; make room there or give VMs a larger disk"
            )

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _oldest(self) -> list[Path]:
        """Return the datasets that this process did not ask for, longest unused first."""
        found = [
            path
            for path in self.folder.iterdir()
            if _IS_OURS.fullmatch(path.name)
            and path.is_dir()
            and path.name.partition(".")[0] not in self._used
        ]
        return sorted(found, key=lambda path: path.stat().st_mtime)

    @contextlib.contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold a dataset's lock; yields whether it is held (always, if ``wait``)."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / f"{name.partition('.')[0]}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(lock)


def missing_files(folder: Path, files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return which of some files a folder does not hold, by name and size."""
    found = []
    for file in files:
        try:
            here_bytes = (folder / file.name).stat().st_size
        except FileNotFoundError:
            here_bytes = -1
        if here_bytes != file.num_bytes:
            found.append(file)
    return found


@contextlib.contextmanager
def translating_disk_errors(request: DataRequest, folder: Path) -> Iterator[None]:
    """Say in one line that a disk is full, or cannot hold files of such names.

    Raises:
        DataError: it is, or cannot.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _BAD_NAME_ERRNOS:
            raise DataError(
                f"{request.what}: cannot be kept under its names: {error}; rename it"
            ) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{request.what}: the disk of {folder} is full; make room there or give VMs a "
            "larger disk"
        ) from error


def num_bytes(files: Sequence[SourceFile]) -> int:
    """Return what some files take."""
    return sum(file.num_bytes for file in files)


def format_size(size: float) -> str:
    """Return a number of bytes as people read it, such as ``12.3 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
