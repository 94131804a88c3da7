"""Keeps the C library's heap near to what is in use.

Freed tensors of some megabytes leave holes between small things that live on. Later
tensors do not always fit into the same hole, so that a worker would slowly touch all of
them: a second model's worth of memory after its parameters were let go. Hence blocks of
a model under construction lie apart, and what is free goes back where much was freed.
On C libraries without these calls nothing happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_PAGES_BYTES = 128 * 1024
_COMPUTING_MMAP_BYTES, _COMPUTING_TRIM_BYTES = 32 * 1024**2, 64 * 1024**2
"""What glibc arrives at by itself when large blocks come and go: no page faults."""


@contextmanager
def blocks_apart() -> Iterator[None]:
    """Let every block of 128 KiB and more vanish as soon as it is freed.

    That costs page faults, so afterwards the heap is set for computing.
    """
    _set_thresholds(_PAGES_BYTES, _PAGES_BYTES)
    try:
        yield
    finally:
        _set_thresholds(_COMPUTING_MMAP_BYTES, _COMPUTING_TRIM_BYTES)


def give_back() -> None:
    """Return free pages to the system; takes milliseconds."""
    if hasattr(_LIBRARY, "malloc_trim"):
        _LIBRARY.malloc_trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    if hasattr(_LIBRARY, "mallopt"):
        _LIBRARY.mallopt(_MMAP_THRESHOLD, mmap_bytes)
        _LIBRARY.mallopt(_TRIM_THRESHOLD, trim_bytes)
