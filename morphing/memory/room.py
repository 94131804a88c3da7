"""Bytes of the two memories of a worker: its device's, and its VM's beside that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class WorkerBytes(NamedTuple):
    """What a worker needs, or has, of both memories."""

    device: int
    """Where it computes."""
    host: int = 0
    """Of its VM's memory where that is another one. As what it has, 0 means unknown:
    then it is no limit."""

    def beyond(self, room: WorkerBytes) -> int:
        """Return the bytes that ``room`` lacks; not above 0 if this fits into it."""
        over = self.device - room.device
        return max(over, self.host - room.host) if room.host else over

    def lacks_host(self, room: WorkerBytes) -> bool:
        """Return whether it is the VM's memory that is too small, the device's is not."""
        return self.device <= room.device and self.beyond(room) > 0


def largest(workers: Sequence[WorkerBytes]) -> WorkerBytes:
    """Return the maximum of each of both memories."""
    return WorkerBytes(max(w.device for w in workers), max(w.host for w in workers))


def smallest(rooms: Sequence[WorkerBytes]) -> WorkerBytes:
    """Return the minimum of each of both memories of all workers."""
    host = min((room.host for room in rooms if room.host), default=0)
    return WorkerBytes(min(room.device for room in rooms), host)


def total(workers: Sequence[WorkerBytes]) -> WorkerBytes:
    """Return the sum of each of both memories."""
    return WorkerBytes(sum(w.device for w in workers), sum(w.host for w in workers))


def times(room: WorkerBytes, workers: int) -> WorkerBytes:
    """Return what so many workers of equal ``room`` have."""
    return WorkerBytes(room.device * workers, room.host * workers)


def megabytes(num_bytes: int) -> str:
    """Return bytes as text in megabytes, rounded up."""
    return f"{math.ceil(num_bytes / 100_000) / 10:,.1f} MB"
