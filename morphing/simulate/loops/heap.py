"""An event queue: a binary heap in an array that grows.

A heap is an int64 array of rows (time, what), or a list of them. Row 0 holds the number of
events; the rows after it are the heap, the earliest event in row 1. Events at the same time
come out in any order.
"""

from __future__ import annotations

import numpy as np

from spottrain.morphing.schedules.compiled import jitable
from spottrain.morphing.schedules.types import Numbers

TIME, WHAT = 0, 1


@jitable
def make_heap(capacity: int) -> Numbers:
    """Return an empty heap with room for ``capacity`` events."""
    return np.zeros((capacity + 1, 2), np.int64)


@jitable
def push(heap: Numbers, time: int, what: int) -> Numbers:
    """Add an event; returns the heap, which may have moved."""
    size = heap[0][0] + 1
    if size == len(heap):
        grown = np.zeros((2 * size, 2), np.int64)
        for event in range(size):
            grown[event][TIME] = heap[event][TIME]
            grown[event][WHAT] = heap[event][WHAT]
        heap = grown
    heap[0][0] = size
    child = size
    while child > 1:
        above, row = heap[child // 2], heap[child]
        if above[TIME] <= time:
            break
        row[TIME] = above[TIME]
        row[WHAT] = above[WHAT]
        child //= 2
    row = heap[child]
    row[TIME] = time
    row[WHAT] = what
    return heap


@jitable
def pop(heap: Numbers) -> int:
    """Remove the earliest event and return what it is."""
    what = heap[1][WHAT]
    size = heap[0][0]
    time, last = heap[size][TIME], heap[size][WHAT]
    size -= 1
    heap[0][0] = size
    parent = 1
    while 2 * parent <= size:
        child = 2 * parent
        if child < size and heap[child + 1][TIME] < heap[child][TIME]:
            child += 1
        below, row = heap[child], heap[parent]
        if below[TIME] >= time:
            break
        row[TIME] = below[TIME]
        row[WHAT] = below[WHAT]
        parent = child
    row = heap[parent]
    row[TIME] = time
    row[WHAT] = last
    return int(what)
