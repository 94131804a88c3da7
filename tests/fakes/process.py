"""A fake service in a process of its own, as a test sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 600.0
"""How long clients wait for an answer of a fake, which a busy machine keeps waiting too."""


class Fake:
    """The service.

    Args:
        url: Where it listens.
        verify: See ``httpx.Client``.
    """

    def __init__(self, url: str, verify: Any = True) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=ANSWER_S, verify=verify)

    def ask(self, call: str, **arguments: Any) -> Any:
        """Call a method of the fake's ``World``."""
        answer = self.http.post("/fake", json={"call": call, "arguments": arguments})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self) -> None:
        """Close the connections."""
        self.http.close()


@contextmanager
def serving(module: str, *arguments: str) -> Iterator[int]:
    """Run a fake's server; yield the port where it listens on loopback."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
