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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spottrain.datasets import variable
from spottrain.errors import SpottrainError, UserCodeError

WEB_SCHEMES = ("https", "http")
"""URL schemes of web servers."""


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

    @property
    def variable(self) -> str:
        """Name of the environment variable with its path."""
        return variable(self.name)

    @property
    def what(self) -> str:
        """Its name in errors."""
        return f"data {self.name} ({self.url or self.path or self.mount})"


def to_json(requests: Sequence[DataRequest]) -> str:
    """Return requests as JSON."""
    return json.dumps([asdict(request) for request in requests])


def from_json(text: str) -> tuple[DataRequest, ...]:
    """Return the requests that ``to_json`` wrote.

    Raises:
        DataError: the text is invalid.
    """
    try:
        return tuple(DataRequest(**request) for request in json.loads(text))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"data: {error}; does this machine run another version of spottrain?"
        ) from error


def short_hash(*parts: Any) -> str:
    """Return a short hash of plain data."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
