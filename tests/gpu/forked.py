"""Children of a process that has imported torch and makes no CUDA call itself."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from spottrain.pipeline.comm.groups import serve_rendezvous

Say = Callable[[dict[str, Any]], None]
"""Sends a message, as JSON, to the parent."""


class Child:
    """A forked process that says something to its parent.

    Args:
        body: What it runs.
    """

    def __init__(self, body: Callable[[Say], object]) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _run(body, writing)
        os.close(writing)
        self._said = os.fdopen(reading)
        self.pidfd = os.pidfd_open(self.pid)

    def hear(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Return its next message.

        Raises:
            RuntimeError: It has ended, or is silent.
        """
        if not select.select([self._said], [], [], timeout_s)[0]:
            raise RuntimeError(f"a child said nothing for {timeout_s:.0f} s")
        if not (line := self._said.readline()):
            raise RuntimeError("a child ended early: see its error above")
        message: dict[str, Any] = json.loads(line)
        return message

    def has_ended(self, timeout_s: float) -> bool:
        """Return whether it has ended, or does so in time."""
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def kill(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, if it still runs."""
        self.kill()
        os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self._said.close()


def _run(body: Callable[[Say], object], writing: int) -> NoReturn:
    code = 1
    try:
        out = os.fdopen(writing, "w", buffering=1)
        body(lambda message: print(json.dumps(message), file=out, flush=True))
        code = 0
    except BaseException:  # noqa: BLE001  nothing may unwind into the parent's code
        traceback.print_exc(file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def start_store() -> tuple[Child, int]:
    """Return a rendezvous store and its port."""
    child = Child(lambda say: serve_rendezvous("127.0.0.1", lambda p: say({"port": p})))
    return child, int(child.hear()["port"])
