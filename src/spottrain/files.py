"""Files that are written whole or not at all, their folders, locks and packages."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import os
import secrets
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

PUBLIC, PRIVATE = 0o666, 0o600
"""Modes of new files, before the umask."""


def make_folder(folder: Path, within: Path) -> None:
    """Make a folder of the owner's alone, with those on the way to it.

    Args:
        folder: It may be there.
        within: A folder above it, which is not made anew if somebody has removed it.

    Raises:
        OSError: ``within`` is not there, or its disk refuses.
    """
    for name in folder.relative_to(within).parts:
        within /= name
        within.mkdir(mode=0o700, exist_ok=True)


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


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock among processes and threads; yields whether it is held (if ``wait``, always)."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(file)


def packed(files: Iterable[tuple[str, bytes]], mode: int) -> bytes:
    """Return files as a tar.gz archive, the same bytes each time.

    Args:
        files: Names and contents.
        mode: Of all files.
    """
    buffer = io.BytesIO()
    with (
        # The usual level 9 takes three times as long, for a hundredth less to send.
        gzip.GzipFile("", "wb", 6, fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
