"""Observed prices, and which of them to trust."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.catalogue import Catalogue
from spottrain.units import DAY_S, HOUR_S, counted

SPOT_MAX_AGE_S = DAY_S
"""An older spot price is shown, but nothing is rented by it."""
ON_DEMAND_MAX_AGE_S = 90 * DAY_S
"""The same for on-demand prices, which change a few times a year."""
_MOST_USD_PER_GPU_HOUR = 200.0
"""A higher price is a placeholder: the most expensive GPU of 2026 costs 18."""
PUBLISHED = "published"
"""Source of on-demand prices that ship with the package."""
ESTIMATE = "estimate"
"""Source of spot prices that ship with the package: nothing is rented by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of one machine type in one place, over the time in which it held."""

    cloud: str
    region: str
    zone: str
    """The region, where the cloud prices by region."""
    instance_type: str
    spot: bool
    usd_per_hour: float
    since_s: float
    """When it began or was first seen, in seconds since the epoch."""
    seen_s: float
    """When it was last known to hold."""
    source: str
    """Its source, such as ``azure retail prices``."""
    gpus: int | None = None
    """GPUs of the machine, where the source says."""

    @property
    def name(self) -> str:
        """Name of the offer in messages."""
        market = "spot" if self.spot else "on-demand"
        return f"{self.cloud} {self.zone} {self.instance_type} {market}"

    @property
    def is_estimate(self) -> bool:
        """Return whether it is a spot price that ships with the package."""
        return self.source == ESTIMATE

    def age_s(self, now_s: float) -> float:
        """Return how long ago it was last known to hold; a clock may jump back."""
        return max(0.0, now_s - self.seen_s)

    def is_stale(self, now_s: float) -> bool:
        """Return whether it is too old to rent by, or an estimate."""
        if self.is_estimate:
            return True
        bound_s = SPOT_MAX_AGE_S if self.spot else ON_DEMAND_MAX_AGE_S
        return self.age_s(now_s) > bound_s


@dataclass(frozen=True, slots=True)
class FilteredPrices:
    """Prices that remain, and a warning for each that was left out."""

    prices: tuple[Price, ...]
    warnings: tuple[str, ...]


def sift(prices: Iterable[Price], facts: Catalogue, now_s: float) -> FilteredPrices:
    """Leave out what cannot be a price of a machine in the catalogue.

    NaN, infinite, zero, negative and placeholder prices, wrong GPU counts, and prices of
    the future. Machines that the catalogue does not know are left out silently: clouds
    list many.
    """
    good, warnings = [], []
    for price in prices:
        kind = facts.find(price.cloud, price.instance_type)
        if kind is None or price.since_s > now_s + HOUR_S:
            continue
        usd = price.usd_per_hour
        if not math.isfinite(usd) or usd <= 0:
            why = f"price: got {usd:g} USD per hour"
        elif usd > _MOST_USD_PER_GPU_HOUR * kind.gpus:
            why = f"price: got {usd:g} USD per hour for {counted(kind.gpus, 'GPU')}"
        elif price.gpus is not None and price.gpus != kind.gpus:
            why = f"GPUs: got {price.gpus}, the machine has {kind.gpus}"
        else:
            good.append(price)
            continue
        warnings.append(f"{price.name}: {why}; left out")
    return FilteredPrices(tuple(good), tuple(dict.fromkeys(warnings)))


def usable(prices: Sequence[Price]) -> FilteredPrices:
    """Leave out spot prices without a discount.

    Clouds list the on-demand price where they sell no spot capacity.
    """
    ceilings: dict[tuple[str, str, str], float] = {}
    for price in prices:
        if not price.spot:
            place = (price.cloud, price.region, price.instance_type)
            ceilings[place] = min(price.usd_per_hour, ceilings.get(place, price.usd_per_hour))
    good, warnings = [], []
    for price in prices:
        place = (price.cloud, price.region, price.instance_type)
        ceiling = ceilings.get(place, math.inf)
        if price.spot and price.usd_per_hour >= ceiling:
            warnings.append(
                f"{price.name}: {price.usd_per_hour:g} USD per hour is no less than on "
                f"demand ({ceiling:g}); no usable spot offer there"
            )
        else:
            good.append(price)
    return FilteredPrices(tuple(good), tuple(warnings))


def fresh(prices: Iterable[Price], now_s: float) -> FilteredPrices:
    """Leave out prices too old to rent by; one warning per cloud and market."""
    good: list[Price] = []
    old: dict[tuple[str, bool], list[float]] = {}
    for price in prices:
        if price.is_stale(now_s):
            ages = old.setdefault((price.cloud, price.spot), [])
            ages.append(price.age_s(now_s))
        else:
            good.append(price)
    warnings = tuple(
        f"{cloud}: {len(ages)} {'spot' if spot else 'on-demand'} prices are "
        f"{min(ages) / DAY_S:.0f} days old or more; too old to rent by, run "
        "'spottrain prices' with network and credentials"
        for (cloud, spot), ages in old.items()
    )
    return FilteredPrices(tuple(good), warnings)


def published(facts: Catalogue) -> tuple[Price, ...]:
    """Return the prices that ship with the package, by region: on demand, and estimates
    of spot prices."""
    return tuple(
        Price(
            cloud=price.cloud,
            region=price.region,
            zone=price.region,
            instance_type=price.instance_type,
            spot=price.spot,
            usd_per_hour=price.usd_per_hour,
            since_s=price.published_at,
            seen_s=price.published_at,
            source=ESTIMATE if price.spot else PUBLISHED,
        )
        for price in facts.published()
    )


def offers(prices: Iterable[Price], facts: Catalogue) -> list[Offer]:
    """Return the offers at these prices, one per price.

    A zone that equals the region stands for all its zones. ``gpu_speed`` stays 1: a job's
    throughput on a GPU is not a fact of the machine.
    """
    found = []
    for price in prices:
        kind = facts.find(price.cloud, price.instance_type)
        if kind is None:
            continue
        offer = Offer(
            cloud=price.cloud,
            region=price.region,
            zone=price.zone,
            instance_type=price.instance_type,
            spot=price.spot,
            usd_per_hour=price.usd_per_hour,
            observed_at_s=price.seen_s,
            gpus=kind.gpus,
            gpu_memory_bytes=kind.gpu.memory_bytes,
            device=kind.device,
        )
        found.append(offer)
    return found
