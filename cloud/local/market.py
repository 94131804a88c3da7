"""The simulated spot market of the local cloud: scripted events and seeded hazards;
pure.

A market is data: the same ``MarketSpec`` always yields the same timeline.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spottrain.errors import ConfigError
from spottrain.units import HOUR_S

EventKind = Literal["capacity", "price", "notice", "kill", "silence", "slow"]

PRICE_STEP_S = 60.0
"""Time between two steps of a volatile price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneSpec:
    """One zone of the market; all its machines are identical."""

    name: str
    instance_type: str = "cpu"
    slots: int = 1
    """CPU slots of one machine; all of them share the cores of this computer."""
    slot_memory_bytes: int
    """Declared, not enforced: the planner keeps tensors within it."""
    slot_speed: float = 1.0
    """Declared speed relative to the device that the profile was measured on."""
    capacity: int
    """Initial spot capacity in VMs; on-demand capacity is unlimited."""
    spot_usd_per_hour: float
    on_demand_usd_per_hour: float
    boot_s: float = 0.0
    """Time from launch to running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketEvent:
    """An event of the market; only spot VMs are affected."""

    at_s: float
    """Seconds since the market opened, at the start of the cloud process."""
    kind: EventKind
    zone: str | None = None
    """None: a VM of any zone; required for capacity and price."""
    count: int = 1
    """For capacity: the zone's new capacity, including rented VMs (a lower value ends
    no VM); otherwise: number of affected VMs, at most all."""
    lead_s: float = 0.0
    """For notice: seconds from the notice to the kill."""
    usd_per_hour: float | None = None
    """For price: the new spot price; VMs rented before keep theirs."""
    factor: float | None = None
    """For slow: factor by which the VM is slower from now on."""
    machine: int | None = None
    """Index, in order of launch, of the affected spot VM of the zone; none if there is
    no such VM (hazards)."""
    return_after_s: float | None = None
    """When the capacity taken with the VM returns; None: never."""

    def __post_init__(self) -> None:
        if (self.kind == "price") != (self.usd_per_hour is not None):
            raise ConfigError(
                f"events of kind price, and no others, have usd_per_hour: "
                f"got {self.usd_per_hour} with {self.kind}"
            )
        if (self.kind == "slow") != (self.factor is not None):
            raise ConfigError(
                f"events of kind slow, and no others, have a factor: "
                f"got {self.factor} with {self.kind}"
            )
        if self.kind in ("capacity", "price") and self.zone is None:
            raise ConfigError(f"event {self.kind} at {self.at_s} s must name its zone")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketSpec:
    """A whole market.

    Hazards are Poisson processes: a rate is per hour and per running spot VM.
    """

    seed: int = 0
    """Seed of affected VMs, hazards and price changes."""
    zones: tuple[ZoneSpec, ...]
    events: tuple[MarketEvent, ...] = ()
    """The script, in any order."""
    notices_per_hour: float = 0.0
    kills_per_hour: float = 0.0
    silences_per_hour: float = 0.0
    notice_lead_s: float = 30.0
    """Lead time of a hazard's notice."""
    return_after_s: float = 30.0
    """When capacity that a hazard took returns."""
    price_volatility: float = 0.0
    """Standard deviation of the logarithm of a spot price after an hour; the price
    never rises above the on-demand price."""

    def __post_init__(self) -> None:
        names = [zone.name for zone in self.zones]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"market zones must be one or more, with different names: got {names}"
            )
        for event in self.events:
            if event.zone is not None and event.zone not in names:
                raise ConfigError(
                    f"event {event.kind} at {event.at_s} s names zone {event.zone!r}: "
                    f"the zones are {', '.join(names)}"
                )


def stream(spec: MarketSpec) -> Iterator[MarketEvent]:
    """Yield all events in order of time; endless with hazards."""
    hazards: list[tuple[EventKind, float]] = [
        ("notice", spec.notices_per_hour),
        ("kill", spec.kills_per_hour),
        ("silence", spec.silences_per_hour),
    ]
    sources = [iter(sorted(spec.events, key=_time_of))]
    for zone in spec.zones:
        for kind, rate_per_hour in hazards:
            if rate_per_hour > 0:
                sources.append(_strikes(spec, zone, kind, rate_per_hour))
        if spec.price_volatility > 0 and zone.spot_usd_per_hour > 0:
            sources.append(_prices(spec, zone))
    return heapq.merge(*sources, key=_time_of)


def _time_of(event: MarketEvent) -> float:
    return event.at_s


def _strikes(
    spec: MarketSpec, zone: ZoneSpec, kind: EventKind, rate_per_hour: float
) -> Iterator[MarketEvent]:
    """Yield the events of one hazard in one zone.

    Events are drawn for every machine that the zone may ever have; those of machines
    that are not rented have no effect. So each running VM is hit at exactly the rate.
    """
    rng = random.Random(f"{spec.seed}/{zone.name}/{kind}")
    counts = [e.count for e in spec.events if (e.kind, e.zone) == ("capacity", zone.name)]
    machines = max(zone.capacity, *counts, 0)
    at_s = 0.0
    while machines:
        at_s += rng.expovariate(rate_per_hour * machines / HOUR_S)
        yield MarketEvent(
            at_s=at_s,
            kind=kind,
            zone=zone.name,
            lead_s=spec.notice_lead_s if kind == "notice" else 0.0,
            machine=rng.randrange(machines),
            return_after_s=spec.return_after_s,
        )


def _prices(spec: MarketSpec, zone: ZoneSpec) -> Iterator[MarketEvent]:
    """Yield spot prices: a geometric random walk below the on-demand price."""
    rng = random.Random(f"{spec.seed}/{zone.name}/price")
    sigma = spec.price_volatility * math.sqrt(PRICE_STEP_S / HOUR_S)
    usd_per_hour = zone.spot_usd_per_hour
    for step in itertools.count(1):
        usd_per_hour *= math.exp(rng.gauss(0.0, sigma))
        usd_per_hour = min(usd_per_hour, zone.on_demand_usd_per_hour)
        yield MarketEvent(
            at_s=step * PRICE_STEP_S,
            kind="price",
            zone=zone.name,
            usd_per_hour=usd_per_hour,
        )
