"""Unpacks archives: all that is in them as it was packed, or not at all."""

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
    OverflowError,  # a time that no file can have
    RuntimeError,  # a zip with a password, or packed in a way that Python does not know
)


class _Member(tarfile.TarInfo):
    """A member of an archive that does not end early, as ``tarfile`` lets it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if buf.strip(b"\0"):  # not the zeros by which an archive ends
                raise tarfile.ReadError(str(error)) from error
            raise


def unpack(request: DataRequest, archive: Path, folder: Path) -> None:
    """Unpack a tar or zip archive; nothing may land outside of ``folder``.

    Raises:
        DataError: it is none, or damaged.
        OSError: the disk does not take it.
    """
    try:
        _unpack(request, archive, folder)
    except _DAMAGED as error:
        raise _cannot(request, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _cannot(
            request, error
        ) from error  # gzip and bz2 say so that it is damaged


def _unpack(request: DataRequest, archive: Path, folder: Path) -> None:
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive, tarinfo=_Member) as tar:
            tar.extractall(folder, filter="data")
            assert tar.fileobj is not None
            # The check sum of what was packed stands at its very end.
            while tar.fileobj.read(_CHUNK_BYTES):
                pass
    elif zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(folder)
    else:
        raise DataError(
            f"{request.what}: is no tar or zip archive, or a damaged one; leave unpack "
            "out, or mend it"
        )


def _cannot(request: DataRequest, error: Exception) -> DataError:
    return DataError(f"{request.what}: cannot be unpacked: {error}; mend it")
