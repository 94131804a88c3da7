"""VMs to choose from, in lots that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spottrain.pricing.deadline.model import Fleet, Holdings, Supply

KEEP = 0.2
"""Share by which a VM elsewhere must be cheaper than one that is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
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


def candidates_of(
    supplies: Iterable[Supply], holdings: Mapping[str, Holdings], fleet: Fleet
) -> list[Candidate]:
    """Return the VMs that may be had or are held, the best first."""
    candidates, most = [], fleet.most
    for supply in supplies:
        usd = supply.effective_usd_per_hour(fleet)
        mine = holdings.get(supply.name)
        have = 0 if mine is None else mine.ready + mine.booting
        free = most if supply.available is None else min(most, supply.available)
        for count, is_held in ((have, True), (free, False)):
            candidates.append(
                Candidate(
                    name=supply.name,
                    spot=supply.spot,
                    count=count,
                    usd_per_hour=usd,
                    rank=usd * (1 - KEEP) if is_held else usd,
                    losses_per_hour=supply.losses_per_hour,
                    is_held=is_held,
                )
            )
    return sorted(
        (candidate for candidate in candidates if candidate.count > 0),
        key=lambda candidate: candidate.rank,
    )


def units(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the lot of every single VM, in the order of ``candidates``."""
    for candidate in candidates:
        yield from itertools.repeat(candidate, candidate.count)
