"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

PUBLIC, PRIVATE = 0o666, 0o600
"""Modes of new files, before the umask."""


def write_whole(
    path: Path, content: str | bytes, *, mode: int = PUBLIC, durable: bool = False
) -> None:
    """Write a file; readers find what was there before, or all of this.

    Args:
        path: The file; its folder must exist.
        content: As UTF-8, if it is text.
        mode: Of the file, from its first byte on.
        durable: Wait until the disk has it.

    Raises:
        OSError: It was not written; what was there before is.
    """
    data = content.encode() if isinstance(content, str) else content
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, mode), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
