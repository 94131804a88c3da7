"""What the user's code prints, in the log that all processes of a VM share."""

from __future__ import annotations

import io
import sys
from typing import TextIO, cast

_MAX_LINE_CHARACTERS = 4096


class LabelledStream(io.TextIOBase):
    """Writes whole lines, each with who has printed it.

    Args:
        stream: The log.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""
        """A line that has no end yet, such as a progress bar."""
        self.label = ""
        """Such as ``rank 3``; empty: none."""

    def write(self, text: str) -> int:
        """Write the lines that are complete with ``text``."""
        *lines, self._begun = (self._begun + text).split("\n")
        if len(self._begun) > _MAX_LINE_CHARACTERS:
            lines, self._begun = [*lines, self._begun], ""
        prefix = f"[{self.label}] " if self.label else ""
        if lines:
            self._stream.write("".join(f"{prefix}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

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
