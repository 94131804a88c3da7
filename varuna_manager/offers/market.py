"""The offers of a job: those of its own file, and those of clouds at known prices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from types import MappingProxyType

from spottrain.cloud.port.facts import with_attached
from spottrain.cloud.port.provider import Offer
from spottrain.errors import ConfigError
from spottrain.machine import cores, is_cpu
from spottrain.pricing.prices.catalogue import GpuType, catalogue
from spottrain.pricing.prices.hazard import Basis, Hazards
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.place import place_of
from spottrain.pricing.prices.price import fresh, offers
from spottrain.pricing.prices.refresh import PriceRequest, known
from spottrain.pricing.ranking.gpu_speed import (
    Work,
    machine_as_offered,
    machine_of,
    measured_ratio,
    speed_ratio,
    work_of,
)
from spottrain.pricing.ranking.rank import Priced
from spottrain.units import DAY_S
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.wire.model import ModelFacts, Precision, Profile

EXPOSURE_S = 90 * DAY_S
"""Older VM lives say nothing about today's market."""
BOOT_S = 180.0
"""Assumed time from paying for a cloud's VM to training, until a job has measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOn:
    """What a job was measured on: the base of relative speeds."""

    gpu: GpuType
    work: Work
    """What training asks of a GPU."""
    profile: Profile | None = None
    """What was measured; None: nothing to compare other measurements with."""
    others: tuple[Profile, ...] = ()
    """Measured of the same model, on any devices; the newest first."""

    def measured_speed(self, gpu: GpuType) -> float | None:
        """Return the measured speed of another GPU; None if it was not measured."""
        if self.profile is None or gpu.name == self.gpu.name:
            return None
        return measured_ratio(gpu, self.profile, self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMarket:
    """Offers that can be rented now."""

    offers: tuple[Priced, ...]
    warnings: tuple[str, ...] = ()
    """A line each about what was left out."""


def hazards_of(history: History, now_s: float) -> Hazards:
    """Return interruption rates: seen by the jobs of this machine, and said by clouds."""
    seen = history.exposures(now_s - EXPOSURE_S, now_s)
    return Hazards(seen, catalogue().bands(), history.pools(now_s))


def losses_per_hour(offer: Offer, hazards: Hazards) -> float:
    """Return the interruptions of one VM to expect; on-demand VMs have none."""
    return hazards.of(place_of(offer)).losses_per_hour if offer.spot else 0.0


def obtainability(offer: Offer, hazards: Hazards) -> float | None:
    """Return how likely a request for a spot offer is fulfilled; None: not known."""
    return hazards.obtainability(place_of(offer)) if offer.spot else None


def losses_basis(offer: Offer, hazards: Hazards) -> Basis:
    """Return what the interruptions of an offer rest on; that on-demand VMs have none is
    assumed."""
    return hazards.of(place_of(offer)).basis if offer.spot else "assumed"


def own_market(
    config: JobConfig,
    hazards: Hazards,
    now_s: float,
    *,
    is_measured: bool = True,
    on_gpus: bool = False,
    speed_of: Callable[[Offer], float] = attrgetter("gpu_speed"),
) -> JobMarket:
    """Return the offers of the job file's own machines, spot and on demand.

    Args:
        hazards: Interruption rates.
        now_s: Seconds since the epoch.
        is_measured: Whether the profile was measured; a speed in the file makes an
            estimate in any case.
        on_gpus: Whether it was measured on a GPU, hence slots are some.
        speed_of: Returns the speed of an offer's slots relative to the profile's device.
    """
    (provider,) = config.resources.providers
    markets = (True, False) if provider == "local" else (True,)
    found = []
    gpus: dict[str, str] = {}
    if provider == "ssh" and config.device != "cpu":
        gpus = {host.type: host.gpu or "" for host in config.ssh.hosts}
    if config.cluster is not None and config.device != "cpu":
        gpus = {zone.instance_type: config.cluster.gpu or "" for zone in config.zones}
    for zone in config.zones:
        for spot in markets:
            usd = zone.spot_usd_per_hour if spot else zone.on_demand_usd_per_hour
            offer = Offer(
                cloud=provider,
                region=provider,
                zone=provider if provider == "ssh" else zone.name,
                instance_type=zone.instance_type,
                spot=spot,
                usd_per_hour=usd,
                observed_at_s=now_s,
                gpus=zone.slots,
                gpu_memory_bytes=zone.slot_memory_bytes,
                gpu_speed=zone.slot_speed,
                gpu=gpus.get(zone.instance_type, ""),
                shared_cores=cores() if provider == "local" else 0,
            )
            shape = machine_as_offered(offer, zone.slots, speed_of(offer))
            priced = Priced(
                offer=offer,
                machine=replace(shape, is_gpu=on_gpus or shape.is_gpu),
                losses_per_hour=losses_per_hour(offer, hazards),
                losses_basis=losses_basis(offer, hazards),
                boot_s=zone.boot_s,
                max_vms=zone.capacity if spot else None,
                is_estimate=shape.speed != 1.0 or not is_measured,
            )
            found.append(priced)
    return JobMarket(offers=tuple(found))


def cloud_market(
    history: History,
    base: MeasuredOn,
    now_s: float,
    *,
    clouds: Collection[str],
    regions: Sequence[str] = (),
    zones: Collection[str] = (),
    instance_types: Collection[str] = (),
    attached: Mapping[str, float] = MappingProxyType({}),
    dated: bool = False,
) -> JobMarket:
    """Return what clouds rent at the last known prices, without asking them.

    Its throughputs are estimates, of GPUs that the model was not measured on.

    Args:
        history: Known prices and interruptions.
        base: What the job was measured on.
        now_s: Seconds since the epoch.
        clouds: Of ``catalogue.CLOUDS``.
        regions: All if empty.
        zones: All if empty; a price for a whole region is one for each.
        instance_types: All that the catalogue knows if empty.
        attached: USD per hour of a VM's disk and public address, by cloud.
        dated: Take prices that are too old to rent by, and estimates of spot prices, where
            nothing newer is known of a cloud: for a plan, which rents nothing.

    Raises:
        ConfigError: A cloud or an instance type that the catalogue does not know.
    """
    facts = catalogue()
    kinds = facts.matching(clouds=clouds, names=instance_types)
    request = PriceRequest(kinds=kinds, regions=regions)
    believed = known(history, facts, request, now_s, estimates=dated)
    new = fresh(believed.prices, now_s)
    current = {(price.cloud, price.spot) for price in new.prices}
    hazards = hazards_of(history, now_s)
    found = []
    for price in believed.prices:
        if zones and price.zone not in zones and price.zone != price.region:
            continue
        for offer in offers([price], facts):
            whole = with_attached(offer, attached.get(offer.cloud, 0.0))
            priced = priced_offer(whole, base, hazards)
            stale = price.is_stale(now_s)
            plans = dated and stale and (price.cloud, price.spot) not in current
            marked = replace(priced, is_stale=stale and not plans, is_dated=plans)
            found.append(marked)
    overpriced = len(believed.warnings)
    left_out = f"{overpriced} spot prices left out: no lower than on demand"
    warnings = [left_out] * bool(overpriced)
    warnings += _dated_lines(found) if dated else new.warnings
    return JobMarket(offers=tuple(found), warnings=tuple(warnings))


def _dated_lines(offers: Sequence[Priced]) -> list[str]:
    """Return a line on the clouds whose prices are dated, and one on prices that are left
    out because newer ones are known."""
    oldest: dict[tuple[str, bool], float] = {}
    for priced in offers:
        if priced.is_dated:
            market = priced.offer.cloud, priced.offer.spot
            seen_s = priced.offer.observed_at_s
            oldest[market] = min(oldest.get(market, seen_s), seen_s)
    dates = [
        f"{cloud} {'spot' if spot else 'on demand'} since "
        f"{datetime.fromtimestamp(seen_s, UTC):%Y-%m-%d}"
        for (cloud, spot), seen_s in sorted(oldest.items())
    ]
    lines = []
    if dates:
        lines.append(
            f"dated prices, spot ones estimates: {', '.join(dates)}; nothing is rented "
            "by them, 'spottrain prices' asks the clouds"
        )
    if old := sum(priced.is_stale for priced in offers):
        lines.append(f"{old} prices are too old to rent by; left out")
    return lines


def priced_offer(offer: Offer, base: MeasuredOn, hazards: Hazards) -> Priced:
    """Return a cloud's offer with what the catalogue and the history know about it."""
    kind = catalogue().find(offer.cloud, offer.instance_type)
    machine, measured = None, None
    if kind is not None:
        measured = base.measured_speed(kind.gpu)
        speed = measured or speed_ratio(kind.gpu, base.gpu, base.work)
        machine = None if speed is None else machine_of(kind, speed)
    return Priced(
        offer=offer,
        machine=machine,
        losses_per_hour=losses_per_hour(offer, hazards),
        losses_basis=losses_basis(offer, hazards),
        obtainability=obtainability(offer, hazards),
        boot_s=BOOT_S,
        is_estimate=measured is None,
    )


