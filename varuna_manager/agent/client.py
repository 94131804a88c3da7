"""An agent's connection to its manager: HTTPS, pinned certificate, standard library only.

AgentError
├── NoManagerError     no answer, or not the manager's: try again
├── VmFencedError      this VM has been given up: end at once
└── RefusedError       the request will never be accepted
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from spottrain.codec import encode
from spottrain.errors import SpottrainError
from spottrain.wire import messages

_ANSWER_S = 15.0
_CONNECT_S = 5.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 2.0
LOG_PUSH_S = 10.0
"""Time between two looks at the logs."""
TAIL_BYTES = 16 * 1024
"""Of each log that is sent."""


class AgentError(SpottrainError):
    """An agent cannot do its work."""


class NoManagerError(AgentError):
    """The manager does not answer at present."""


class VmFencedError(AgentError):
    """The manager has given this VM up; nothing it does counts any more."""


class RefusedError(AgentError):
    """The manager will never accept this request."""


class Route:
    """The address of the manager; may change while an agent runs.

    Args:
        url: ``https://address:port`` of the manager; its certificate names the address.
        file: Once it exists, holds ``address:port`` to use instead.
    """

    def __init__(self, url: str, file: Path | None = None) -> None:
        parts = urlsplit(url)
        self.name = parts.hostname or ""
        self._port = parts.port or 443
        self._file = file

    def address(self) -> tuple[str, int]:
        """Return the present address and port."""
        try:
            text = "" if self._file is None else self._file.read_text()
        except OSError:
            text = ""
        host, _, port = text.rpartition(":")
        return (host, int(port)) if host else (self.name, self._port)


class _Connection(http.client.HTTPSConnection):
    """Connects to the route's present address and verifies the manager's certificate."""

    def __init__(self, route: Route, context: ssl.SSLContext, answer_s: float) -> None:
        super().__init__(route.name, timeout=answer_s, context=context)
        self._route = route
        self._tls = context
        self.leads_to: tuple[str, int] | None = None

    def connect(self) -> None:
        """Connect."""
        self.leads_to = self._route.address()
        plain = socket.create_connection(self.leads_to, _CONNECT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise
        self.sock.settimeout(self.timeout)


class ManagerClient:
    """One kept-alive connection; not for use by two threads at once.

    Args:
        route: The route to the manager, or its URL.
        ca_pem: The only certificate that is trusted.
        token: This VM's bearer token.
        wait_s: How long the manager may let a long poll wait.
    """

    def __init__(self, route: Route | str, ca_pem: str, token: str, wait_s: float = 0.0) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=ca_pem)
        self._route = Route(route) if isinstance(route, str) else route
        self._connection = _Connection(self._route, context, _ANSWER_S + wait_s)
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
        }

    def reconnect(self) -> None:
        """Break off a call to an outdated address of the manager.

        For use by another thread; the caller then retries at the present address.
        """
        connection, there = self._connection, self._route.address()
        plain = connection.sock
        if plain is not None and connection.leads_to != there:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(plain, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        self._connection.close()

    def call(self, method: str, path: str, body: str | bytes | Path = "") -> bytes:
        """Return the body of the manager's answer.

        Args:
            path: Of the request.
            body: Of the request, or the file that holds it.

        Raises:
            NoManagerError: No answer, or a temporary error.
            VmFencedError: This VM has been given up.
            RefusedError: Any other answer but success.
        """
        reused = self._connection.sock is not None
        try:
            answer, content = self._ask(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            # A server may close a connection that was idle just as we use it again.
            if reused and not isinstance(error, TimeoutError):
                return self.call(method, path, body)
            raise NoManagerError(f"manager does not answer: {error!r}") from error
        if answer.status < 400:
            return content
        message = _reason(content) or answer.reason
        if answer.status in (401, 403, 409):
            raise VmFencedError(f"manager has given this VM up: {message}")
        if answer.status >= 500 or answer.status == 429:
            raise NoManagerError(f"manager answered {answer.status}: {message}")
        raise RefusedError(f"manager refused {path}: {message}")

    def _ask(
        self, method: str, path: str, body: str | bytes | Path
    ) -> tuple[http.client.HTTPResponse, bytes]:
        try:
            if isinstance(body, Path):
                # In blocks, each with the connection's time limit.
                size = {"Content-Length": str(body.stat().st_size)}
                with body.open("rb") as file:
                    self._connection.request(method, path, file, self._headers | size)
            else:
                content = body.encode() if isinstance(body, str) else body
                self._connection.request(method, path, content, self._headers)
            answer = self._connection.getresponse()
            return answer, answer.read()
        except BaseException:
            self._connection.close()
            raise


class Backoff:
    """Exponential backoff from 0.1 to 2 seconds, with jitter."""

    def __init__(self) -> None:
        self._next_s = _MIN_RETRY_S

    def next_s(self) -> float:
        """Return how long to wait before the next try."""
        wait_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, _MAX_RETRY_S)
        return wait_s

    def reset(self) -> None:
        """Start over after a success."""
        self._next_s = _MIN_RETRY_S


def _reason(content: bytes) -> str:
    """Return the ``error`` of the manager's JSON answer, if it is one."""
    try:
        data = json.loads(content)
    except ValueError:
        return ""
    return str(data.get("error", "")) if isinstance(data, dict) else ""


class LogSender:
    """Sends the ends of the logs in a VM's folder, each again once it has changed.

    Args:
        folder: The VM's work folder.
        post: Posts a message to the manager.
    """

    def __init__(self, folder: Path, vm_id: str, post: Callable[[str], object]) -> None:
        self._folder = folder
        self._vm_id = vm_id
        self._post = post
        self._sent: dict[str, tuple[int, int]] = {}
        """Time of change and size of each log as it was sent."""

    def send(self) -> None:
        """Send what has changed; where the manager does not take it, next time.

        Raises:
            VmFencedError: This VM has been given up.
        """
        changed: dict[str, tuple[int, int]] = {}
        tails = []
        for log in sorted(self._folder.glob("*.log")):
            found = log.stat()
            now = found.st_mtime_ns, found.st_size
            # ``NAME.1.log`` is the part before the last rotation.
            if log.stem.endswith(".1") or now == self._sent.get(log.name):
                continue
            changed[log.name] = now
            tails.append(messages.LogTail(name=log.name, text=tail(log)))
        if not tails:
            return
        try:
            self._post(encode(messages.LogTails(vm_id=self._vm_id, logs=tuple(tails))))
        except (NoManagerError, RefusedError):
            return
        self._sent |= changed


def tail(log: Path) -> str:
    """Return the end of a log.

    Raises:
        OSError: It cannot be read.
    """
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace")
