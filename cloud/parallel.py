"""Parallel calls to a cloud."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

_THREADS = 16


def run_parallel(ask: Callable[[S], T], items: Sequence[S]) -> tuple[T, ...]:
    """Return the results for all items, in order.

    Raises:
        Exception: the first call's that failed, after all have run.
    """
    if len(items) == 1:
        return (ask(items[0]),)
    with ThreadPoolExecutor(_THREADS) as pool:
        # ``map`` would cancel what has not begun when one fails.
        calls = [pool.submit(ask, item) for item in items]
    return tuple(call.result() for call in calls)


def flat_map_parallel(ask: Callable[[S], Sequence[T]], items: Sequence[S]) -> tuple[T, ...]:
    """Return the concatenated results, such as the VMs of all regions.

    Raises:
        Exception: as ``run_parallel``.
    """
    return tuple(one for answer in run_parallel(ask, items) for one in answer)
