"""The version of this software, down to its sources: which software do two processes run?

Standard library only: the manager and the agents on its VMs compare theirs.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from spottrain import __version__

_ROOT = Path(__file__).parent
PATH = str(_ROOT.parent)
"""Folder of this package, for ``PYTHONPATH``."""
_DIGITS = 12


def sources(ending: str = "py") -> Iterator[tuple[str, Path]]:
    """Yield our modules, each under its name in an archive, always in the same order.

    Args:
        ending: Of the files; others than modules are tables, which end in ``csv``.
    """
    for folder in (_ROOT, *sorted(path for path in _ROOT.iterdir() if path.is_dir())):
        # In a checkout the folders are symbolic links.
        real, below = folder.resolve(), "" if folder == _ROOT else "**/"
        for path in sorted(real.glob(f"{below}*.{ending}")):
            name = Path("spottrain") / folder.relative_to(_ROOT) / path.relative_to(real)
            yield name.as_posix(), path


def version_of(contents: Iterable[tuple[str, bytes]]) -> str:
    """Return the version of software that consists of these modules.

    ``__version__`` and the first digits of a SHA-256 of the modules' names and contents.
    """
    digest = hashlib.sha256()
    for name, content in contents:
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return f"{__version__}+{digest.hexdigest()[:_DIGITS]}"


@functools.cache
def software_version() -> str:
    """Return the version of this software, such as ``0.1.0+3f786850e387``."""
    return version_of((name, path.read_bytes()) for name, path in sources())


def is_older(version: str, other: str) -> bool:
    """Return True if ``version`` was released before ``other``.

    Two versions that differ in their sources alone have no order: neither is older.
    """
    return _release(version) < _release(other)


def _release(version: str) -> tuple[int, ...]:
    numbers = version.partition("+")[0].split(".")
    return tuple(int(number) if number.isdecimal() else 0 for number in numbers)
