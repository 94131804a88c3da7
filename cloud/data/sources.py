"""Sources of data: buckets (by our storage), web servers, and the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from spottrain.cloud.data.request import (
    WEB_SCHEMES,
    DataError,
    DataMissingError,
    DataRequest,
    DataUnavailableError,
    HubUrl,
    short_hash,
)
from spottrain.errors import SpottrainError
from spottrain.storage import store
from spottrain.storage.objects import open_objects

_ANSWER_S = 60.0
_CHUNK_BYTES = 1 << 20
_GONE = frozenset({404, 410})
_NEXT = re.compile(r'<([^>]+)>; *rel="next"')
_SIZE = re.compile(r"[0-9]{1,18}")
_TRANSIENT = frozenset({408, 425, 429})
"""HTTP statuses after which a retry may succeed."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a dataset."""

    name: str
    """Path within the dataset, with slashes."""
    num_bytes: int
    etag: str
    """Changes with the content; may be empty."""


class DataSource(Protocol):
    """One version of a dataset in remote storage."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """All its files."""

    @property
    def is_folder(self) -> bool:
        """True for a folder, False for a single file."""

    def fetch(self, file: SourceFile, target: Path) -> None:
        """Copy a file to ``target`` atomically.

        Raises:
            DataError: it is missing, forbidden, or differs from the job file.
            DataUnavailableError: it is unavailable now.
        """


def open_source(request: DataRequest, patience_s: float = store.PATIENCE_S) -> DataSource:
    """Return the current version of a dataset.

    Args:
        patience_s: How long to retry if a bucket does not answer.

    Raises:
        DataMissingError: it does not exist.
        DataError: access is refused.
        DataUnavailableError: it is unavailable now.
    """
    with translating_http_errors(request):
        scheme = urlsplit(request.url).scheme
        if scheme == "hf":
            return HubSource(request)
        if scheme in WEB_SCHEMES:
            return WebSource(request)
        return ObjectSource(request, patience_s)


def pinned_url(request: DataRequest) -> str:
    """Return the URL of a place on the Hugging Face Hub at the commit that it has now.

    Raises:
        DataError, DataUnavailableError: As ``open_source``.
    """
    with translating_http_errors(request):
        return str(HubSource(request).place)


class ObjectSource:
    """An object, or all objects below a prefix.

    Args:
        request: Its URL ends with a slash if it is a prefix.
        patience_s: See ``open_source``.

    Raises:
        StorageError: the bucket cannot be read.
        DataError: nothing exists there, or this machine lacks what it takes.
    """

    def __init__(self, request: DataRequest, patience_s: float) -> None:
        self._request = request
        parts = urlsplit(request.url)
        self.is_folder = parts.path.endswith("/") or not parts.path
        above, _, name = parts.path.rpartition("/")
        place = parts._replace(path=above).geturl()
        try:
            self._store = open_objects(store.parse_url(place), patience_s)
        except store.StorageError as error:
            raise DataError(f"{request.what}: {error}") from error
        if self.is_folder:
            found = self._store.versions()
        else:
            check_name(request, name := unquote(name))
            found = [self._store.version(name)]
        self.files = tuple(files_of(request, found))
        if not self.files:
            raise DataMissingError(f"{request.what}: nothing found; check the URL")
        if self.is_folder and (request.unpack or request.sha256):
            raise DataError(f"{request.what}: unpack and sha256 need the URL of a single object")

    def fetch(self, file: SourceFile, target: Path) -> None:
        """See ``DataSource``."""
        with translating_http_errors(self._request):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._store.fetch(file.name, target)
            check_hash(self._request, target)


class WebSource:
    """A file on a web server.

    Raises:
        DataError: the server does not report the size.
        OSError: the server does not answer, or refuses.
    """

    is_folder = False

    def __init__(self, request: DataRequest) -> None:
        self._request = request
        with _ask(request.url, "HEAD") as answer:
            size = answer.headers.get("Content-Length")
            etag = answer.headers.get("ETag") or answer.headers.get("Last-Modified")
        if size is None or not _SIZE.fullmatch(size):
            raise DataError(f"{request.what}: its server does not report its size")
        name = PurePosixPath(unquote(urlsplit(request.url).path)).name or "index"
        check_name(request, name)
        self.files: tuple[SourceFile, ...] = (SourceFile(name, int(size), etag or ""),)

    def fetch(self, file: SourceFile, target: Path) -> None:
        """See ``DataSource``; resumes an interrupted download."""
        with translating_http_errors(self._request):
            _download(self._request, self._request.url, file, target)


class HubSource:
    """A repository of the Hugging Face Hub, a folder of it, or a file, at one commit.

    Machines list and fetch it themselves: ``huggingface_hub`` needs nine more packages,
    and this runs before the job's ``setup``. The three requests are those of the Hub's API
    (https://huggingface.co/docs/hub/api): ``/revision``, ``/tree`` and ``/resolve``.

    Args:
        request: The dataset; its URL is a ``HubUrl``.

    Raises:
        DataError: nothing is there, or it takes a token.
        OSError: the Hub does not answer.
    """

    def __init__(self, request: DataRequest) -> None:
        self._request = request
        self.place = HubUrl.parse(request.url)
        """With the commit as its revision."""
        self._token = os.environ.get("HF_TOKEN", "")
        self._hub = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
        self.is_folder = self.place.is_folder
        path = self.place.path
        self._folder = path if self.is_folder else f"{path.rpartition('/')[0]}/".lstrip("/")
        if not self.place.is_pinned:
            (found,) = self._pages(f"revision/{quote(self.place.revision, safe='')}")
            self.place = self.place.at(found["sha"])
        entries = self._tree()
        found = [
            store.Version(
                entry["path"].removeprefix(self._folder),
                entry["size"],
                entry.get("lfs", entry)["oid"],
            )
            for entry in entries
            if entry["type"] == "file" and (self.is_folder or entry["path"] == path)
        ]
        self.files = tuple(files_of(request, found))
        if not self.files:
            raise DataMissingError(f"{request.what}: nothing found; check the URL")

    def fetch(self, file: SourceFile, target: Path) -> None:
        """See ``DataSource``; resumes an interrupted download."""
        place = self.place
        kind = "datasets/" if place.kind == "datasets" else ""
        path = quote(self._folder + file.name)
        url = f"{self._hub}/{kind}{place.repository}/resolve/{place.revision}/{path}"
        with translating_http_errors(self._request), self._explaining():
            _download(self._request, url, file, target, self._token)

    def _tree(self) -> list[dict[str, Any]]:
        """Return what the folder holds; a file's folder is not searched below."""
        folder = quote(self._folder.rstrip("/"))
        what = f"tree/{self.place.revision}" + (f"/{folder}" if folder else "")
        pages = self._pages(f"{what}?recursive={str(self.is_folder).lower()}")
        return [entry for page in pages for entry in page]

    def _pages(self, what: str) -> Iterator[Any]:
        """Yield the pages of an answer of the repository's API."""
        url = f"{self._hub}/api/{self.place.kind}/{self.place.repository}/{what}"
        while url:
            # A link elsewhere would take the token along.
            if not url.startswith(f"{self._hub}/"):
                raise DataError(f"{self._request.what}: its server points elsewhere: {url}")
            with self._explaining(), _ask(url, "GET", token=self._token) as answer:
                link = _NEXT.search(answer.headers.get("Link") or "")
                yield json.load(answer)
            url = link[1] if link else ""

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say what the Hub says, and what to do.

        Raises:
            DataError: it wants another token, or any.
            DataMissingError: there is no such thing.
        """
        try:
            yield
        except urllib.error.HTTPError as error:
            said = error.headers.get("X-Error-Message") or error.reason
            if error.code in (401, 403):
                page = f"{self._hub}/{self.place.repository}"
                remedy = f"ask for access at {page} with the account of HF_TOKEN"
                if not self._token:
                    remedy = "if it is private or gated, put HF_TOKEN under secrets"
                raise DataError(
                    f"{self._request.what}: {said}; check the name; {remedy}"
                ) from error
            if error.code in _GONE:
                raise DataMissingError(f"{self._request.what}: {said}; check the URL") from error
            raise


def _download(
    request: DataRequest, url: str, file: SourceFile, target: Path, token: str = ""
) -> None:
    """Copy a file of a web server to ``target`` atomically; goes on with what is there.

    Raises:
        DataError: it differs from the job file.
        DataUnavailableError: not all of it came.
        OSError: the server does not answer, or refuses.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{short_hash(file.etag)}.part")
    part.touch()
    here_bytes = part.stat().st_size if file.etag else 0
    if here_bytes != file.num_bytes or not here_bytes:
        first = here_bytes if here_bytes < file.num_bytes else 0
        with _ask(url, "GET", first, token) as answer:
            goes_on = answer.status == http.HTTPStatus.PARTIAL_CONTENT
            with part.open("ab" if goes_on else "wb") as stream:
                shutil.copyfileobj(answer, stream, _CHUNK_BYTES)
    if (got_bytes := part.stat().st_size) != file.num_bytes:
        raise DataUnavailableError(f"{request.what}: got {got_bytes} of {file.num_bytes} bytes")
    check_hash(request, part)
    part.replace(target)


@contextlib.contextmanager
def _ask(
    url: str, method: str, first: int = 0, token: str = ""
) -> Iterator[http.client.HTTPResponse]:
    request = urllib.request.Request(url, method=method)
    request.add_header("Accept-Encoding", "identity")
    if first:
        request.add_header("Range", f"bytes={first}-")
    if token:  # not for the server that it redirects to
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        error.close()  # it holds a connection
        raise


def files_of(request: DataRequest, found: Sequence[store.Version]) -> Iterator[SourceFile]:
    """Yield the files among objects that are wanted, without folder placeholders.

    Raises:
        DataError: a name leaves the dataset's folder, or is also a folder.
    """
    folders = {str(path) for x in found for path in PurePosixPath(x.name).parents}
    for name, num_bytes, etag in found:
        check_name(request, name)
        if num_bytes and name in folders:
            raise DataError(
                f"{request.what}: {name!r} is both an object and a folder of other "
                "objects; rename it"
            )
        if request.files and not any(fnmatch.fnmatchcase(name, x) for x in request.files):
            continue
        if num_bytes or not (name in folders or not name or name.endswith("/")):
            yield SourceFile(name, num_bytes, etag)


def check_name(request: DataRequest, name: str) -> None:
    """Check that a name denotes a file in the dataset's folder.

    Raises:
        DataError: the name is invalid, or leaves the folder.
    """
    if PurePosixPath(name).is_absolute() or ".." in name.split("/") or "\0" in name:
        raise DataError(f"{request.what}: object name {name!r} is not allowed; rename it")


def check_hash(request: DataRequest, path: Path) -> None:
    """Check a file's sha256 if the job file gives one; remove the file if it differs.

    Raises:
        DataError: it differs.
    """
    if not request.sha256:
        return
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != request.sha256:
        path.unlink()
        raise DataError(f"{request.what}: sha256 is {found}, which differs from the job file")


@contextlib.contextmanager
def translating_http_errors(request: DataRequest) -> Iterator[None]:
    """Translate network and storage errors into one line that names the dataset.

    Raises:
        DataError: the user must act.
        DataUnavailableError: a retry may succeed.
    """
    try:
        yield
    except store.MissingError as error:
        raise DataMissingError(f"{request.what}: {error}; check the URL") from error
    except store.DeniedError as error:
        raise DataError(f"{request.what}: {error}") from error
    except store.StorageError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None  # its own error, e.g. a full disk
        raise DataUnavailableError(f"{request.what}: {error}") from error
    except urllib.error.HTTPError as error:
        kind: type[SpottrainError] = DataError
        if error.code in _GONE:
            kind = DataMissingError
        elif error.code >= 500 or error.code in _TRANSIENT:
            kind = DataUnavailableError
        raise kind(f"{request.what}: its server answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DataUnavailableError(f"{request.what}: no answer: {error.reason}") from error
    except (http.client.InvalidURL, UnicodeError) as error:
        raise DataError(f"{request.what}: invalid URL: {error}; check it") from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise DataUnavailableError(f"{request.what}: connection lost: {error!r}") from error
