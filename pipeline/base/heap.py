"""Keeps the C library's heap near to what is in use.

Freed tensors of some megabytes leave holes between small things that live on. Later
tensors do not always fit into the same hole, so that a worker would slowly touch more
and more memory (glibc keeps blocks up to 32 MB on its heap once it has seen such ones
freed). Hence large blocks lie apart, where they vanish as soon as they are freed: all
those of a model under construction; in training those that are larger than activations,
such as gradients of weights, temporaries of optimizers and copies for checkpoints.
Activations come and go all the time, and stay where no page fault is paid for them; so
does whatever is too small to leave a hole worth mentioning.
On C libraries without these calls nothing happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARY = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LEAST_APART_BYTES, _MOST_APART_BYTES = 4 * 1024**2, 32 * 1024**2
_BUILDING_BYTES = 128 * 1024
_FREE_AT_THE_TOP_BYTES = 64 * 1024**2


@contextmanager
def blocks_apart() -> Iterator[None]:
    """Keep every block of 128 KiB and more off the heap inside, 32 MiB afterwards."""
    _set_thresholds(_BUILDING_BYTES, _BUILDING_BYTES)
    try:
        yield
    finally:
        _set_thresholds(_MOST_APART_BYTES, _FREE_AT_THE_TOP_BYTES)


def suit_activations(largest_bytes: int) -> None:
    """Keep off the heap what is far larger than activations, from now on.

    Args:
        largest_bytes: Size of the largest activation.
    """
    apart_bytes = min(max(2 * largest_bytes, _LEAST_APART_BYTES), _MOST_APART_BYTES)
    _set_thresholds(apart_bytes, _FREE_AT_THE_TOP_BYTES)
    give_back()


def give_back() -> None:
    """Return free pages to the system; takes milliseconds."""
    if hasattr(_LIBRARY, "malloc_trim"):
        _LIBRARY.malloc_trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    if hasattr(_LIBRARY, "mallopt"):
        _LIBRARY.mallopt(_MMAP_THRESHOLD, mmap_bytes)
        _LIBRARY.mallopt(_TRIM_THRESHOLD, trim_bytes)
