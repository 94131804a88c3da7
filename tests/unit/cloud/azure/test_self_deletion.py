"""The command by which a VM deletes itself, run by a real shell and a real curl."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.fakes.http_server import running

from spottrain.cloud.azure import requests

TOKEN = "the-secret-token"
VM = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/v"


class Both(HTTPServer):
    """The metadata service of a VM, and Resource Manager."""

    seen: list[tuple[str, str, str]]

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers as both."""

    server: Both

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer as the metadata service, which insists on its header."""
        told = VM
        if self.path.startswith("/metadata/identity/oauth2/token?"):
            told = json.dumps({"access_token": TOKEN, "client_id": "c", "resource": "r"})
        self._answer(200 if self.headers.get("Metadata") == "true" else 400, told)

    def do_DELETE(self) -> None:
        """Answer as Resource Manager."""
        self._answer(202, "")

    def _answer(self, status: int, told: str) -> None:
        authorization = self.headers.get("Authorization", "")
        self.server.seen.append((self.command, self.path, authorization))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(told.encode())


@pytest.fixture
def cloud() -> Iterator[Both]:
    server = Both(("127.0.0.1", 0), Handler)
    server.seen = []
    with running(server):
        yield server


def test_a_vm_deletes_itself_by_its_identity_and_shows_no_token(
    tmp_path: Path, cloud: Both
) -> None:
    curl = shutil.which("curl")
    assert curl is not None
    wrapper = tmp_path / "curl"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/argv\nexec {curl} "$@"\n')
    wrapper.chmod(0o755)
    command = requests.delete_itself(cloud.url, cloud.url)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["/bin/sh", "-c", command], env=environment, check=True, timeout=600)
    *_, (method, path, authorization) = cloud.seen
    assert (method, authorization) == ("DELETE", f"Bearer {TOKEN}")
    assert path.startswith(f"{VM}?api-version=")
    assert path.endswith("&forceDeletion=true")
    argv = (tmp_path / "argv").read_text()
    assert VM in argv
    assert TOKEN not in argv
