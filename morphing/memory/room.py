"""Bytes of the memories of a worker: its device's, and its VM's beside that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class WorkerBytes(NamedTuple):
    """What a worker needs, or has, of each memory."""

    device: int
    """Where it computes."""
    host: int = 0
    """Of its VM's memory where that is another one. As what it has, 0 means unknown:
    then it is no limit."""
    locked: int = 0
    """Of ``host`` that is page-locked. As what it has, 0 means no limit, too."""

    def beyond(self, room: WorkerBytes) -> int:
        """Return the bytes that ``room`` lacks; not above 0 if this fits into it."""
        over = self.device - room.device
        over = max(over, self.host - room.host) if room.host else over
        return max(over, self.locked - room.locked) if room.locked else over

    def lacks_host(self, room: WorkerBytes) -> bool:
        """Return whether it is the VM's memory that is too small, the device's is not."""
        return self.device <= room.device and self.beyond(room) > 0

    def lacks_lock(self, room: WorkerBytes) -> bool:
        """Return whether more would be page-locked than may be."""
        return 0 < room.locked < self.locked


def largest(workers: Sequence[WorkerBytes]) -> WorkerBytes:
    """Return the maximum of each memory."""
    return WorkerBytes(*map(max, zip(*workers, strict=True)))


def smallest(rooms: Sequence[WorkerBytes]) -> WorkerBytes:
    """Return the minimum of each memory of all workers."""
    device, *others = zip(*rooms, strict=True)
    return WorkerBytes(min(device), *(min(filter(None, other), default=0) for other in others))


def total(workers: Sequence[WorkerBytes]) -> WorkerBytes:
    """Return the sum of each memory."""
    return WorkerBytes(*map(sum, zip(*workers, strict=True)))


def times(room: WorkerBytes, workers: int) -> WorkerBytes:
    """Return what so many workers of equal ``room`` have."""
    return WorkerBytes(*(num_bytes * workers for num_bytes in room))


def megabytes(num_bytes: int) -> str:
    """Return bytes as text in megabytes, rounded up."""
    return f"{math.ceil(num_bytes / 100_000) / 10:,.1f} MB"
