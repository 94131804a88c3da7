"""Groups of one generation: formed once, cut at once, and the pipeline's directed links.

Three facts of gloo shape this file. A receive cannot be polled, so a thread a directed
link waits and puts arrivals in a queue. A message leaves only once its receiver has said
that it waits for it; so receives are posted before the message is sent, where its shape is
known, or it would travel three times as long. And a receive from a peer that lives on,
but has left the group, ends only when its connection does; so a rank that meets an error
shuts down the generation's TCP connections itself (``Connections.cut``), which ends every
pending operation here and at its peers within milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

_MAX_DIMENSIONS = 8
_MAX_PENDING_SENDS = 16
_GATHER_TAG = 0
_AHEAD = 2
"""Tensors that a receiver is ready for, as long as they look like those before them."""
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
)


class GenerationBrokenError(Exception):
    """A peer of this generation is gone; its groups are of no more use."""


class Connections:
    """The TCP connections that were opened since this object was made."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._ours: frozenset[tuple[int, str]] | None = None

    def seal(self) -> None:
        """Take what is open now as ours; what is opened later is somebody else's."""
        self._ours = _sockets() - self._before

    def cut(self) -> None:
        """Shut them down, both ways, without closing them: their owner still polls."""
        ours = _sockets() - self._before if self._ours is None else self._ours
        for fd, inode in ours:
            if _inode(fd) != inode:
                continue
            try:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # a listener, or its peer or its owner was faster


def _sockets() -> frozenset[tuple[int, str]]:
    """Return (file descriptor, inode) of every socket of this process."""
    found = ((int(fd), _inode(int(fd))) for fd in os.listdir("/proc/self/fd"))
    return frozenset((fd, inode) for fd, inode in found if inode.startswith("socket:"))


