"""Offers, spot pools and quotas of Compute Engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from spottrain.cloud.gcp import answers, requests
from spottrain.cloud.gcp.clients import GcpClients
from spottrain.cloud.gcp.settings import GcpSettings, Prices
from spottrain.cloud.gcp.translate import translating_errors
from spottrain.cloud.parallel import run_parallel
from spottrain.cloud.port.errors import CloudError, MisconfiguredError
from spottrain.cloud.port.facts import CloudFacts, make_offer, with_attached
from spottrain.cloud.port.provider import ANY_FAMILY, Offer, Quota, SpotPool

logger = logging.getLogger(__name__)

PLACES_KEEP_S = 3600.0
"""The types of a zone change every few months."""


class GcpMarket:
    """The market of one project."""

    def __init__(
        self,
        clients: GcpClients,
        settings: GcpSettings,
        facts: CloudFacts,
        prices: Prices,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._facts = facts
        self._prices = prices
        self._lock = threading.Lock()
        self._fetched_at_s = -PLACES_KEEP_S
        self._places: list[tuple[str, str]] = []

    def offers(self) -> tuple[Offer, ...]:
        """Return offers of types in our zones with a price, spot before on demand."""
        now_s = time.time()
        return tuple(
            with_attached(
                self._offer(zone, instance_type, spot, usd, now_s),
                self._settings.attached_usd_per_hour,
            )
            for zone, instance_type in self.places()
            for spot in (True, False)
            if (usd := self._price(zone, instance_type, spot)) is not None
        )

    def _offer(self, zone: str, instance_type: str, spot: bool, usd: float, at_s: float) -> Offer:
        return make_offer(
            self._facts,
            cloud=requests.CLOUD,
            region=requests.region_of(zone),
            zone=zone,
            instance_type=instance_type,
            spot=spot,
            usd_per_hour=usd,
            observed_at_s=at_s,
            family=answers.family_of(instance_type),
        )

    def places(self) -> list[tuple[str, str]]:
        """Return each available (zone, instance type) of ours."""
        with self._lock:
            if time.monotonic() - self._fetched_at_s >= PLACES_KEEP_S:
                with translating_errors("asking which zones have which machines"):
                    self._places = sorted(self._ask_places())
                self._fetched_at_s = time.monotonic()
            return self._places

    def _ask_places(self) -> Iterator[tuple[str, str]]:
        kinds = {name: requests.kind_of(name) for name in self._settings.instance_types}
        machines = self._zones("machine_types", {k.machine_type for k in kinds.values()})
        attached = {k.accelerator for k in kinds.values() if k.accelerator}
        gpus = self._zones("accelerator_types", attached) if attached else set()
        for zone in sorted({zone for zone, _ in machines}):
            if not self._is_ours(zone):
                continue
            for name, kind in kinds.items():
                fits = not kind.accelerator or (zone, kind.accelerator) in gpus
                if fits and (zone, kind.machine_type) in machines:
                    yield zone, name

    def _zones(self, service: str, names: set[str]) -> set[tuple[str, str]]:
        """Return each existing (zone, name)."""
        arguments = {"filter": requests.any_of("name", names)}
        return {
            (zone, item["name"])
            for zone, content in self._clients.scopes(service, arguments)
            for item in content.get(service, ())
        }

    def _is_ours(self, zone: str) -> bool:
        if self._settings.zones:
            return zone in self._settings.zones
        return requests.region_of(zone) in self._settings.regions

    def _price(self, zone: str, instance_type: str, spot: bool) -> float | None:
        region = requests.region_of(zone)
        return self._prices.usd_per_hour(region, instance_type, spot)

    def describe_prices(self) -> str:
        """Return how many of our machines have a price.

        Raises:
            MisconfiguredError: none has, so nothing can be rented.
        """
        places, warning = self.places(), self._prices.warning()
        priced = [
            any(self._price(zone, kind, spot) is not None for spot in (True, False))
            for zone, kind in places
        ]
        if places and not any(priced):
            raise MisconfiguredError(f"GCP: no price is known, so nothing can be rented; {warning}")
        told = f"{sum(priced)} of {len(places)} types and zones have a price"
        return f"{told}; {warning}" if warning else told

    def spot_pools(self, count: int) -> list[SpotPool]:
        """Return preemption rate and obtainability score of each type in each zone.

        Both are previews of Google's: what it does not answer is unknown.
        """
        return list(run_parallel(lambda at: self._pool(*at, count), self.places()))

    def _pool(self, zone: str, name: str, count: int) -> SpotPool:
        kind = requests.kind_of(name)
        now = self._ask_advice("capacity", requests.advice(kind, count, zone))
        past: dict[str, Any] = {}
        if not kind.accelerator:  # Google has no history of attached GPUs
            past = self._ask_advice("capacity_history", requests.preemptions(kind, zone))
        return SpotPool(
            cloud=requests.CLOUD,
            region=requests.region_of(zone),
            zone=zone,
            instance_type=name,
            losses_per_hour=answers.losses_per_hour(past),
            obtainability=answers.obtainability(now),
        )

    def _ask_advice(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return advice; nothing if Google has none of a machine, or gives none now."""
        try:
            with translating_errors("asking for advice on spot VMs"):
                return self._clients.call("advice", method, arguments)
        except CloudError as error:
            logger.info("%s", error)
            return {}

    def quotas(self) -> list[Quota]:
        """Return the quotas of our types in our regions, and of all GPUs of the project."""
        kinds = self._settings.instance_types
        families = {answers.family_of(name) for name in kinds}
        found = []
        with translating_errors("asking for quotas"):
            for region in self._settings.regions:
                content = self._clients.call("regions", "get", {"region": region})
                found += list(_quotas(region, content, families))
                found += list(self._per_vm(region, content))
            if any(family.endswith("_GPUS") for family in families):
                content = self._clients.call("projects", "get", {})
                found += list(_quotas("", content, {answers.ALL_REGIONS}))
        return found

    def _per_vm(self, region: str, content: dict[str, Any]) -> Iterator[Quota]:
        """Yield the quotas of a region that all VMs count against, in VMs."""
        settings = self._settings
        uses = {"SSD_TOTAL_GB": settings.disk_gib}  # of pd-balanced, too
        if settings.public_addresses:
            uses["IN_USE_ADDRESSES"] = 1
        for quota in content.get("quotas", ()):
            if each := uses.get(quota["metric"]):
                yield Quota(
                    region=region,
                    family=ANY_FAMILY,
                    spot=False,
                    limit=float(quota.get("limit", 0.0)) / each,
                    unit="vm",
                    used=float(quota.get("usage", 0.0)) / each,
                )


_SPOT = "PREEMPTIBLE_"


def _quotas(region: str, content: dict[str, Any], families: set[str]) -> Iterator[Quota]:
    listed = content.get("quotas", ())
    known = {quota["metric"] for quota in listed}
    for quota in listed:
        metric = quota["metric"]
        on_demand = metric.removeprefix(_SPOT)
        if metric != on_demand and not quota.get("limit") and on_demand in known:
            continue  # until it is granted, spot VMs count against that on demand
        if on_demand in families:
            yield Quota(
                region=region,
                family=on_demand,
                spot=metric != on_demand,
                limit=float(quota.get("limit", 0.0)),
                unit="vcpu" if metric.endswith("_CPUS") else "gpu",
                used=float(quota.get("usage", 0.0)),
            )
