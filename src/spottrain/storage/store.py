"""The protocol of checkpoint stores, their errors and the names of their places.

Standard library only. Places::

    /folder or file:///folder
    s3://bucket/prefix          gs://bucket/prefix
    az://container/prefix       abfs://container@account.dfs.core.windows.net/prefix

A URL may carry options, but no secrets or credentials: ``?endpoint_url=…&region=…``
(``OPTIONS``). Names in a store have slashes between their parts, as paths do.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from spottrain.errors import SpottrainError

OBJECT_SCHEMES = ("s3", "gs", "az", "abfs", "abfss")
"""Schemes of URLs that name a bucket."""

OPTIONS = ("endpoint_url", "region", "account")
"""Options of a URL: another server than the cloud's own, the region of an S3 bucket,
the storage account of an Azure container."""

PATIENCE_S = 60.0
"""Time for which a request to a store that does not answer is retried."""

UNFINISHED = ".unfinished"
"""Ends the name of a file that is being written; never in a listing."""


def child_url(place: str, name: str) -> str:
    """Return the place of that name in a folder or bucket."""
    path, mark, options = place.partition("?") if is_url(place) else (place, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


class StorageError(SpottrainError):
    """A store cannot be opened, read or written."""


class UnreachableError(StorageError):
    """A store cannot be reached now, or answers with an error: its contents are unknown."""


class DeniedError(UnreachableError):
    """Credentials, permissions or the bucket are lacking, or the store is another job's: a
    person must act."""


class MissingError(StorageError):
    """There is no object of that name."""


class ExistsError(StorageError):
    """There is an object of that name already."""


class StoreEntry(NamedTuple):
    """One file or object in a listing."""

    name: str
    num_bytes: int


Entries = list[StoreEntry]
Names = list[str]


class Version(NamedTuple):
    """One object, and which version of it there is."""

    name: str
    num_bytes: int
    etag: str


class Store(Protocol):
    """Named files below one place; every method but ``put_new`` is safe to repeat.

    Everything that has a name is whole: nothing half written is ever listed or read.
    All methods may be called from any thread and raise ``StorageError``, one line that
    names the place, when the store cannot be reached or refuses.
    """

    @property
    def place(self) -> str:
        """The folder or URL, for messages; holds no secret."""
        ...

    def put(self, name: str, source: Path | bytes) -> None:
        """Keep a copy of a local file, or bytes, under ``name``; overwrites."""
        ...

    def put_new(self, name: str, data: bytes) -> None:
        """Keep ``data`` under ``name`` if the name is free.

        After a lost reply the request is repeated although the data were stored: a
        caller who must know reads back whose data they are.

        Raises:
            ExistsError: The name is taken.
        """
        ...

    def get(self, name: str) -> bytes:
        """Return the data kept under ``name``.

        Raises:
            MissingError: Nothing is.
        """
        ...

    def fetch(self, name: str, target: Path) -> None:
        """Copy the data kept under ``name`` into a local file, which it replaces.

        Raises:
            MissingError: Nothing is.
        """
        ...

    def list(self, prefix: str = "") -> Entries:
        """Return all below the folder ``prefix`` at any depth, in order of name."""
        ...

    def folders(self) -> Names:
        """Return the first parts of all names that have several, in order."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete them; missing ones are fine."""
        ...

    def delete_folder(self, prefix: str) -> None:
        """Delete all below the folder ``prefix``, unfinished writes included."""
        ...

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path to write, kept under ``name`` when the block succeeds.

        Raises:
            ExistsError: The name is taken.
        """
        ...

    def reading(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local file to read within the block; never write to it.

        Memory mapped from it stays valid after the block.

        Raises:
            MissingError: There is no object of that name.
        """
        ...


class StoreUrl(NamedTuple):
    """A URL of an object store, taken apart."""

    scheme: str
    """``s3``, ``gs`` or ``az``."""
    bucket: str
    """Or, on Azure, the container."""
    prefix: str
    options: dict[str, str]


def is_url(place: str) -> bool:
    """Return whether ``place`` names a store by URL; any other text is a folder."""
    return "://" in place


def is_object_url(place: str) -> bool:
    """Return whether ``place`` is in a bucket, which takes obstore."""
    return is_url(place) and place.partition("://")[0] in OBJECT_SCHEMES


def local_folder(place: str) -> Path | None:
    """Return the folder that ``place`` is, or None for an object store.

    Raises:
        StorageError: It is a file:// URL of another host.
    """
    if not is_url(place):
        return Path(place)
    return _local_path(place) if place.startswith("file://") else None


def parse_url(url: str, options: Mapping[str, str] | None = None) -> StoreUrl:
    """Return the parts of an object store's URL.

    Raises:
        StorageError: Names the expected form.
    """
    parts = _split(url)
    scheme = "az" if parts.scheme.startswith("abfs") else parts.scheme
    if url.partition("://")[0] not in OBJECT_SCHEMES or url != url.strip():
        known = ", ".join(f"{x}://" for x in (*OBJECT_SCHEMES, "file"))
        raise StorageError(f"store must be a folder or one of {known}: got {url!r}")
    chosen = dict(parse_qsl(parts.query)) | dict(options or {})
    bucket, _, host = parts.netloc.partition("@")
    if host and scheme == "az":
        chosen.setdefault("account", host.partition(".")[0])
    elif host or not bucket:
        raise StorageError(
            f"store must be {scheme}://<bucket>/<prefix> without credentials: "
            f"got {scheme}://{'…@' if host else ''}{host}{parts.path}"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]+", bucket):
        raise StorageError(
            f"store must name a bucket, of letters, digits, '.', '-' and '_': got {bucket!r}"
        )
    if unknown := sorted(set(chosen) - set(OPTIONS)):
        raise StorageError(
            f"store {scheme}://{bucket} supports the options {', '.join(OPTIONS)}: got "
            f"{unknown[0]!r}; put credentials into the environment"
        )
    return StoreUrl(scheme, bucket, unquote(parts.path).strip("/"), chosen)


def check_writable(store: Store) -> None:
    """Write, fail to overwrite, and delete one small file.

    Raises:
        StorageError: Names what the store refuses, and what to do.
    """
    name, data = f".spottrain-probe-{secrets.token_hex(8)}", b"spottrain"
    store.put_new(name, data)
    try:
        store.put_new(name, data)
    except ExistsError:
        pass
    else:
        raise StorageError(
            f"{store.place} overwrites existing objects: use a store that "
            "supports conditional writes (If-None-Match)"
        )
    finally:
        store.delete([name])


@contextlib.contextmanager
def unfinished(final: Path) -> Iterator[Path]:
    """Yield a path beside ``final`` that is deleted after the block, unless moved."""
    part = final.with_name(f".{final.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise StorageError(f"store must be a URL: got {url!r}: {error}") from error


def _local_path(url: str) -> Path:
    parts = _split(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise StorageError(f"store must be file:///<folder>: got {url!r}")
    return Path(unquote(parts.path))
