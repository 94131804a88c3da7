"""Packs our own software for transfer to a host.

The agent needs only the standard library, and to read GPUs ``pynvml``, one file of plain
Python that is sent along. Compiled dependencies of the runtime (torch, numpy,
safetensors) must be installed on the host. obstore, which only buckets need, is included
if the host has the same platform as this machine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spottrain.files import packed
from spottrain.version import sources


@dataclass(frozen=True, slots=True)
class Package:
    """A packed package."""

    archive: bytes
    """tar.gz of the package ``spottrain``, of ``pynvml``, and of obstore if requested."""
    sha256: str


_packing = threading.Lock()


def package(with_obstore: bool = False) -> Package:
    """Return this software, packed; the same bytes each time.

    Args:
        with_obstore: Include the local obstore; see ``carries_obstore``.
    """
    with _packing:  # else each thread would pack for its host
        return _packed(with_obstore)


def carries_obstore(host: Mapping[str, str]) -> bool:
    """Return True if the local obstore works on a host.

    Args:
        host: Result of ``HostAgent.probe``.
    """
    here = {"system": platform.system(), "machine": platform.machine()}
    alike = all(host[name] == value for name, value in here.items())
    return alike and _obstore() is not None


def _obstore() -> Path | None:
    found = importlib.util.find_spec("obstore")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _obstore_files() -> Iterator[tuple[str, Path]]:
    if (root := _obstore()) is not None:
        for pattern in ("**/*.py", "*.so"):
            for path in sorted(root.glob(pattern)):
                yield f"obstore/{path.relative_to(root).as_posix()}", path


def _nvml_files() -> Iterator[tuple[str, Path]]:
    found = importlib.util.find_spec("pynvml")
    if found is not None and found.origin is not None:
        yield "pynvml.py", Path(found.origin)


@functools.cache
def _packed(with_obstore: bool) -> Package:
    obstore = _obstore_files() if with_obstore else ()
    files = (*sources(), *_nvml_files(), *obstore)
    data = packed(((name, path.read_bytes()) for name, path in files), 0o644)
    return Package(data, hashlib.sha256(data).hexdigest())
