"""Gathers over all ranks of the default process group."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

GATHER_TAG = 0
"""Messages of pipeline links have the tags above it, up to ``COPY_TAG``."""
COPY_TAG = 16
"""Of copies on their way to another VM."""


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
    texts = (row[: int(size)] for row, size in zip(rows, sizes, strict=True))
    return [json.loads(bytes(text.numpy())) for text in texts]


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
        dist.irecv(rows[far : far + count], (rank - far) % size, tag=GATHER_TAG)
        for far, count in zip(distances, blocks, strict=True)
    ]
    sends = []
    for far, count, receive in zip(distances, blocks, receives, strict=True):
        sends.append(dist.isend(rows[:count], (rank + far) % size, tag=GATHER_TAG))
        assert receive is not None
        receive.wait()
    for send in sends:
        assert send is not None
        send.wait()
    return torch.flip(torch.roll(rows, size - 1 - rank, 0), (0,))
