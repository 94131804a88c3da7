"""What the three fake metadata services have in common."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from tests.fakes.script import Script


@dataclass(frozen=True)
class Request:
    """One request of one VM."""

    vm: str
    method: str
    path: str
    query: dict[str, str]
    headers: Message
    body: bytes


@dataclass(frozen=True)
class Reply:
    """One answer."""

    status: int
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class RefusedError(Exception):
    """A request is not what the real service takes.

    Args:
        status: How the service answers.
        why: What is wrong.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class World(Script):
    """One service for many VMs, each with an address of its own.

    Args:
        operations: (method, path) of each request that is known, its name in faults.
    """

    def __init__(self, operations: dict[tuple[str, str], str]) -> None:
        super().__init__()
        self._operations = operations
        self.changed = threading.Condition(self.lock)

    def now(self) -> float:
        """The service's clock."""
        return time.time() + self.skew_s

    def wait_for_requests(self, vm: str, count: int) -> bool:
        """Return once a VM has made so many requests; False: it does not."""

        def made() -> bool:
            return len([one for one in self.log if one["vm"] == vm]) >= count

        with self.changed:
            return self.changed.wait_for(made, 10.0)

    def answer(self, request: Request) -> Reply | None:
        """Answer as the real service does; None: not at all."""
        operation = self._operations.get((request.method, request.path), "")
        seen = {
            "vm": request.vm,
            "operation": operation,
            "method": request.method,
            "target": [request.path, request.query],
            "headers": dict(request.headers.items()),
            "body": request.body.decode(),
        }
        with self.changed:
            self.log.append(seen)
            self.changed.notify_all()
            fault = self.fault(operation)
        if fault is not None and fault.kind == "drop":
            return None
        if fault is not None:
            return Reply(fault.status, fault.code, fault.headers)
        try:
            if request.headers["X-Forwarded-For"] is not None:
                raise RefusedError(403, "X-Forwarded-For")
            if not operation:
                raise RefusedError(404, f"{request.method} {request.path}")
            return self.carry_out(operation, request)
        except RefusedError as error:
            with self.lock:
                self.drift.append(f"{operation}: {error}")
            return Reply(error.status, str(error))

    def carry_out(self, operation: str, request: Request) -> Reply:
        """Check a request and do what it asks for.

        Raises:
            RefusedError: it is wrong.
        """
        raise NotImplementedError


def needs_header(request: Request, name: str, value: str, status: int) -> None:
    """Check a header.

    Raises:
        RefusedError: it is absent or another.
    """
    given: Any = request.headers[name]
    if given != value:
        raise RefusedError(status, f"{name} is {given!r}, must be {value!r}")


def needs_query(request: Request, **wanted: str) -> None:
    """Check that the query is this and no other.

    Raises:
        RefusedError: it is not.
    """
    due = {name.replace("_", "-"): value for name, value in wanted.items()}
    if request.query != due:
        raise RefusedError(400, f"query is {request.query}, must be {due}")
