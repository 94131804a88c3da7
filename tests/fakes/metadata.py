"""A fake metadata service in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]


class FakeMetadata:
    """The service, seen from a test.

    Args:
        port: Where it listens on loopback.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=self._url, trust_env=False, timeout=600)

    def url(self, vm: str) -> str:
        """Return where a VM finds the service; for none, what such addresses begin with."""
        return f"{self._url}/{vm}".removesuffix("/")

    def ask(self, call: str, **arguments: Any) -> Any:
        """Call a method of the cloud's ``World``."""
        command = {"call": call, "arguments": arguments}
        answer = self._http.post("/fake", json=command)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, vm: str, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request as it is."""
        return self._http.request(method, self.url(vm) + path, **request)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


@contextmanager
def running(cloud: str) -> Iterator[FakeMetadata]:
    """Run the service of ``aws``, ``azure`` or ``gcp``."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.metadata_server", cloud],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        fake = FakeMetadata(int(process.stdout.readline()))
        with contextlib.closing(fake):
            yield fake
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