def base_of(
    profile: Profile,
    facts: ModelFacts,
    precision: Precision = "fp32",
    *,
    on_cpus: bool = False,
    others: tuple[Profile, ...] = (),
) -> MeasuredOn:
    """Return what a job was measured on, or estimated on.

    Args:
        profile: Names the device.
        precision: Of the job's matrix multiplications.
        on_cpus: The job trains on CPUs: one that the catalogue does not know is taken for
            the slowest that it knows.
        others: Further profiles of the model.

    Raises:
        ConfigError: The device cannot be compared with others.
    """
    known = catalogue()
    gpu = known.gpu_of(profile.device)
    on_cpu = is_cpu(profile.device) if gpu is None else not gpu.compute_capability
    if on_cpu and not on_cpus:
        raise ConfigError(
            f"the profile was measured on a CPU, {profile.device}, which says nothing about "
            "GPUs; give one that was measured on a GPU, or none: then it is estimated"
        )
    if gpu is not None and bool(gpu.compute_capability) == on_cpus:
        gpu = None
    if gpu is None and on_cpus:
        gpu = min(known.cpus.values(), key=lambda cpu: cpu.peak_flops["fp32"])
    if gpu is None:
        raise ConfigError(
            f"the profile was measured on {profile.device}, which has no published peak "
            "to compare clouds' GPUs with; give one that was measured on one of "
            f"{', '.join(known.gpus)}"
        )
    work = work_of(facts, precision, profile)
    return MeasuredOn(gpu=gpu, work=work, profile=profile, others=others)
