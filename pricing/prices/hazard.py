"""Preemption hazard: observed losses over a prior by the GPU, which published rates adjust.

Clouds publish rates that differ by orders of magnitude in what they count, or none. So they
only say which places of a cloud are interrupted more than its others; how often VMs with a
GPU are interrupted at all is the same on every cloud until jobs have seen otherwise.

Losses of each place (cloud, zone, instance type) are Poisson counts whose rate has a Gamma
prior, which counts as if observed over some VM-hours of ours, so that a few losses of our
own soon outweigh it. VMs are lost in bursts, so counts scatter more than Poisson
counts do: the expected rate is the same, its bounds are wider (quasi-likelihood; McCullagh
and Nelder, "Generalized Linear Models", 1989, section 6.2.3).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from spottrain.cloud.port.provider import SpotPool
from spottrain.pricing.prices.catalogue import LOSSES_PER_DAY, catalogue
from spottrain.pricing.prices.place import Place
from spottrain.units import DAY_S, HOUR_S, MONTH_H

DAY_H = DAY_S / HOUR_S
BANDS = (0.025, 0.075, 0.125, 0.175, 0.25)
"""Share of VMs preempted within a month, by AWS's bands (under 5 %, 5 to 10, 10 to 15, 15
to 20, over 20): the middles, and 25 % for the open one."""
UNKNOWN_PER_HOUR = LOSSES_PER_DAY / DAY_H
"""Planned with by replays. Groups of which traces were recorded lost 1.4 to 14.6 a VM-day,
but were recorded since they lost many."""
MOST_APART = 4.0
"""Factor by which published rates move the prior, at most, either way."""
DISPERSION = 7.0
"""Variance over mean of the losses of an hour. In four recorded groups it was 1.3, 4.7, 19.8
and 23.8; this is about their geometric mean."""
PRIOR_VM_HOURS = 24.0
"""Weight of the prior, and of the region's other zones: a day of one VM of ours."""
_CONFIDENCE = 0.95

Basis = Literal["measured", "published", "assumed"]
"""What a rate rests on besides the prior: VM-hours of ours in the region, what the cloud
says of the place, or nothing."""


_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedHours:
    """VM-hours and losses of our spot VMs in one place."""

    place: Place
    vm_hours: float
    losses: int
    """VMs that were preempted, with notice or without, or that fell silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """Expected interruptions of one VM in one place."""

    losses_per_hour: float
    """The mean of the posterior."""
    low: float
    high: float
    """Losses per hour; each bound is exceeded with a probability of 5 %."""
    vm_hours: float
    losses: int
    """Observed in the place itself."""
    prior_per_hour: float
    """Expected before anything was observed."""
    basis: Basis


def band_per_hour(band: int) -> float:
    """Return the losses per hour of a published interruption band.

    A share p of VMs lost in a month is a rate of -ln(1 - p) per month.

    Args:
        band: Index into BANDS.

    Raises:
        ValueError: there is no such band.
    """
    if not 0 <= band < len(BANDS):
        raise ValueError(f"band: got {band}; give 0 to {len(BANDS) - 1}")
    return -math.log1p(-BANDS[band]) / MONTH_H


def usual_per_hour(place: Place) -> float:
    """Return the losses per hour of one spot VM of a type, by its GPU alone."""
    kind = catalogue().find(place.cloud, place.instance_type)
    return (LOSSES_PER_DAY if kind is None else kind.gpu.losses_per_day) / DAY_H


class Hazards:
    """Hazards of all places, including those never observed.

    Args:
        exposures: Observations, any number for a place.
        bands: Published bands by (cloud, region, instance type).
        pools: What clouds say of their spot VMs now; it is newer than the bands.
    """

    def __init__(
        self,
        exposures: Iterable[ObservedHours],
        bands: Mapping[tuple[str, str, str], int],
        pools: Iterable[SpotPool] = (),
    ) -> None:
        self._bands = bands
        known = tuple(pools)
        self._pools = {
            (pool.cloud, pool.zone, pool.instance_type): pool
            for pool in (*_whole_regions(known), *known)
        }
        said: dict[str, list[float]] = {}
        for (cloud, _, _), band in bands.items():
            said.setdefault(cloud, []).append(band_per_hour(band))
        for pool in known:
            if pool.losses_per_hour is not None:
                said.setdefault(pool.cloud, []).append(pool.losses_per_hour)
        self._typical = {cloud: statistics.median(rates) for cloud, rates in said.items()}
        """The median of what a cloud publishes."""
        self._zones: dict[Place, tuple[float, int]] = {}
        self._regions: dict[tuple[str, str, str], tuple[float, int]] = {}
        for seen in exposures:
            _add(self._zones, seen.place, seen)
            _add(self._regions, _region(seen.place), seen)

    def of(self, place: Place) -> Hazard:
        """Return the hazard of one place.

        The prior of a zone comes from the region's other zones, and theirs from the GPU and
        what the cloud publishes. The bounds are Garwood's for a Poisson rate, with the prior's VM-hours and
        losses counted as observed and as many bursts as there may have been: wide where
        little was observed.
        """
        hours, losses = self._zones.get(place, (0.0, 0))
        region = self._regions.get(_region(place), (0.0, 0))
        said = self._published(place)
        before = usual_per_hour(place) * self._relative(place.cloud, said)
        elsewhere_h = max(0.0, region[0] - hours)
        prior = _mean(before, elsewhere_h, region[1] - losses)
        shape = PRIOR_VM_HOURS * prior + losses
        rate_h = PRIOR_VM_HOURS + hours
        low, high = _bounds(shape / DISPERSION)
        return Hazard(
            losses_per_hour=shape / rate_h,
            low=DISPERSION * low / rate_h,
            high=DISPERSION * high / rate_h,
            vm_hours=hours,
            losses=losses,
            prior_per_hour=before,
            basis="measured" if region[0] > 0 else "assumed" if said is None else "published",
        )

    def _relative(self, cloud: str, said: float | None) -> float:
        """Return how much more often a place is interrupted than its cloud's others."""
        typical = self._typical.get(cloud, 0.0)
        if said is None or typical <= 0:
            return 1.0
        return min(MOST_APART, max(1 / MOST_APART, said / typical))

    def obtainability(self, place: Place) -> float | None:
        """Return how likely a request is fulfilled there, from 0 to 1; None: unknown."""
        found = self._pools.get((place.cloud, place.zone, place.instance_type))
        return None if found is None else found.obtainability

    def _published(self, place: Place) -> float | None:
        """Return the published losses per hour of a zone, or of its region."""
        for zone in (place.zone, place.region):
            pool = self._pools.get((place.cloud, zone, place.instance_type))
            if pool is not None and pool.losses_per_hour is not None:
                return pool.losses_per_hour
        band = self._bands.get(_region(place))
        return None if band is None else band_per_hour(band)


