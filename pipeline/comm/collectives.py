"""Gathers over all ranks of the world."""

from __future__ import annotations

import json
from typing import Any

import torch

from spottrain.pipeline.comm.groups import world

GATHER_TAG = 0
"""Messages of pipeline links have the tags above it, up to ``COPY_TAG``."""
COPY_TAG = 16
"""Of copies on their way to another VM."""
_SHORT_BYTES, _LENGTH_BYTES = 4096, 8
"""Of a text that comes with the first gather; of its length in front of it."""


def gather_json(value: Any) -> list[Any]:
    """Return what every rank gave, in the order of ranks.

    One gather where all texts are short; else the first one tells the longest.
    """
    text = json.dumps(value).encode()
    rows = gather_rows(_row(text, _SHORT_BYTES))
    longest = max(_length(row) for row in rows)
    if longest > _SHORT_BYTES:
        rows = gather_rows(_row(text, longest))
    texts = (row[_LENGTH_BYTES : _LENGTH_BYTES + _length(row)] for row in rows)
    return [json.loads(bytes(text.numpy())) for text in texts]


def _row(text: bytes, longest: int) -> torch.Tensor:
    """Return a text's length, then as much of it as there is room for."""
    head = len(text).to_bytes(_LENGTH_BYTES, "big") + text[:longest]
    row = torch.zeros(_LENGTH_BYTES + longest, dtype=torch.uint8)
    row[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return row


def _length(row: torch.Tensor) -> int:
    return int.from_bytes(bytes(row[:_LENGTH_BYTES].numpy()), "big")


def gather_rows(row: torch.Tensor) -> torch.Tensor:
    """Return the row that every rank gave, in the order of ranks.

    In as many rounds as the number of ranks has binary digits, each rank sends what it
    has to another one, twice as far away each time (Bruck and others, 1997); gloo's own
    all-gather goes around, which takes as many messages one after the other as there are
    ranks.
    """
    here = world()
    rank, size = here.rank, here.size
    rows = torch.empty(size, *row.shape, dtype=row.dtype)  # by how far before this rank
    rows[0] = row
    distances = [1 << digit for digit in range((size - 1).bit_length())]
    blocks = [min(distance, size - distance) for distance in distances]
    receives = [
        here.receive(rows[far : far + count], (rank - far) % size, GATHER_TAG)
        for far, count in zip(distances, blocks, strict=True)
    ]
    sends = []
    for far, count, receive in zip(distances, blocks, receives, strict=True):
        sends.append(here.send(rows[:count], (rank + far) % size, GATHER_TAG))
        receive.wait()
    for send in sends:
        send.wait()
    return torch.flip(torch.roll(rows, size - 1 - rank, 0), (0,))
