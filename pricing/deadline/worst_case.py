"""The worst case until the next decision: all spot VMs are paid, train nothing and are lost.

A fleet may be held only if on-demand VMs alone could finish from there, within the deadline
and within what the job may cost. One such fleet always exists if the job was admitted: the
on-demand VMs of that plan. They train on as planned, so the plan is still there at the next
decision; every other fleet is checked to leave one. That is the whole guarantee, and it
needs no market: only that on-demand VMs can be had, boot and train as expected.

A job's next decision is at its review at the latest, and at once when a VM joins or is
lost. Between two of them finish and cost depend on the moment of the next one piece by
piece linearly, so both ends of each piece are checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.model import Fleet, Holdings, JobStatus, Supply
from spottrain.units import HOUR_S

_TIE_S = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vms:
    """On-demand VMs that are held, and those that could be rented beside them."""

    ready_s: tuple[float, ...]
    """When each of those held is ready; 0: it is."""
    usd_per_hour: float
    """Of those held."""
    more: tuple[float, ...]
    """USD per hour of each further one, ascending."""

    @property
    def ready(self) -> int:
        """How many train already."""
        return self.ready_s.count(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Halt:
    """What stops training."""

    paused_s: float
    """Until training goes on now."""
    pauses: bool
    """A spot VM joins or is lost at the next decision."""
    examples: float
    """To be trained from now on, those included that are lost with it."""


class WorstCase:
    """Which fleets may be held until the next decision."""

    def __init__(
        self,
        status: JobStatus,
        fleet: Fleet,
        supplies: Sequence[Supply],
        holdings: Sequence[Holdings],
    ) -> None:
        self.status, self.fleet, self.supplies = status, fleet, supplies
        self.holdings = {vms.name: vms for vms in holdings}
        self.attempts_usd = min(status.usd_limit, self._attempts_limit())
        """What the job may still cost while it makes attempts at spot VMs."""

    def is_survived(self, wanted: Mapping[str, int], usd_limit: float) -> bool:
        """Return whether on-demand VMs alone can finish after the worst case with this fleet.

        Money for new spot VMs is needed until they have saved some work, though a decision
        comes sooner: else they would be returned before they were of any use.

        Args:
            wanted: VMs by supply.
            usd_limit: What may still be spent.
        """
        vms = self._on_demand_vms(wanted)
        spot_usd, attempt_usd = self._spot_usd(wanted)
        held = self.holdings.items()
        spot = [supply.name for supply in self.supplies if supply.spot]
        pauses = any(wanted.get(name, 0) for name in spot)
        trains = any(min(wanted.get(name, 0), self._ready(name)) for name in spot)
        shrinks = any(wanted.get(name, 0) < mine.ready for name, mine in held)
        paused_s = self.status.paused_s
        paused_s = max(paused_s, self.fleet.morph_s) if shrinks else paused_s
        review_s = min((at_s for at_s in vms.ready_s if at_s > 0), default=self.status.review_s)
        review_s = min(review_s, self.status.review_s)
        moments = {0.0, min(paused_s, review_s), review_s}
        return any(
            all(
                self._is_met(
                    vms,
                    extra,
                    at_s,
                    _Halt(
                        paused_s=paused_s,
                        pauses=pauses,
                        examples=self._examples(vms, at_s, trains),
                    ),
                    usd_limit - attempt_usd - spot_usd * at_s,
                )
                for at_s in moments
            )
            for extra in range(len(vms.more), -1, -1)
        )

    def on_demand(self, count: int) -> dict[str, int]:
        """Return so many on-demand VMs by supply: those held first, then the cheapest."""
        supplies = sorted(
            (supply for supply in self.supplies if not supply.spot),
            key=lambda supply: supply.usd_per_hour,
        )
        taken = dict[str, int]()
        for supply in supplies:
            mine = self.holdings.get(supply.name)
            taken[supply.name] = min(count, mine.rented if mine else 0)
            count -= taken[supply.name]
        for supply in supplies:
            more = min(count, supply.free(self.fleet))
            taken[supply.name] += more
            count -= more
        return {name: vms for name, vms in taken.items() if vms}

    def _attempts_limit(self) -> float:
        """Return what the job may still cost while it makes attempts at spot VMs.

        In all it may cost a little more than with the whole fleet on demand from the start.
        A smaller fleet may be cheaper, but only at once: it leaves no time to wait.
        """
        begun, fleet = self.status.begun, self.fleet
        if begun is None or self.status.min_examples_per_s is not None:
            return math.inf
        prices = self._capped(
            [
                supply.usd_per_hour
                for supply in self.supplies
                if not supply.spot
                for _ in range(self._rentable(supply))
            ]
        )
        if not prices or not fleet.rates[len(prices)]:
            return math.inf
        usd_per_s = sum(prices) / HOUR_S
        start_s = fleet.boot_s + fleet.morph_s
        train_s = begun.examples / fleet.rates[len(prices)]
        alone_usd = usd_per_s * (start_s + train_s + self.status.reserve_s)
        wasted_usd = tuning.WASTE * alone_usd
        if fleet.max_vms <= tuning.SMALL_FLEET:
            return alone_usd + wasted_usd - begun.usd_spent
        saved_s = self.status.examples_per_checkpoint / fleet.rates[len(prices)]
        attempt_usd = usd_per_s * (start_s + fleet.morph_s + fleet.lost_s + saved_s)
        return alone_usd + max(wasted_usd, attempt_usd) - begun.usd_spent

    def _examples(self, vms: _Vms, at_s: float, trains: bool) -> float:
        """Return the work from now on if spot VMs that train are lost at a moment."""
        status, fleet = self.status, self.fleet
        unsaved = status.examples_unsaved
        if unsaved is None:
            ready = sum(one.ready for one in self.holdings.values())
            lost = fleet.rates[min(ready, fleet.max_vms)] * fleet.lost_s
            return status.examples_left + (lost if trains else 0.0)
        if not trains:
            return status.examples_left - unsaved
        return status.examples_left + fleet.rates[vms.ready] * at_s

    def _ready(self, name: str) -> int:
        mine = self.holdings.get(name)
        return 0 if mine is None else mine.ready

    def _rentable(self, supply: Supply) -> int:
        mine = self.holdings.get(supply.name)
        return supply.free(self.fleet) + (0 if mine is None else mine.rented)

    def _capped(self, prices: Iterable[float]) -> tuple[float, ...]:
        """Return the cheapest VMs that the maximum and the hourly cap allow."""
        left, found = self.status.usd_per_hour_limit, list[float]()
        for price in sorted(prices)[: self.fleet.max_vms]:
            left -= price
            if left < 0:
                break
            found.append(price)
        return tuple(found)

    def _on_demand_vms(self, wanted: Mapping[str, int]) -> _Vms:
        ready_s, free, usd_per_hour = list[float](), list[float](), 0.0
        for supply in self.supplies:
            if supply.spot:
                continue
            count, mine = wanted.get(supply.name, 0), self.holdings.get(supply.name)
            known = mine.ready_in_s(self.fleet.boot_s) if mine else ()
            new = max(0, count - len(known))
            ready_s += [*known[:count], *[self.fleet.boot_s] * new]
            usd_per_hour += count * supply.usd_per_hour
            left = min(self.fleet.max_vms, self._rentable(supply) - count)
            free += [supply.usd_per_hour] * max(0, left)
        more = max(0, self.fleet.max_vms - len(ready_s))
        left_usd = self.status.usd_per_hour_limit - usd_per_hour
        prices = list[float]()
        for price in sorted(free)[:more]:
            left_usd -= price
            if left_usd < 0:
                break
            prices.append(price)
        return _Vms(
            ready_s=tuple(sorted(ready_s)),
            usd_per_hour=usd_per_hour,
            more=tuple(prices),
        )

    def _spot_usd(self, wanted: Mapping[str, int]) -> tuple[float, float]:
        """Return what spot VMs cost per second, and new ones until they save some work."""
        usd_per_s = boot_usd = 0.0
        for supply in self.supplies:
            count = wanted.get(supply.name, 0)
            if supply.spot and count:
                mine = self.holdings.get(supply.name)
                new = max(0, count - (mine.rented if mine else 0))
                usd_per_s += count * supply.usd_per_hour / HOUR_S
                saved_s = self.status.examples_per_checkpoint / max(self.fleet.rates)
                boot_usd += new * supply.usd_per_hour * (self.fleet.boot_s + saved_s) / HOUR_S
        return usd_per_s, boot_usd

    def _is_met(
        self,
        vms: _Vms,
        extra: int,
        at_s: float,
        halt: _Halt,
        usd_limit: float,
    ) -> bool:
        """Return whether so many further VMs, requested then, finish within the limits."""
        fleet, status = self.fleet, self.status
        changes = [(ready_s, 1) for ready_s in vms.ready_s if ready_s > 0]
        if extra:
            changes.append((at_s + fleet.boot_s, extra))
        if halt.pauses:
            changes.append((at_s, 0))
        takes_s = _takes_s(fleet, halt.examples, vms.ready, halt.paused_s, sorted(changes))
        if takes_s > status.left_s + _TIE_S:
            return False
        more_usd = sum(vms.more[:extra])
        usd = vms.usd_per_hour * (takes_s + status.reserve_s)
        usd += more_usd * (max(0.0, takes_s - at_s) + status.reserve_s)
        return usd / HOUR_S <= usd_limit


def _takes_s(
    fleet: Fleet,
    examples: float,
    ready: int,
    paused_s: float,
    changes: Sequence[tuple[float, int]],
) -> float:
    """Return the time to train the examples; infinite if the fleet cannot.

    Args:
        fleet: Throughput by size.
        examples: Work that is left.
        ready: VMs that train.
        paused_s: Until they go on.
        changes: When VMs join or are lost, and how many join; each pauses the fleet.
    """
    for at_s, joining in changes:
        rate = fleet.rates[min(ready, fleet.max_vms)]
        trained = rate * max(0.0, at_s - paused_s)
        if trained >= examples:
            break
        examples -= trained
        ready += joining
        paused_s = max(paused_s, at_s + fleet.morph_s)
    rate = fleet.rates[min(ready, fleet.max_vms)]
    return paused_s + examples / rate if rate > 0 else math.inf
