"""A file that another machine appends to, as a stream. Standard library only."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any

_LOOK_S, _IDLE_LOOK_S = 0.1, 1.0
"""Time between two looks into the shared folder, soon after a request and later."""
_BUSY_S = 30.0


class Tail(io.RawIOBase):
    """A growing file as a stream, until ``close_soon``.

    It is opened for each look: NFS shows what others have written only then (nfs(5),
    "Close-to-open cache consistency").
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._heard_s = path, 0, time.monotonic()
        self._over = threading.Event()

    def readable(self) -> bool:
        """Return True."""
        return True

    def close_soon(self) -> None:
        """Let the next read find the end."""
        self._over.set()

    def readinto(self, buffer: Any) -> int:
        """Read what was appended; wait for it."""
        while not self._over.is_set():
            with open(self._path, "rb") as file:
                file.seek(self._at)
                data = file.read(len(buffer))
            if data:
                buffer[: len(data)] = data
                self._at += len(data)
                self._heard_s = time.monotonic()
                return len(data)
            is_idle = time.monotonic() - self._heard_s > _BUSY_S
            self._over.wait(_IDLE_LOOK_S if is_idle else _LOOK_S)
        return 0
