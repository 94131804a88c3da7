"""VMs to choose from, in lots that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lot:
    """VMs that are alike: of one supply, held or not."""

    name: str
    """Of the supply."""
    spot: bool
    count: int
    usd_per_hour: float
    """Effective price of one VM: what interruptions waste is in it."""
    rank: float
    """What they are preferred by: the effective price, less for what is held."""
    losses_per_hour: float
    """Of one VM."""
    is_held: bool


def units(lots: Sequence[Lot]) -> Iterator[Lot]:
    """Yield the lot of every single VM, in the order of ``lots``."""
    for lot in lots:
        yield from itertools.repeat(lot, lot.count)
