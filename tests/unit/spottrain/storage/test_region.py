"""The region of a bucket, which S3 names to everybody."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.fakes.http_server import running, url_of

from spottrain.storage.objects import bucket_region


class _Service(BaseHTTPRequestHandler):
    """As S3 answers HeadBucket: to strangers, for other regions and for no bucket."""

    def do_HEAD(self) -> None:
        name = self.path.strip("/")
        codes = {"elsewhere": 301, "private": 403, "gone": 404}
        self.send_response(codes[name])
        if name != "gone":
            self.send_header("x-amz-bucket-region", "eu-west-1")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with running(ThreadingHTTPServer(("127.0.0.1", 0), _Service)) as server:
        yield url_of(server)


def test_a_redirect_and_a_refusal_name_the_region(endpoint: str) -> None:
    assert bucket_region("elsewhere", endpoint) == "eu-west-1"
    assert bucket_region("private", endpoint) == "eu-west-1"


def test_without_an_answer_the_region_is_unknown(endpoint: str) -> None:
    assert bucket_region("gone", endpoint) == ""
    assert bucket_region("any", "http://127.0.0.1:9") == ""
