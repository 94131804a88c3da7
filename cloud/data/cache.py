"""Cache folder of fetched data: each dataset is complete or absent, and fetched once.

    <folder>/<key>/        files of one version of one dataset; of a stream see stream.py
    <folder>/<key>.part/   files of a dataset in transfer
    <folder>/<key>.lock    held by the process that fetches it

The key identifies URL and version, by the names, sizes and ETags of the objects.
Several processes may share a folder. Archives are unpacked completely or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import lzma
import os
import re
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Self

from spottrain.cloud.data.request import DataError, DataRequest, short_hash
from spottrain.cloud.data.sources import DataSource, SourceFile
from spottrain.cloud.data.stream import prepare_stream
from spottrain.files import locked
from spottrain.units import size

_CHUNK_BYTES = 1 << 20
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    ValueError,
    OverflowError,  # a timestamp out of range
    RuntimeError,  # a zip with a password, or an unsupported compression
)
_IS_OURS = re.compile(r"[0-9a-f]{24}(\.part|\.archive)?")
"""Names of folders that may be removed; other files there are not ours."""
_BAD_NAME_ERRNOS = (
    errno.EEXIST,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOTEMPTY,
    errno.ENAMETOOLONG,
    errno.EILSEQ,
)
"""Errors for names that conflict, or that no file can have."""
_THREADS = 8
"""Files fetched in parallel."""

ReportProgress = Callable[[str], None]
"""Called with progress, one line each time."""


class Cache:
    """Cache of datasets on this machine.

    Args:
        folder: Created if needed.
        may_evict: Evict the least recently used data if there is no room; only where no
            other job can be using it.
    """

    def __init__(self, folder: Path, *, may_evict: bool = False) -> None:
        self.folder = folder
        self._may_evict = may_evict
        self._used: set[str] = set()

    def ensure(self, request: DataRequest, source: DataSource, report: ReportProgress) -> Path:
        """Fetch a dataset unless it is cached; return its path.

        Args:
            source: Where it comes from.
            report: See ``ReportProgress``.

        Raises:
            DataError: there is no room, or the data differs from the job file.
            DataUnavailableError: it is unavailable now; received files are kept.
        """
        files = source.files
        versions = [(file.name, file.num_bytes, file.etag) for file in files]
        limit = request.cache_bytes
        key = short_hash(request.url, request.unpack, request.sha256, versions, limit)
        self._used.add(key)
        if request.cache_bytes:
            with self._locked(key), translating_disk_errors(request, self.folder):
                folder = self.folder / key
                self._make_room(request, request.cache_bytes - used_bytes(folder))
                prepare_stream(folder, request, source)
            return folder
        with self._locked(key):
            target, part = self.folder / key, self.folder / f"{key}.part"
            if target.exists() and not (request.unpack or not missing_files(target, files)):
                target.rename(part)  # a file was removed
            if target.exists():
                os.utime(target)  # marks it as used
                report(f"{request.name}: is cached, {size(num_bytes(files))}")
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
        # Unpacking takes at least as much again.
        more = num_bytes(source.files) if request.unpack else 0
        self._make_room(request, num_bytes(wanted) + more)
        arrived = num_bytes(source.files) - num_bytes(wanted)
        total = size(num_bytes(source.files))
        threads = ThreadPoolExecutor(_THREADS, "data")
        try:
            fetches = {threads.submit(source.fetch, x, folder / x.name): x for x in wanted}
            report(f"{request.name}: {size(arrived)} of {total} received")
            for done in as_completed(fetches):
                done.result()
                arrived += fetches[done].num_bytes
                report(f"{request.name}: {size(arrived)} of {total} received")
        finally:
            threads.shutdown(cancel_futures=True)
        if request.unpack:
            report(f"{request.name}: unpacking {total}")
            unpack(request, archive / source.files[0].name, part)
            shutil.rmtree(archive)

    def _make_room(self, request: DataRequest, wanted_bytes: int) -> None:
        """Check that the data fits on the disk; evict old data if allowed.

        Raises:
            DataError: it does not fit.
        """
        for old in self._oldest() if self._may_evict else ():
            if wanted_bytes <= self._free_bytes():
                break
            with self._locked(old.name, wait=False) as held:
                if held:
                    shutil.rmtree(old, ignore_errors=True)
        if wanted_bytes > (free_bytes := self._free_bytes()):
            raise DataError(
                f"{request.what}: needs {size(wanted_bytes)}, {size(free_bytes)} "
                f"are free in {self.folder}; free space there or give VMs a larger disk"
            )

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _oldest(self) -> list[Path]:
        """Return datasets that this process did not request, oldest use first."""
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
        """Hold a dataset's lock; see ``stream.locked``."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / f"{name.partition('.')[0]}.lock", wait=wait) as held:
            yield held


def missing_files(folder: Path, files: Sequence[SourceFile]) -> list[SourceFile]:
    """Return the files that a folder lacks, by name and size."""
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
    """Translate errors of a full disk or of invalid names.

    Raises:
        DataError: the disk is full, or rejects the names.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _BAD_NAME_ERRNOS:
            raise DataError(
                f"{request.what}: a name cannot be used here: {error}; rename it"
            ) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{request.what}: the disk of {folder} is full; free space there or give VMs a "
            "larger disk"
        ) from error


def used_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, which need not be there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def num_bytes(files: Sequence[SourceFile]) -> int:
    """Return the total size of some files."""
    return sum(file.num_bytes for file in files)


class _Member(tarfile.TarInfo):
    """A tar member that rejects truncated archives, which ``tarfile`` accepts."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf.strip(b"\0"):  # not the zeros at the end of an archive
                raise tarfile.ReadError(str(error)) from error
            raise


def unpack(request: DataRequest, archive: Path, folder: Path) -> None:
    """Unpack a tar or zip archive; nothing is written outside ``folder``.

    Raises:
        DataError: it is no archive, or damaged.
        OSError: it cannot be written to disk.
    """
    try:
        _unpack(request, archive, folder)
    except _DAMAGED as error:
        raise _cannot(request, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _cannot(request, error) from error  # gzip and bz2: it is damaged


def _unpack(request: DataRequest, archive: Path, folder: Path) -> None:
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive, tarinfo=_Member) as tar:
            tar.extractall(folder, filter="data")
            assert tar.fileobj is not None
            # Read to the end, where the checksum is.
            while tar.fileobj.read(_CHUNK_BYTES):
                pass
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(folder)
    else:
        raise DataError(
            f"{request.what}: is not a tar or zip archive, or is damaged; remove "
            "unpack, or fix the archive"
        )


def _cannot(request: DataRequest, error: Exception) -> DataError:
    return DataError(f"{request.what}: cannot be unpacked: {error}; fix the archive")