def _inode(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the rendezvous store of a generation, once a process."""
    return open_store(host, port, is_server=False, timeout_s=timeout_s)


def open_store(host: str, port: int, *, is_server: bool, timeout_s: float) -> Store:
    """Open a store; port 0 chooses a free one."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=is_server,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join(
    store: Store, name: str, rank: int, size: int, timeout_s: float
) -> Connections:
    """Form the default process group ``name`` over ``store``.

    Raises:
        GenerationBrokenError: Somebody did not come, or left meanwhile.
    """
    connections = Connections()
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(name, store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        connections.cut()
        _forget_failed_group()
        raise GenerationBrokenError(f"group {name} did not form: {error}") from error
    return connections


def _forget_failed_group() -> None:
    """Make this process count its groups from 0 again, as its next peers do.

    torch names groups by a counter that only the end of a default group resets; one
    that failed to form has no end, and its members would wait under another name.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()


def leave() -> None:
    """Destroy every process group of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather_json(value: Any) -> list[Any]:
    """Return what every rank of the default group gave, in the order of ranks."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [
        json.loads(bytes(row[: int(size)].numpy()))
        for row, size in zip(rows, sizes, strict=True)
    ]


def gather_rows(row: torch.Tensor) -> torch.Tensor:
    """Return the row that every rank of the default group gave, in the order of ranks.

    In as many rounds as the number of ranks has binary digits, each rank sends what it
    has to another one, twice as far away each time (Bruck and others, 1997); gloo's own
    all-gather goes around, which takes as many messages one after the other as there are
    ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.empty(size, *row.shape, dtype=row.dtype)  # by how far before this rank
    rows[0] = row
    distances = [1 << digit for digit in range((size - 1).bit_length())]
    blocks = [min(distance, size - distance) for distance in distances]
    receives = [
        dist.irecv(rows[far : far + count], (rank - far) % size, tag=_GATHER_TAG)
        for far, count in zip(distances, blocks, strict=True)
    ]
    sends = []
    for far, count, receive in zip(distances, blocks, receives, strict=True):
        sends.append(dist.isend(rows[:count], (rank + far) % size, tag=_GATHER_TAG))
        assert receive is not None
        receive.wait()
    for send in sends:
        assert send is not None
        send.wait()
    return torch.flip(torch.roll(rows, size - 1 - rank, 0), (0,))


class Direction(Enum):
    """Which way a tensor travels along the pipeline."""

    ACTIVATION = 0
    GRADIENT = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that a neighbour sent; ``None`` if the link broke instead."""

    direction: Direction
    tensor: torch.Tensor | None
    error: str = ""


class _Part(Enum):
    """What a tensor comes in, each with a tag of its own.

    A tensor like the one ``_AHEAD`` before it is the payload. Any other one comes as the
    extra, for which the receiver is ready once it has read the header; its payload is
    a single byte.
    """

    HEADER = 0
    PAYLOAD = 1
    EXTRA = 2

    def tag(self, direction: Direction) -> int:
        """Return the tag of messages."""
        return _GATHER_TAG + 1 + len(_Part) * direction.value + self.value


_Look = tuple[int, ...]
"""Of a tensor: the place of its dtype, then its shape; empty if it is not known."""


def _look(tensor: torch.Tensor) -> _Look:
    return (_DTYPES.index(tensor.dtype), *tensor.shape)


def _empty(look: _Look) -> torch.Tensor:
    if not look:
        return torch.empty(1, dtype=torch.uint8)
    return torch.empty(look[1:], dtype=_DTYPES[look[0]])


class _Posted:
    """A tensor that a receiver is ready for."""

    def __init__(self, source: int, direction: Direction, look: _Look) -> None:
        self._source = source
        self._direction = direction
        self._look = look
        self._header = torch.empty(_MAX_DIMENSIONS + 2, dtype=torch.int64)
        self._payload = _empty(look)
        self._works = [
            self._post(part, tensor)
            for part, tensor in (
                (_Part.HEADER, self._header),
                (_Part.PAYLOAD, self._payload),
            )
        ]

    def wait(self) -> tuple[_Look, torch.Tensor]:
        """Return the tensor, and how it looks."""
        for work in reversed(self._works):  # the header is here before the payload
            work.wait()
        dtype, dimensions, *shape = self._header.tolist()
        look = (dtype, *shape[:dimensions])
        if look == self._look:
            return look, self._payload
        tensor = _empty(look)
        self._post(_Part.EXTRA, tensor).wait()
        return look, tensor

    def _post(self, part: _Part, tensor: torch.Tensor) -> dist.Work:
        work = dist.irecv(tensor, self._source, tag=part.tag(self._direction))
        assert work is not None
        return work


class _Receiver(threading.Thread):
    """Receives, one after the other, as many tensors as it has been told to expect."""

    def __init__(
        self, source: int, direction: Direction, arrivals: SimpleQueue[Arrival]
    ) -> None:
        super().__init__(name=f"receive-{direction.name.lower()}", daemon=True)
        self._source = source
        self._direction = direction
        self._arrivals = arrivals
        self.orders: SimpleQueue[int] = SimpleQueue()
        """How many tensors to receive next; 0 ends the thread."""
        self._looks: deque[_Look] = deque([()] * _AHEAD)
        """How the tensors to be posted next will probably look."""

    def run(self) -> None:
        try:
            while count := self.orders.get():
                self._receive(count)
        except RuntimeError as error:
            self._arrivals.put(Arrival(self._direction, None, str(error)))

    def _receive(self, count: int) -> None:
        posted: deque[_Posted] = deque()
        for left in range(count, 0, -1):
            while len(posted) < min(_AHEAD, left):
                look = self._looks.popleft()
                posted.append(_Posted(self._source, self._direction, look))
            look, tensor = posted.popleft().wait()
            self._looks.append(look)
            self._arrivals.put(Arrival(self._direction, tensor))


class PipelineLinks:
    """The links of one stage to its neighbours, over the default process group.

    Args:
        previous: Rank of the stage before, if there is one.
        following: Rank of the stage after, if there is one.
    """

    def __init__(self, previous: int | None, following: int | None) -> None:
        self._previous = previous
        self._following = following
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._receivers: dict[Direction, _Receiver] = {}
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._sent: dict[Direction, deque[_Look]] = {
            way: deque([()] * _AHEAD, _AHEAD) for way in Direction
        }
        """How the latest tensors looked that were sent."""
        for direction, source in (
            (Direction.ACTIVATION, previous),
            (Direction.GRADIENT, following),
        ):
            if source is not None:
                receiver = _Receiver(source, direction, self._arrivals)
                receiver.start()
                self._receivers[direction] = receiver

    def expect(self, direction: Direction, count: int) -> None:
        """Let ``count`` tensors come in from the neighbour, if there is one."""
        if direction in self._receivers and count:
            self._receivers[direction].orders.put(count)

    def arrival(self, *, wait: bool) -> Arrival | None:
        """Return the next tensor that came in, or ``None`` if none has.

        Raises:
            GenerationBrokenError: A link broke.
        """
        if not wait and self._arrivals.empty():
            return None
        arrival = self._arrivals.get()
        if arrival.tensor is None:
            raise GenerationBrokenError(f"link broke: {arrival.error}")
        return arrival

    def send(self, direction: Direction, tensor: torch.Tensor) -> None:
        """Send a tensor on its way; returns before it has arrived."""
        forward = direction is Direction.ACTIVATION
        target = self._following if forward else self._previous
        assert target is not None
        tensor, look = tensor.contiguous(), _look(tensor)
        header = torch.zeros(_MAX_DIMENSIONS + 2, dtype=torch.int64)
        header[: len(look) + 1] = torch.tensor((look[0], tensor.dim(), *tensor.shape))
        parts = {_Part.HEADER: header, _Part.PAYLOAD: tensor}
        if look != self._sent[direction][0]:
            parts |= {_Part.PAYLOAD: _empty(()), _Part.EXTRA: tensor}
        self._sent[direction].append(look)
        for part, message in parts.items():
            work = dist.isend(message, target, tag=part.tag(direction))
            assert work is not None
            self._sends.append((work, message))
        while len(self._sends) > _MAX_PENDING_SENDS:
            self._sends.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until the neighbours have taken all that was sent."""
        while self._sends:
            self._sends.popleft()[0].wait()

    def close(self) -> None:
        """End the receiver threads; the connections are cut, or nothing is expected."""
        for receiver in self._receivers.values():
            receiver.orders.put(0)
        for receiver in self._receivers.values():
            receiver.join()
        self._sends.clear()


def new_groups(
    memberships: Sequence[tuple[int, ...]], rank: int, timeout_s: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Form a group for every membership of two ranks and more; return those of ``rank``.

    Every rank of the default group must call this with the same list.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for members in dict.fromkeys(memberships):
        if len(members) < 2:
            continue
        group = dist.new_group(list(members), timeout=timedelta(seconds=timeout_s))
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            groups[members] = group
    return groups
