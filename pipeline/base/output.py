"""What the user's code prints, in the log that all processes of a VM share."""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
import time
from collections.abc import Callable
from typing import TextIO, cast

from spottrain.redaction import redacted

_MAX_LINE_CHARACTERS = 4096
_UNBUFFERED = 2
"""``_IONBF`` of stdio.h."""
_PATIENCE_S = 1.0
"""Shorter than that, no end of a line is missed."""


class LabelledStream(io.TextIOBase):
    """Writes whole lines, each with who has printed it, without the job's secrets.

    A line that has no end yet, such as a progress bar, is written as it stands when it is
    flushed, or continued after a while; at most once a second.

    Args:
        stream: The log.
        now_s: A monotonic clock.
    """

    def __init__(self, stream: TextIO, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._now_s = stream, now_s
        self._begun = ""
        """A line that has no end yet."""
        self._since_s = 0.0
        """When it was begun."""
        self._written_s = -_PATIENCE_S
        """When such a line was last written."""
        self.label = ""
        """Such as ``rank 3``; empty: none."""

    def write(self, text: str) -> int:
        """Write the lines that are complete with ``text``."""
        if not self._begun:
            self._since_s = self._now_s()
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._since_s = self._now_s()
            self._write(lines)
        if len(self._begun) > _MAX_LINE_CHARACTERS:
            self.finish()
        elif self._now_s() - self._since_s > _PATIENCE_S:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write the line that has no end yet, unless one was written just now."""
        if self._now_s() - self._written_s >= _PATIENCE_S:
            self.finish()

    def finish(self) -> None:
        """Write what is left."""
        if self._begun:
            self._write([self._begun])
            self._begun, self._written_s = "", self._now_s()
        self._stream.flush()

    def _write(self, lines: list[str]) -> None:
        prefix = f"[{self.label}] " if self.label else ""
        self._stream.write(redacted("".join(f"{prefix}{line}\n" for line in lines)))
        self._stream.flush()

    def fileno(self) -> int:
        """Return the log's file descriptor."""
        return self._stream.fileno()


def label_output(label: str) -> None:
    """Name this process in the lines that it prints from now on."""
    streams = [
        stream if isinstance(stream, LabelledStream) else LabelledStream(stream)
        for stream in (sys.stdout, sys.stderr)
    ]
    for stream in streams:
        stream.label = label
    sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], streams)


def unbuffer_c_output() -> None:
    """Let what extensions print by C's stdio appear at once, not once 4 KB have come or
    never, where the process is killed. Those that are forked later inherit it."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError, ValueError):  # a C library of another kind
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _UNBUFFERED, 0)


def finish_output() -> None:
    """Write what was printed without an end of line, as before a fork or an exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LabelledStream):
            stream.finish()
        else:
            stream.flush()
