"""Links between stages whose devices have virtual time (``timed``, scale 0).

Tensors travel as the product sends them, over gloo; when they come in is declared. A stage
may look at what has come in by its own time only once no other stage can send anything
earlier: the one with the least time goes on first (conservative simulation of discrete events;
Chandy and Misra 1979). So a pipeline of real processes runs in virtual time, in the order
in which it would, whatever the machine does meanwhile.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import RawArray

import torch
from tests.fakes.timed import TimedDevice

from spottrain.pipeline.comm.device_link import DeviceLink
from spottrain.pipeline.comm.p2p import Arrival, Direction, PipelineLinks, Travelling
from spottrain.pipeline.comm.tensor_group import TensorGroup

_MOST = 4096
"""Messages of a link."""


@dataclass(frozen=True)
class Wire:
    """What is declared of every link, each way."""

    latency_s: float
    bytes_per_s: float
    on_devices: bool = False
    """Whether it goes from GPU to GPU, not over the bus and the hosts' memory."""


class Board:
    """The time of every rank, and when what it was sent comes in; shared by processes.

    Args:
        peers: Of each rank, those that come to collectives with it, itself among them.
    """

    def __init__(self, peers: Sequence[Sequence[int]]) -> None:
        self._changed = multiprocessing.get_context("fork").Condition()
        self._peers, ranks = peers, len(peers)
        self._now, self._ready = (RawArray("d", [math.inf] * ranks) for _ in range(2))
        self._waits, self._meets = (RawArray("b", ranks) for _ in range(2))
        self._sent, self._taken = (RawArray("i", 2 * ranks) for _ in range(2))
        self._stamps = RawArray("d", 2 * ranks * _MOST)

    @contextmanager
    def playing(self, rank: int, device: TimedDevice) -> Iterator[None]:
        """Let others wait for a rank's messages inside; its device's collectives are those with
        its peers."""
        self._set(rank, device.clock())
        device.meet = partial(self.meet, rank)
        yield
        device.meet = None
        self._set(rank, math.inf)

    def send(self, target: int, direction: Direction, at_s: float) -> None:
        """Say that a message to a rank will come in."""
        link = self._link(target, direction)
        with self._changed:
            self._stamps[link * _MOST + self._sent[link] % _MOST] = at_s
            self._sent[link] += 1
            self._changed.notify_all()

    def take(self, rank: int, now_s: float, *, wait: bool) -> tuple[Direction, float] | None:
        """Return which message is the next one that has come in, and when.

        Args:
            rank: That asks.
            now_s: Its time.
            wait: Whether it waits for one; else there may be none by ``now_s``.
        """
        with self._changed:
            self._now[rank], self._waits[rank] = now_s, wait
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._may_look(rank, wait=wait))
            at_s, direction = self._next(rank)
            found = None
            if at_s <= now_s or wait:
                self._taken[self._link(rank, direction)] += 1
                found = direction, at_s
            self._now[rank], self._waits[rank] = max(now_s, at_s) if wait else now_s, False
            self._changed.notify_all()
        return found

    def meet(self, rank: int, now_s: float, ready_s: float) -> tuple[float, float]:
        """Wait until all peers of a rank have come to a collective.

        Args:
            rank: That has come to it.
            now_s: Its time.
            ready_s: When its device is ready.

        Returns:
            The latest of both times.
        """
        peers = self._peers[rank]
        with self._changed:
            self._now[rank], self._ready[rank], self._meets[rank] = now_s, ready_s, True
            if all(self._meets[one] for one in peers):
                now_s, ready_s = (max(row[i] for i in peers) for row in (self._now, self._ready))
                for one in peers:  # at once: none may seem to be behind those that go on
                    self._now[one], self._ready[one], self._meets[one] = now_s, ready_s, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._meets[rank])
            return float(self._now[rank]), float(self._ready[rank])

    def _set(self, rank: int, now_s: float) -> None:
        with self._changed:
            self._now[rank] = now_s
            self._changed.notify_all()

    def _may_look(self, rank: int, *, wait: bool) -> bool:
        own_s = self._acts_at(rank)
        others = (self._acts_at(other) for other in range(len(self._peers)) if other != rank)
        comes = not wait or not math.isinf(self._next(rank)[0])
        return comes and own_s <= min(others, default=math.inf)

    def _acts_at(self, rank: int) -> float:
        """Return the earliest time at which a rank may do anything."""
        together = self._peers[rank] if self._meets[rank] else (rank,)
        return max(self._goes_on_at(one) for one in together)

    def _goes_on_at(self, rank: int) -> float:
        """Return the same, without those that it may wait for in a collective."""
        now_s = float(self._now[rank])
        return max(now_s, self._next(rank)[0]) if self._waits[rank] else now_s

    def _next(self, rank: int) -> tuple[float, Direction]:
        found = []
        for direction in Direction:
            link = self._link(rank, direction)
            is_there = self._taken[link] < self._sent[link]
            place = link * _MOST + self._taken[link] % _MOST
            found.append((self._stamps[place] if is_there else math.inf, direction))
        return min(found, key=lambda one: one[0])

    @staticmethod
    def _link(target: int, direction: Direction) -> int:
        return 2 * target + direction.value


class TimedLinks(PipelineLinks):
    """The links of one rank, over a board.

    Args:
        previous: As for ``PipelineLinks``.
        following: As there.
        device: Of the rank.
        board: Of all ranks.
        rank: This one.
        wire: What is declared of every link.
        groups: As there.
    """

    def __init__(
        self,
        previous: int | None,
        following: int | None,
        device: TimedDevice,
        board: Board,
        rank: int,
        wire: Wire,
        groups: tuple[TensorGroup | None, TensorGroup | None] = (None, None),
    ) -> None:
        super().__init__(previous, following, device, groups=groups)
        self._timed, self._board, self._rank, self._declared = device, board, rank, wire
        self._free_s = dict.fromkeys(Direction, 0.0)
        self._leaving_bytes = 0
        self._early: dict[Direction, deque[Arrival]] = {one: deque() for one in Direction}
        """That have come in before their time."""

    def send(
        self, direction: Direction, tensors: Iterable[torch.Tensor | None], note: int = 0
    ) -> None:
        """Send tensors once they have come down and the link is free."""
        self._leaving_bytes = 0
        super().send(direction, tensors, note)
        stays = self._declared.on_devices
        ready_s = self._timed.mark() if stays else self._timed.newest_download_s
        begins_s = max(self._free_s[direction], ready_s)
        takes_s = self._leaving_bytes / self._declared.bytes_per_s
        self._free_s[direction] = begins_s + takes_s
        target = self._targets[direction]
        self._board.send(target, direction, self._free_s[direction] + self._declared.latency_s)

    def _leave(
        self, tensor: torch.Tensor | None, link: DeviceLink | None, group: TensorGroup | None
    ) -> Travelling | None:
        one = super()._leave(tensor, link, group)
        self._leaving_bytes += 0 if one is None else one.transfer.target.nbytes
        return one

    def arrival(self, *, wait: bool) -> Arrival | None:
        """Return what has come in by the device's time."""
        told = self._board.take(self._rank, self._timed.clock(), wait=wait)
        if told is None:
            return None
        direction, at_s = told
        while not self._early[direction]:
            arrival = super().arrival(wait=True)
            assert arrival is not None
            self._early[arrival.direction].append(arrival)
        arrival = self._early[direction].popleft()
        for one in arrival.tensors:
            if one is not None:
                over_bus = not self._declared.on_devices
                self._timed.arrived(one.transfer, at_s, over_bus=over_bus)
        self._timed.time.hold(at_s)
        return arrival
