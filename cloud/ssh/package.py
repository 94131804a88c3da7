"""The software that is carried to a host: our own modules, as they are here.

Standard library on the agent's side; what the runtime needs beside (torch, numpy,
safetensors) is compiled for a machine and must be on the host.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path

from spottrain import errors


@dataclass(frozen=True, slots=True)
class Package:
    """A packed package."""

    archive: bytes
    """tar.gz whose only top folder is ``spottrain``."""
    sha256: str


_packing = threading.Lock()


def package() -> Package:
    """Return this very software, packed; the same bytes each time."""
    with _packing:  # many hosts are made ready at once: else each thread would pack
        return _packed()


@functools.cache
def _packed() -> Package:
    root = Path(errors.__file__).parent
    buffer = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", fileobj=buffer, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for folder in (root, *sorted(path for path in root.iterdir() if path.is_dir())):
            pattern = "*.py" if folder == root else "**/*.py"
            # In a checkout the folders are links, which would lead nowhere elsewhere.
            for path in sorted(folder.resolve().glob(pattern)):
                below = path.relative_to(folder.resolve()).as_posix()
                name = f"{folder.relative_to(root).as_posix()}/{below}"
                member = tarfile.TarInfo(f"spottrain/{name.removeprefix('./')}")
                content = path.read_bytes()
                member.size, member.mode = len(content), 0o644
                archive.addfile(member, io.BytesIO(content))
    data = buffer.getvalue()
    return Package(data, hashlib.sha256(data).hexdigest())
