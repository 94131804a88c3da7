"""Unpacks archives, completely or not at all."""

from __future__ import annotations

import lzma
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Self

from spottrain.cloud.data.request import DataError, DataRequest

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
