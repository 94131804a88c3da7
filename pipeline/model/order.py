"""The order of a data set's examples: a pure function of the seed and the epoch."""

from __future__ import annotations

import bisect
import functools
import hashlib
from typing import Any, NamedTuple

import torch


def random_seed(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part, on any machine the same."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


class Order(NamedTuple):
    """The order of one epoch."""

    indices: torch.Tensor
    """Of the examples, (length,), int64."""
    windows: tuple[tuple[int, ...], ...]
    """Shards that are read together, one window after the other."""
    ends: tuple[int, ...]
    """Where each window ends in ``indices``."""


@functools.lru_cache(maxsize=2)
def order(seed: int, epoch: int, lengths: tuple[int, ...], window: int) -> Order:
    """Return an order in which every example comes once.

    Shards are shuffled, and examples among those of a window.

    Args:
        seed: The job's.
        epoch: Counted from 0.
        lengths: Examples in each shard; all in one where the data set has no shards.
        window: How many shards are read together.
    """
    shards = torch.arange(len(lengths))
    if len(lengths) > 1:
        drawn = torch.Generator().manual_seed(random_seed(seed, epoch, 1))
        shards = torch.randperm(len(lengths), generator=drawn)
    generator = torch.Generator().manual_seed(random_seed(seed, epoch))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    parts, windows, places = [], [], [0]
    for first in range(0, len(lengths), window):
        windows.append(tuple(shards[first : first + window].tolist()))
        examples = torch.cat([torch.arange(ends[x] - lengths[x], ends[x]) for x in windows[-1]])
        parts.append(examples[torch.randperm(len(examples), generator=generator)])
        places.append(places[-1] + len(examples))
    return Order(torch.cat(parts), tuple(windows), tuple(places[1:]))


def example_index(seed: int, dataset: Any, position: int) -> int:
    """Return the index of the example at ``position`` of the endless shuffled stream."""
    epoch, place = divmod(position, len(dataset))
    return int(_order_of(seed, epoch, dataset).indices[place])


def announce_next(seed: int, dataset: Any, position: int) -> None:
    """Tell a data set of shards which of them are read after those of ``position``."""
    if not hasattr(dataset, "shard_lengths"):
        return
    epoch, place = divmod(position, len(dataset))
    found = _order_of(seed, epoch, dataset)
    now = bisect.bisect_right(found.ends, place)
    if now + 1 < len(found.windows):
        following = found.windows[now + 1]
    else:
        following = _order_of(seed, epoch + 1, dataset).windows[0]
    dataset.expect(following, found.windows[now])


def _order_of(seed: int, epoch: int, dataset: Any) -> Order:
    if hasattr(dataset, "shard_lengths"):
        return order(seed, epoch, tuple(dataset.shard_lengths), dataset.window)
    return order(seed, epoch, (len(dataset),), 1)
