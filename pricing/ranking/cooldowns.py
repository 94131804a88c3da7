"""Cooldowns: which offers a refusal closes, for how long, and where to ask instead; pure.

A cloud's refusal is about some of its offers only: one type in one zone, one family in one
region, or all. Only those are not asked for a while: longer each time they refuse again
soon after (exponential backoff), and as briefly as at first once they have given VMs or
have been open for as long as they were last closed. A quota refuses a request as a whole:
half as many VMs are asked for, down to one, before its offers are closed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.place import offer_key

Refusal = Literal[
    "no_capacity",
    "quota",
    "region_quota",
    "price",
    "auth",
    "misconfigured",
    "unreachable",
]

QUOTAS: tuple[Refusal, ...] = ("quota", "region_quota")
"""Of a family, and of disks and addresses: what refuses a request as a whole."""

Span = Literal["region", "cloud", "any"]
"""How far apart the VMs of a plan may be."""

MAX_S = 1800.0
"""A scope is closed for no longer than that at a time."""
MIN_S: Mapping[str, float] = {
    "quota": 300.0,
    "region_quota": 300.0,
    "auth": 300.0,
    "misconfigured": 300.0,
}
"""How long a scope is closed at least: people act more slowly than markets."""
SIMILAR = 0.01
"""Prices that differ by no more than this share are taken for the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooldown:
    """A scope that is closed, or was."""

    until_s: float
    """Seconds since the epoch."""
    length_s: float
    count: int = 0
    """VMs that may be asked for at once until it is forgotten; 0: any number."""

    def next_s(self, base_s: float, now_s: float) -> float:
        """Return for how long to close the scope when it refuses again."""
        if self.forgotten(now_s):
            return base_s
        return min(2 * self.length_s, max(base_s, MAX_S))

    def forgotten(self, now_s: float) -> bool:
        """Return whether it has been open for at least as long as it was closed."""
        return now_s - self.until_s >= self.length_s


def scope_of(offer: Offer, refusal: Refusal) -> str:
    """Return the name of what a refusal of one offer is about."""
    market = "spot" if offer.spot else "on-demand"
    match refusal:
        case "auth":
            return offer.cloud
        case "unreachable":
            return f"{offer.cloud} unreachable"
        case "misconfigured":
            return f"{offer.cloud}/{offer.region}/{offer.instance_type}"
        case "quota":
            family = offer.family or offer.instance_type
            return f"{offer.cloud}/{offer.region}/family {family}/{market}"
        case "region_quota":
            return f"{offer.cloud}/{offer.region}/all types"
        case "no_capacity":
            return offer_key(offer)
        case "price":
            return f"{offer_key(offer)} at {offer.usd_per_hour!r}"


def scopes_of(offer: Offer) -> tuple[str, ...]:
    """Return every scope that an offer is in."""
    kinds: tuple[Refusal, ...] = get_args(Refusal)
    return tuple(scope_of(offer, kind) for kind in kinds)


def refused(
    closed: Mapping[str, Cooldown],
    offer: Offer,
    refusal: Refusal,
    now_s: float,
    base_s: float,
    count: int = 1,
) -> dict[str, Cooldown]:
    """Return what is closed, or only bounded, once an offer was refused.

    Args:
        closed: By scope, as before.
        offer: What was asked for.
        refusal: Why it was refused.
        now_s: Seconds since the epoch.
        base_s: How long a first refusal closes a scope.
        count: VMs that were asked for at once.
    """
    scope = scope_of(offer, refusal)
    base_s = max(base_s, MIN_S.get(refusal, 0.0))
    remembered = {k: v for k, v in closed.items() if not v.forgotten(now_s)}
    before = remembered.get(scope)
    of_quota = refusal in QUOTAS
    if of_quota and count > 1:
        # Half of the first closing, which the last refusal of the halving doubles.
        length_s = base_s / 2 if before is None else before.length_s
        bounded = Cooldown(until_s=now_s, length_s=length_s, count=count // 2)
        return {**remembered, scope: bounded}
    length_s = base_s if before is None else before.next_s(base_s, now_s)
    until_s, last = now_s + length_s, int(of_quota)
    shut = Cooldown(until_s=until_s, length_s=length_s, count=last)
    return {**remembered, scope: shut}


def granted(closed: Mapping[str, Cooldown], offer: Offer) -> dict[str, Cooldown]:
    """Return what is closed once an offer gave VMs: none of its own scopes."""
    own = scopes_of(offer)
    return {scope: each for scope, each in closed.items() if scope not in own}


def open_at_s(closed: Mapping[str, Cooldown], offer: Offer) -> float:
    """Return from when on an offer may be asked for; infinitely long ago if it may now."""
    times = (closed[scope].until_s for scope in scopes_of(offer) if scope in closed)
    return max(times, default=-math.inf)


def max_batch(closed: Mapping[str, Cooldown], scope: str, now_s: float) -> float:
    """Return how many VMs of a scope may be asked for at once; maybe infinitely many."""
    found = closed.get(scope)
    if found is None or not found.count or found.forgotten(now_s):
        return math.inf
    return found.count


def needs_a_person(closed: Mapping[str, Cooldown], offer: Offer, now_s: float) -> bool:
    """Return whether an offer is closed for what only a person can fix."""
    scopes = (scope_of(offer, "auth"), scope_of(offer, "misconfigured"))
    return any(scope in closed and closed[scope].until_s > now_s for scope in scopes)


def location_of(offer: Offer, span: Span = "region") -> tuple[str, ...]:
    """Return what VMs that train together share: (cloud, region), (cloud,) or nothing."""
    match span:
        case "region":
            return offer.cloud, offer.region
        case "cloud":
            return (offer.cloud,)
        case "any":
            return ()


def home_of(held: Sequence[Offer], span: Span = "region") -> tuple[str, ...] | None:
    """Return the location with the most GPUs rented; None if nothing is rented."""
    gpus: dict[tuple[str, ...], int] = {}
    for offer in held:
        place = location_of(offer, span)
        gpus[place] = gpus.get(place, 0) + offer.gpus
    return max(gpus, key=lambda place: (gpus[place], place), default=None)


def spread(
    best: Offer, others: Collection[Offer], held: Mapping[str, int], wanted: int
) -> tuple[Offer, int]:
    """Return which of several similar offers to ask for, and for how many VMs at once.

    VMs in several zones are less often interrupted together. Zones are filled evenly.

    Args:
        best: The offer that would be asked for.
        others: What else could be, ``best`` or not; dissimilar offers do not count.
        held: VMs by zone, launches in flight included.
        wanted: VMs in all.
    """
    zones = {best.zone: best}
    for offer in others:
        if _is_similar(best, offer):
            zones.setdefault(offer.zone, offer)
    zone = min(zones, key=lambda name: (held.get(name, 0), name != best.zone, name))
    fair = math.ceil((sum(held.get(name, 0) for name in zones) + wanted) / len(zones))
    return zones[zone], max(1, min(wanted, fair - held.get(zone, 0)))


def _is_similar(one: Offer, other: Offer) -> bool:
    same = (
        location_of(one) == location_of(other)
        and one.instance_type == other.instance_type
        and one.spot == other.spot
    )
    gap_usd = abs(one.usd_per_hour - other.usd_per_hour)
    return same and gap_usd <= SIMILAR * one.usd_per_hour
