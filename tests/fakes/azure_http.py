"""One request to the fake Azure, and one answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.fakes.script import Fault


@dataclass
class Call:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    base: str
    """The server's own address."""
    operation: str = ""
    found: dict[str, str] = field(default_factory=dict)
    """What the path names."""


@dataclass
class Reply:
    """One answer."""

    status: int
    told: Any = None
    headers: dict[str, str] = field(default_factory=dict)


def error(status: int, code: str, message: str, fault: Fault | None = None) -> Reply:
    """Return an error as ARM writes it."""
    headers = dict(fault.headers) if fault else {}
    return Reply(status, {"error": {"code": code, "message": message}}, headers)
