"""A web server of files in memory: ETags, ranges, and connections that break."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.fakes.http_server import running, url_of


@dataclass
class Web:
    """What it serves and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By path, with the slash at the beginning."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each request."""
    authorized: list[str] = field(default_factory=list)
    """The ``Authorization`` of each request."""
    breaks_after: int | None = None
    """The next answer's connection breaks after so many bytes."""
    stalled: threading.Event | None = None
    """Set once a connection that would break stays open instead, until the client ends it."""
    claims: int | str | None = None
    """How large every file is said to be, whatever it is."""
    says: int | None = None
    """Every answer is this status."""
    knows_ranges: bool = True
    url: str = ""

    def gets(self) -> list[str]:
        """Return the ranges of all requests for content."""
        return [asked for method, _, asked in self.asked if method == "GET"]


class Server(ThreadingHTTPServer):
    """Answers for ``web``."""

    daemon_threads = True

    def __init__(self, web: Web) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.web = web


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        web = self.server.web
        content = web.files.get(self.path, b"")
        first, cut = 0, web.breaks_after
        if web.knows_ranges and (asked := self.headers.get("Range")):
            found = re.fullmatch(r"bytes=(\d+)-", asked)
            assert found is not None
            first = int(found[1])
        web.breaks_after = None
        self._answer(content[first:], first, cut)

    def _answer(self, body: bytes, first: int = 0, cut: int | None = None) -> None:
        web = self.server.web
        web.asked.append((self.command, self.path, self.headers.get("Range", "")))
        web.authorized.append(self.headers.get("Authorization", ""))
        content = web.files.get(self.path)
        status = 404 if content is None else 206 if first else 200
        self.send_response(web.says or status)
        if content is not None:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            length = len(content) - first if web.claims is None else web.claims
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None and web.stalled is not None:
            web.stalled.set()
            self.connection.recv(1)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve_web() -> Iterator[Web]:
    """Run the server on loopback."""
    web = Web()
    with running(Server(web)) as server:
        web.url = url_of(server)
        yield web