def _whole_regions(pools: Sequence[SpotPool]) -> list[SpotPool]:
    """Return the means of zones: where a cloud's prices are those of a region, plans are."""
    regions: dict[tuple[str, str, str], list[SpotPool]] = {}
    for pool in pools:
        at = pool.cloud, pool.region, pool.instance_type
        regions.setdefault(at, []).append(pool)
    return [
        replace(
            zones[0],
            zone=region,
            losses_per_hour=_mean_known(zone.losses_per_hour for zone in zones),
            obtainability=_mean_known(zone.obtainability for zone in zones),
        )
        for (_, region, _), zones in regions.items()
    ]


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _region(place: Place) -> tuple[str, str, str]:
    return place.cloud, place.region, place.instance_type


def _add(sums: dict[_Key, tuple[float, int]], key: _Key, seen: ObservedHours) -> None:
    hours, losses = sums.get(key, (0.0, 0))
    sums[key] = (hours + seen.vm_hours, losses + seen.losses)


def _mean(prior_per_hour: float, hours: float, losses: int) -> float:
    """Return the posterior mean of a Gamma-Poisson rate."""
    return (PRIOR_VM_HOURS * prior_per_hour + losses) / (PRIOR_VM_HOURS + hours)


@functools.lru_cache(maxsize=4096)  # most places were never observed: few shapes
def _bounds(shape: float) -> tuple[float, float]:
    """Return the bounds of a Poisson mean of which ``shape`` events were observed."""
    return gamma_quantile(shape, 1 - _CONFIDENCE), gamma_quantile(shape + 1, _CONFIDENCE)


# --- Quantiles of the gamma distribution, without scipy, which is larger than the rest -----

_PRECISION = 1e-12
"""Of the logarithm of a quantile."""
_NEGLIGIBLE, _ENOUGH = 1e-16, 1e-15
"""Share of a series that ends it; how near to one a factor of the fraction ends that."""


def gamma_quantile(shape: float, share: float) -> float:
    """Return the quantile of the gamma distribution of scale 1.

    By bisection, in the logarithm, since quantiles of small shapes are tiny; to about
    eleven digits of scipy's ``gammaincinv``.

    Args:
        shape: Above zero.
        share: Of the distribution that lies below, between 0 and 1.
    """
    # Below it the share is less than x ** shape / gamma(shape + 1), DLMF 8.10.1.
    low = (math.log(share) + math.lgamma(shape + 1)) / shape
    high = low + 1.0
    while _gamma_share(shape, math.exp(high)) < share:
        high += 1.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        if _gamma_share(shape, math.exp(middle)) < share:
            low = middle
        else:
            high = middle
    return math.exp(high)


def _gamma_share(shape: float, x: float) -> float:
    """Return the regularized lower incomplete gamma function P(shape, x).

    The series of DLMF 8.7.1 below the mean, else one minus the continued fraction of DLMF
    8.9.2, whose convergents are evaluated by Lentz's method (Applied Optics 15, 1976).
    """
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape + 1)) if x > 0 else 0.0
    if x < shape + 1:
        term = total = 1.0
        above = shape
        while term > total * _NEGLIGIBLE:
            above += 1.0
            term *= x / above
            total += term
        return front * total
    b = x + 1.0 - shape
    c, d = math.inf, 1.0 / b
    fraction = d
    for n in itertools.count(1):
        a = -n * (n - shape)
        b += 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        fraction *= (step := c * d)
        if abs(step - 1.0) < _ENOUGH:
            break
    return 1.0 - front * shape * fraction
