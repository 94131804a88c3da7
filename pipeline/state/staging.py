"""Sections on their way between memories: in pieces, through a few page-locked blocks.

What a device holds comes down and goes up beside computations only from and to page-locked
memory. There is a bounded amount of it here, however large the sections are: a VM may have
little more memory than its GPUs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from spottrain.pipeline.comm.groups import world
from spottrain.pipeline.devices.port import Device, Transfer
from spottrain.pipeline.state.arena import SectionArena

PIECE_BYTES = 8 << 20
"""Of a block; torch's allocator of page-locked memory rounds up to powers of two."""
NUM_BLOCKS = 8
"""For each direction. What is received is posted that far ahead: what is sent before costs
a further copy, and each piece would wait for its sender to hear that it may come."""
_AHEAD = NUM_BLOCKS // 2
"""Pieces that come down, and as many that are being sent."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Piece:
    memory: torch.Tensor
    device: Device | None
    """Where it is; ``None``: in the host's memory."""
    is_last: bool
    """Of its section."""


def _pieces(arena: SectionArena) -> list[_Piece]:
    """Return what a replica needs of a section, in the order in which it is sent."""
    found = [
        (piece, None if span is arena.numbers.contents else arena.device)
        for span in arena.movable
        if span.numel()
        for piece in torch.split(span, PIECE_BYTES)
    ]
    last = len(found) - 1
    return [_Piece(*one, is_last=number == last) for number, one in enumerate(found)]


class _Blocks:
    """Blocks of page-locked memory, which are taken in turn; made when they are needed."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._taken = 0

    def take(self, device: Device, num_bytes: int) -> torch.Tensor:
        """Return a block's first bytes; what was in it must not be needed any more."""
        if len(self._blocks) < NUM_BLOCKS:
            self._blocks.append(device.allocate_host((PIECE_BYTES,), torch.uint8))
        block = self._blocks[self._taken % NUM_BLOCKS]
        self._taken += 1
        return block[:num_bytes]


def _come_down(pieces: Iterable[tuple[_Piece, T]]) -> Iterator[tuple[torch.Tensor, T]]:
    """Yield every piece in the host's memory, while the next ones come down.

    Each may be used until ``_AHEAD`` further ones were yielded.
    """
    blocks = _Blocks()
    coming: deque[tuple[_Piece, Transfer | None, T]] = deque()

    def arrived() -> tuple[torch.Tensor, T]:
        piece, transfer, beside = coming.popleft()
        if transfer is None:
            return piece.memory, beside
        assert piece.device is not None
        return piece.device.finish(transfer), beside

    for piece, beside in pieces:
        transfer = None
        if piece.device is not None:
            block = blocks.take(piece.device, piece.memory.numel())
            transfer = piece.device.download(piece.memory, block)
        coming.append((piece, transfer, beside))
        if len(coming) == _AHEAD:
            yield arrived()
    while coming:
        yield arrived()


def copy_section(source: SectionArena, target: SectionArena) -> None:
    """Copy the state of a section and its version, but no gradients, to other memory."""
    target.invalidate()
    pairs = zip(_pieces(source), _pieces(target), strict=True)
    for memory, ours in _come_down(pairs):
        ours.memory.copy_(memory)
    target.synchronise()
    target.set_version(*source.content)


def send_sections(sections: Iterable[tuple[SectionArena, int]]) -> None:
    """Send the state of sections, each to a rank, and wait until all are sent.

    Peers may send at the same time: they receive in another thread.
    """
    sent: deque[dist.Work] = deque()
    pieces = ((piece, target) for arena, target in sections for piece in _pieces(arena))
    for memory, target in _come_down(pieces):
        sent.append(world().send(memory, target))
        if len(sent) == _AHEAD:
            sent.popleft().wait()
    for work in sent:
        work.wait()


def receive_sections(sections: Iterable[tuple[SectionArena, int]]) -> Iterator[SectionArena]:
    """Receive the state of sections, each from a rank.

    Yields:
        Each section once it is whole, with no version yet.
    """
    blocks = _Blocks()
    coming: deque[tuple[SectionArena, _Piece, torch.Tensor, dist.Work]] = deque()

    def arrived() -> Iterator[SectionArena]:
        arena, piece, room, work = coming.popleft()
        work.wait()
        if piece.device is not None:
            piece.device.finish(piece.device.upload(room, piece.memory))
        if piece.is_last:
            arena.synchronise()
            yield arena

    for arena, source in sections:
        arena.invalidate()
        for piece in _pieces(arena):
            if len(coming) == NUM_BLOCKS:
                yield from arrived()
            room = piece.memory
            if piece.device is not None:
                room = blocks.take(piece.device, room.numel())
            coming.append((arena, piece, room, world().receive(room, source)))
    while coming:
        yield from arrived()
