"""An S3 server on loopback that answers what it is told to hold only once it is let go.

Stands for a bucket that takes its time, without any time in it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.fakes.http_server import running, url_of

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_REGION": "us-east-1",
}
_DATE = "2026-01-01T00:00:00.000Z"

Held = Callable[[str, str], bool]
"""Whether to hold a request, by its method and the object's name."""


class HeldS3:
    """What the server keeps and holds."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.lock = threading.Lock()
        self.endpoint = ""
        self._held: Held = lambda method, key: False
        self._changed = threading.Condition()
        self.waiting: list[str] = []
        """Names of the objects whose requests are held now."""

    def url(self, prefix: str) -> str:
        """Return what a job file would say."""
        return f"s3://bucket/{prefix}?endpoint_url={self.endpoint}"

    def hold(self, held: Held) -> None:
        """Hold such requests from now on, and no others."""
        with self._changed:
            self._held = held
            self._changed.notify_all()

    def let_go(self) -> None:
        """Answer everything."""
        self.hold(lambda method, key: False)

    def until_held(self, part: str, timeout_s: float = 60.0) -> None:
        """Wait until a request for an object with ``part`` in its name is held."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: any(part in key for key in self.waiting), timeout_s
            )
        assert found, f"no request for {part} came"

    def wait(self, method: str, key: str) -> None:
        """Return once a request may be answered."""
        with self._changed:
            if self._held(method, key):
                self.waiting.append(key)
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._held(method, key))
                self.waiting.remove(key)


@contextmanager
def held_s3() -> Iterator[HeldS3]:
    """Run the server."""
    s3 = HeldS3()

    class Handler(_Handler):
        store = s3

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    s3.endpoint = url_of(server)
    with running(server):
        try:
            yield s3
        finally:
            s3.let_go()


class _Handler(BaseHTTPRequestHandler):
    """The part of S3's API that obstore uses for small objects."""

    protocol_version = "HTTP/1.1"
    store: HeldS3

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle(self) -> None:
        """Serve a connection; clients that are killed leave theirs."""
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        query = parse_qs(parts.query, keep_blank_values=True)
        self.store.wait(self.command, key or query.get("prefix", [""])[0])
        return key, query

    def _answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        data = self._body()
        key, _ = self._asked()
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        with self.store.lock:
            is_new = self.headers.get("If-None-Match") == "*"
            if is_new and key in self.store.objects:
                code = b"<Error><Code>PreconditionFailed</Code></Error>"
                self._answer(412, code)
                return
            self.store.objects[key] = data, etag
        self._answer(200, ETag=etag)

    def do_GET(self) -> None:
        key, query = self._asked()
        if not key or "list-type" in query:
            self._list(query)
            return
        with self.store.lock:
            found = self.store.objects.get(key)
        if found is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        date = "Thu, 01 Jan 2026 00:00:00 GMT"
        self._answer(200, found[0], ETag=found[1], Last_Modified=date)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        items, folders = "", set[str]()
        with self.store.lock:
            found = sorted(self.store.objects.items())
        for name, (data, etag) in found:
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            items += (
                f"<Contents><Key>{escape(name)}</Key><LastModified>{_DATE}"
                f"</LastModified><ETag>{escape(etag)}</ETag><Size>{len(data)}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        items += "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
            for one in sorted(folders)
        )
        text = (
            '<?xml version="1.0"?><ListBucketResult><Name>bucket</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>{items}"
            "</ListBucketResult>"
        )
        self._answer(200, text.encode(), Content_Type="application/xml")

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        with self.store.lock:
            self.store.objects.pop(key, None)
        self._answer(204)

    def do_POST(self) -> None:
        """Delete several objects."""
        data = self._body().decode()
        self._asked()
        keys = [part.partition("</Key>")[0] for part in data.split("<Key>")[1:]]
        with self.store.lock:
            for key in keys:
                self.store.objects.pop(key, None)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
