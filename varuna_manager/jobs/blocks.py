"""Blocks of measurements: how the copy of a journal keeps its mini-batches.

They cannot be derived from the events. A block holds the rows of ``STEPS`` steps and is
written anew whenever one of them changes: the newest block every ``PACE_S``, others after a
restore. The store of measurements makes the same of rows in whatever order and however
often they come, so blocks need no fencing: where managers of different epochs wrote one,
both are read, the newer first.
"""

from __future__ import annotations

import gzip
import re
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from spottrain.codec import SCHEMA_VERSION, decode, encode
from spottrain.errors import SpottrainError, WireError
from spottrain.varuna_manager.jobs.measurements import Cursor, Measurements, Minibatch

STEPS = 4096
PACE_S = 30.0
"""Time between two copies: each put costs money."""
_NAME = re.compile(r"(\d{12})-(\d{6})\.json\.gz")


class BlockError(SpottrainError):
    """A block is damaged, or another version wrote it."""


class Block(NamedTuple):
    """A file of rows."""

    first: int
    """Its first step, a multiple of ``STEPS``."""
    epoch: int
    """Of the manager that wrote it."""

    @property
    def name(self) -> str:
        """Name of the file; names sort by steps."""
        return f"{self.first:012d}-{self.epoch:06d}.json.gz"


def block_of(name: str) -> Block | None:
    """Return the block that a file name denotes; None for other files."""
    match = _NAME.fullmatch(name)
    return None if match is None else Block(*map(int, match.groups()))


@dataclass(frozen=True, slots=True)
class _Contents:
    rows: tuple[Minibatch, ...]
    schema_version: int = SCHEMA_VERSION


def pack(rows: Sequence[Minibatch]) -> bytes:
    """Return the contents of a block's file: JSON, compressed, with a checksum."""
    return gzip.compress(encode(_Contents(tuple(rows))).encode(), compresslevel=6, mtime=0)


def unpack(block: Block, data: bytes) -> list[Minibatch]:
    """Return the rows of a file.

    Raises:
        BlockError: It is damaged, or of another version.
    """
    try:
        contents: _Contents = decode(_Contents, gzip.decompress(data))
    except (OSError, EOFError, zlib.error, WireError) as error:
        raise BlockError(
            f"measurements {block.name} are damaged or of another version: {error}"
        ) from error
    return list(contents.rows)


class BlockStore(Protocol):
    """Where blocks are kept."""

    def blocks(self) -> list[Block]:
        """Return all blocks."""

    def put_block(self, block: Block, rows: Sequence[Minibatch]) -> None:
        """Write a block, or write it anew."""

    def get_block(self, block: Block) -> list[Minibatch]:
        """Return the rows of a block.

        Raises:
            BlockError: It is damaged, or of another version.
        """


class BlockCopy:
    """Copies the rows of one job's mini-batches.

    Args:
        store: Where they go.
        epoch: This manager's.
    """

    def __init__(self, store: BlockStore, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._cursor: Cursor | None = None
        """None: what the store has is unknown."""
        self._due_s = 0.0

    def hurry(self) -> None:
        """Copy at once the next time."""
        self._due_s = 0.0

    def advance(self, measurements: Measurements) -> None:
        """Copy what has changed, unless that was done a moment ago."""
        if time.monotonic() < self._due_s:
            return
        since = self._cursor
        if since is None:
            held = max((block.first for block in self._store.blocks()), default=0)
            since = Cursor(position=2 * held - 1)  # and every rewrite again
        changed, cursor = measurements.changed(since)
        if changed is not None:
            first, last = (at // 2 // STEPS for at in (changed, cursor.position))
            for number in range(first, max(first, last) + 1):
                start = number * STEPS
                rows = measurements.between(start, start + STEPS - 1)
                self._store.put_block(Block(start, self._epoch), rows)
        self._cursor, self._due_s = cursor, time.monotonic() + PACE_S
