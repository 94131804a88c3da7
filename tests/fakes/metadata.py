"""A fake metadata service in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from tests.fakes.process import Fake, serving


class FakeMetadata(Fake):
    """The service."""

    def url_of(self, vm: str) -> str:
        """Return where a VM finds the service; for none, what such addresses begin with."""
        return f"{self.url}/{vm}".removesuffix("/")

    def send(self, vm: str, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request as it is."""
        return self.http.request(method, self.url_of(vm) + path, **request)


@contextmanager
def running(cloud: str) -> Iterator[FakeMetadata]:
    """Run the service of ``aws``, ``azure`` or ``gcp``."""
    with (
        serving("tests.fakes.metadata_server", cloud) as port,
        contextlib.closing(FakeMetadata(f"http://127.0.0.1:{port}")) as fake,
    ):
        yield fake
