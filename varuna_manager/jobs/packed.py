"""Rows as the files of a bucket hold them: JSON, compressed, with a checksum."""

from __future__ import annotations

import functools
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import Any, TypeVar, cast

from spottrain.codec import SCHEMA_VERSION, decode, encode
from spottrain.errors import SpottrainError, WireError

RowT = TypeVar("RowT")


class PackedError(SpottrainError):
    """A file is damaged, or another version wrote it."""


@functools.cache
def _contents(kind: type) -> Any:
    """Return the class of a file's contents."""
    fields: list[Any] = [("rows", tuple[kind, ...]), ("schema_version", int, SCHEMA_VERSION)]  # type: ignore[valid-type]
    return make_dataclass("Contents", fields)


def pack(rows: Sequence[Any]) -> bytes:
    """Return the contents of a file of rows, which are dataclasses or named tuples."""
    text = encode({"rows": rows, "schema_version": SCHEMA_VERSION})
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def unpack(kind: type[RowT], name: str, data: bytes) -> list[RowT]:
    """Return the rows of a file.

    Args:
        kind: Of the rows.
        name: Of the file, for errors.
        data: Its contents.

    Raises:
        PackedError: It is damaged, or of another version.
    """
    try:
        contents = decode(_contents(cast(Any, kind)), gzip.decompress(data))
    except (OSError, EOFError, zlib.error, WireError) as error:
        raise PackedError(f"{name} is damaged or of another version: {error}") from error
    return list(contents.rows)
