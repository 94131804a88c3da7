"""Keeps the C library's heap close to the memory in use.

Freed tensors of some megabytes leave holes between small blocks that live on. Later
tensors do not always fit into the same hole, so that a worker would slowly touch more
and more memory (glibc keeps blocks up to 32 MB on its heap once it has seen such ones
freed). Hence large blocks are mapped on their own and unmapped as soon as they are
freed: all those of a model under construction; in training those that are larger than
activations, such as gradients of weights, temporaries of optimizers and copies for
checkpoints. Activations are allocated all the time and stay on the heap, where they
cost no page faults; so do blocks that are too small to leave large holes. On C
libraries without these calls nothing happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MIN_MMAP_BYTES, _MAX_MMAP_BYTES = 4 * 1024**2, 32 * 1024**2
_BUILD_MMAP_BYTES = 128 * 1024
_FREE_AT_THE_TOP_BYTES = 64 * 1024**2


@contextmanager
def mmap_large_blocks() -> Iterator[None]:
    """Map every block of 128 KiB and more on its own inside, of 32 MiB afterwards."""
    _set_thresholds(_BUILD_MMAP_BYTES, _BUILD_MMAP_BYTES)
    try:
        yield
    finally:
        _set_thresholds(_MAX_MMAP_BYTES, _FREE_AT_THE_TOP_BYTES)


def tune_for_activations(largest_bytes: int) -> None:
    """Keep blocks far larger than activations off the heap from now on.

    Args:
        largest_bytes: Size of the largest activation; 0 if it is not known yet.
    """
    apart_bytes = min(max(2 * largest_bytes, _MIN_MMAP_BYTES), _MAX_MMAP_BYTES)
    _set_thresholds(apart_bytes, _FREE_AT_THE_TOP_BYTES)


def trim_heap() -> None:
    """Return free pages to the system; takes milliseconds."""
    if hasattr(_LIBRARY, "malloc_trim"):
        _LIBRARY.malloc_trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    if hasattr(_LIBRARY, "mallopt"):
        _LIBRARY.mallopt(_MMAP_THRESHOLD, mmap_bytes)
        _LIBRARY.mallopt(_TRIM_THRESHOLD, trim_bytes)
