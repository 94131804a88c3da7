"""Data that a job needs on each machine, as the job file specifies it.

UserCodeError
└── DataError              it cannot be provided as specified: the job's author must act
    └── DataMissingError  it does not exist
SpottrainError
└── DataUnavailableError          it is unavailable now: a retry may succeed
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self
from urllib.parse import quote, unquote

from spottrain.datasets import variable
from spottrain.errors import SpottrainError, UserCodeError

WEB_SCHEMES = ("https", "http")
"""URL schemes of web servers."""
_HUB_URL = re.compile(
    r"hf://(?:(models|datasets)/)?([\w.-]+/[\w.-]+?)"
    r"(?:@(refs/pr/\d+|refs/convert/[\w.-]+|[^/@]+))?(?:/(.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class DataError(UserCodeError):
    """Data that is missing, forbidden, damaged, or larger than the disk."""


class DataMissingError(DataError):
    """Data that does not exist."""


class DataUnavailableError(SpottrainError):
    """Data that is unavailable now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """One dataset; exactly one of ``url``, ``path`` and ``mount`` is given."""

    name: str
    url: str = ""
    """An object, or a prefix of objects that ends in ``/``; fetched."""
    path: str = ""
    """Path of a file or folder that the machine already has."""
    mount: str = ""
    """A file system's source, as ``mount`` takes it."""
    unpack: bool = False
    """True for a tar or zip archive that is to be unpacked."""
    sha256: str = ""
    """Hash of the single object at ``url``; not checked if empty."""
    type: str = ""
    """The file system's type."""
    options: str = ""
    """The mount's options, comma-separated."""
    files: tuple[str, ...] = ()
    """Patterns of ``fnmatch`` for paths in a folder at ``url``; empty: all of them."""
    cache_bytes: int = 0
    """At most so much of a folder is here at a time, see ``stream``; 0: all of it."""

    @property
    def variable(self) -> str:
        """Name of the environment variable with its path."""
        return variable(self.name)

    @property
    def what(self) -> str:
        """Its name in errors."""
        return f"data {self.name} ({self.url or self.path or self.mount})"


@dataclass(frozen=True, slots=True)
class HubUrl:
    """A repository of the Hugging Face Hub, a folder of it, or a file.

    Written ``hf://[datasets/]owner/name[@revision][/path]``, as for ``huggingface_hub``
    (its docs, "HF URIs"); a path that ends with ``/`` is a folder.
    """

    kind: str
    """``models`` or ``datasets``, as in the Hub's API."""
    repository: str
    """``owner/name``."""
    revision: str
    """A branch, a tag, or a commit in hexadecimal."""
    path: str
    """Of a file or, with a slash at its end, of a folder; empty: the repository."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return the parts of a URL.

        Raises:
            ValueError: It is none.
        """
        found = _HUB_URL.fullmatch(url)
        if found is None or found[2].startswith(("models/", "datasets/", "spaces/", "buckets/")):
            raise ValueError(
                "url must be hf://owner/model or hf://datasets/owner/name, then @revision "
                f"and /path where they are wanted: got {url}"
            )
        kind, repository, revision, path = found.groups()
        return cls(kind or "models", repository, unquote(revision or "main"), path or "")

    @property
    def is_folder(self) -> bool:
        """True for a repository or a folder, False for a file."""
        return not self.path or self.path.endswith("/")

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> Self:
        """Return the same place at another revision."""
        return replace(self, revision=commit)

    def __str__(self) -> str:
        kind = "datasets/" if self.kind == "datasets" else ""
        revision = self.revision
        if not revision.startswith("refs/"):
            revision = quote(revision, safe="")
        path = f"/{self.path}" if self.path else ""
        return f"hf://{kind}{self.repository}@{revision}{path}"


def to_json(requests: Sequence[DataRequest]) -> str:
    """Return requests as JSON."""
    return json.dumps([asdict(request) for request in requests])


def from_json(text: str) -> tuple[DataRequest, ...]:
    """Return the requests that ``to_json`` wrote.

    Raises:
        DataError: the text is invalid.
    """
    try:
        return tuple(
            DataRequest(**{**request, "files": tuple(request["files"])})
            for request in json.loads(text)
        )
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"data: {error}; does this machine run another version of spottrain?"
        ) from error


def short_hash(*parts: Any) -> str:
    """Return a short hash of plain data."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
