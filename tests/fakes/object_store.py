"""An S3 server on loopback, with a bucket of its own for each test that asks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import unittest.mock
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
}
"""What whoever talks to the server must have in its environment."""


@dataclass(frozen=True)
class S3:
    """A bucket on the server."""

    endpoint: str
    bucket: str

    def url(self, prefix: str = "") -> str:
        """Return what a job file would say."""
        return f"s3://{self.bucket}/{prefix}?endpoint_url={self.endpoint}"


@contextlib.contextmanager
def serve_s3() -> Iterator[S3]:
    """Run the server, in a process of its own, with one empty bucket."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.object_store"],
        env={**os.environ, **CREDENTIALS, "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = json.loads(server.stdout.readline())
        yield new_bucket(f"http://127.0.0.1:{port}")
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()


@contextlib.contextmanager
def bucket() -> Iterator[S3]:
    """Run the server, with what it takes to use it in this process's environment."""
    with serve_s3() as s3, unittest.mock.patch.dict(os.environ, CREDENTIALS):
        yield s3


def new_bucket(endpoint: str) -> S3:
    """Make an empty bucket on a running server."""
    bucket = f"bucket-{secrets.token_hex(4)}"
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    with urllib.request.urlopen(request):
        return S3(endpoint, bucket)


def main() -> None:
    """Serve until standard input ends; say the port first."""
    import logging
    import threading

    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").disabled = True
    dispatcher = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, dispatcher, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # threads still serve


if __name__ == "__main__":
    main()
