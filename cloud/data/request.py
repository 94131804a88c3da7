"""What a job wants to find on each machine, as the job file says it.

UserCodeError
└── DataError              it cannot be had as the job file says: its author must act
    └── NothingThereError  it does not exist
SpottrainError
└── DataAwayError          it cannot be had now: it may later
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
"""Schemes of URLs that web servers answer."""


class DataError(UserCodeError):
    """Data that is not there, not allowed, damaged, or larger than the disk."""


class DataMissingError(DataError):
    """Data that does not exist."""


class DataUnavailableError(SpottrainError):
    """Data that cannot be reached now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """One dataset; exactly one of ``url``, ``path`` and ``mount`` is given."""

    name: str
    url: str = ""
    """An object, or a prefix of objects that ends in ``/``; fetched."""
    path: str = ""
    """Of a file or folder that the machine has already."""
    mount: str = ""
    """A file system's source, as ``mount`` takes it."""
    unpack: bool = False
    """It is one tar or zip archive, to be found unpacked."""
    sha256: str = ""
    """Of the one object that ``url`` is; not checked if empty."""
    type: str = ""
    """The file system's type."""
    options: str = ""
    """The mount's options, comma-separated."""

    @property
    def variable(self) -> str:
        """Name of the environment variable that leads to it."""
        return variable(self.name)

    @property
    def what(self) -> str:
        """How errors name it."""
        return f"data {self.name} ({self.url or self.path or self.mount})"


def to_json(requests: Sequence[DataRequest]) -> str:
    """Return wishes as JSON."""
    return json.dumps([asdict(request) for request in requests])


def from_json(text: str) -> tuple[DataRequest, ...]:
    """Return what ``to_json`` was given.

    Raises:
        DataError: it is something else.
    """
    try:
        return tuple(DataRequest(**request) for request in json.loads(text))
    except (ValueError, TypeError) as error:
        raise DataError(f"data: {error}; is the software here another?") from error


def short_hash(*parts: Any) -> str:
    """Return a name for what ``parts``, plain data, describe."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
