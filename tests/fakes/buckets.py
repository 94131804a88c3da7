"""Buckets of GCS and Azure on loopback, as far as small objects need them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.fakes.http_server import running, url_of

BUCKET = "bucket"
S3_REGION = "eu-west-1"
_PAGE = 2
_DATE = "Fri, 20 Nov 2026 00:00:00 GMT"


class _Handler(BaseHTTPRequestHandler):
    objects: dict[str, bytes]
    only_new = ("", "")
    """Header and value that ask not to overwrite."""
    taken, stored, deleted = 412, 200, 204
    """Status codes."""

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        header, value = self.only_new
        if self._name in self.objects and self.headers.get(header) == value:
            self.answer(self.taken)
            return
        self.objects[self._name] = data
        self.answer(self.stored)

    def do_GET(self) -> None:
        if not self._name:
            self.answer(200, self._list().encode())
        elif self._name in self.objects:
            self.answer(200, self.objects[self._name])
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_HEAD = do_GET  # noqa: N815

    def do_DELETE(self) -> None:
        self.answer(self.delete(self._name))

    def delete(self, name: str) -> int:
        """Delete an object; return a status code."""
        return 404 if self.objects.pop(name, None) is None else self.deleted

    @property
    def _name(self) -> str:
        return name_of(self.path)

    def _list(self) -> str:
        asked = {k: v[0] for k, v in parse_qs(urlsplit(self.path).query).items()}
        prefix = asked.get("prefix", "")
        after = asked.get("continuation-token", asked.get("marker", ""))
        below = sorted(x for x in self.objects if x.startswith(prefix) and x > after)
        if "delimiter" in asked:
            parts = {x.removeprefix(prefix).partition("/")[0] for x in below}
            return self.page([], [f"{prefix}{part}/" for part in sorted(parts)], "")
        page = below[:_PAGE]
        return self.page(page, [], page[-1] if page != below else "")

    def page(self, names: list[str], folders: list[str], more: str) -> str:
        """Return a page of a listing."""
        raise NotImplementedError

    def answer(self, code: int, body: bytes = b"", kind: str = "text/xml") -> None:
        """Send a reply."""
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", kind)
        self.send_header("Last-Modified", _DATE)
        self.send_header("ETag", '"e"')
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Gcs(_Handler):
    """The XML API."""

    only_new = ("x-goog-if-generation-match", "0")

    def page(self, names: list[str], folders: list[str], more: str) -> str:
        items = [
            f"<Contents><Key>{escape(x)}</Key><Size>{len(self.objects[x])}</Size>"
            "<LastModified>2026-11-20T00:00:00Z</LastModified><ETag>e</ETag></Contents>"
            for x in names
        ]
        items += [f"<CommonPrefixes><Prefix>{escape(x)}</Prefix></CommonPrefixes>" for x in folders]
        token = more and f"<NextContinuationToken>{more}</NextContinuationToken>"
        return f"<ListBucketResult>{''.join(items)}{token}</ListBucketResult>"


class _S3(_Gcs):
    """S3's, in ``S3_REGION``: requests that are signed for another one are redirected
    ("Making requests to S3", temporary and permanent redirects)."""

    only_new = ("If-None-Match", "*")

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/s3", self._signed)
        if scope is not None and scope[1] == S3_REGION:
            return True
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(301)
        self.send_header("x-amz-bucket-region", S3_REGION)
        body = b"<Error><Code>PermanentRedirect</Code></Error>"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return False

    @property
    def _signed(self) -> str:
        return self.headers.get("Authorization", "")

    def do_POST(self) -> None:
        """Delete several at once."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", body)
        for key in keys:
            self.objects.pop(unescape(key), None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())


class _Azure(_Handler):
    """The Blob service."""

    only_new = ("If-None-Match", "*")
    taken, stored, deleted = 409, 201, 202

    def do_POST(self) -> None:
        """Delete several at once."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        parts = [
            f"--batch\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            f"HTTP/1.1 {self.delete(name_of(path))} .\r\n\r\n"
            for number, path in enumerate(re.findall(r"DELETE (\S+) HTTP", body))
        ]
        reply = f"{''.join(parts)}--batch--\r\n".encode()
        self.answer(202, reply, "multipart/mixed; boundary=batch")

    def page(self, names: list[str], folders: list[str], more: str) -> str:
        items = [
            f"<Blob><Name>{escape(x)}</Name><Properties><Last-Modified>{_DATE}"
            f"</Last-Modified><Content-Length>{len(self.objects[x])}</Content-Length>"
            "<Content-Type>a/b</Content-Type><Etag>e</Etag></Properties></Blob>"
            for x in names
        ]
        items += [f"<BlobPrefix><Name>{escape(x)}</Name></BlobPrefix>" for x in folders]
        return (
            f"<EnumerationResults><Blobs>{''.join(items)}</Blobs>"
            f"<NextMarker>{more}</NextMarker></EnumerationResults>"
        )


def name_of(path: str) -> str:
    """Return the object that a request's path names."""
    return unquote(urlsplit(path).path).removeprefix(f"/{BUCKET}").strip("/")


@contextlib.contextmanager
def serve(cloud: str) -> Iterator[str]:
    """Serve an empty bucket of ``s3``, ``gs`` or ``az``; give the server's address."""
    kind = {"s3": _S3, "gs": _Gcs, "az": _Azure}[cloud]
    handler = type("Handler", (kind,), {"objects": {}})
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield url_of(server)


def s3_environment(endpoint: str, region: str) -> dict[str, str]:
    """Return the variables with which a machine set up for a region asks S3 here."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_REGION": region,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }


def write_key(file: Path, endpoint: str) -> None:
    """Write a key file of GCS that needs no token."""
    key = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    file.write_text(json.dumps({**key, "gcs_base_url": endpoint, "disable_oauth": True}))
