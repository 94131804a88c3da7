"""Offers, placement scores, price history and quotas of Compute Engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from spottrain.cloud.gcp import answers, requests
from spottrain.cloud.gcp.clients import GcpClients
from spottrain.cloud.gcp.requests import GcpInstanceKind
from spottrain.cloud.gcp.settings import GcpSettings, Prices
from spottrain.cloud.gcp.translate import translating_errors
from spottrain.cloud.port.errors import MisconfiguredError
from spottrain.cloud.port.facts import CloudFacts, make_offer, with_attached
from spottrain.cloud.port.provider import ANY_FAMILY, Offer, PlacementScore, Quota

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

    def _offer(
        self, zone: str, instance_type: str, spot: bool, usd: float, at_s: float
    ) -> Offer:
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
        machines = self._zones(
            "machine_types", {k.machine_type for k in kinds.values()}
        )
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

    def told_prices(self) -> str:
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
            raise MisconfiguredError(
                f"GCP: no price is known, so nothing can be rented; {warning}"
            )
        told = f"{sum(priced)} of {len(places)} types and zones have a price"
        return f"{told}; {warning}" if warning else told

    def placement_scores(self, instance_type: str, count: int) -> list[PlacementScore]:
        """Return Google's obtainability score of spot VMs in each zone."""
        kind = requests.kind_of(instance_type)
        zones = [zone for zone, name in self.places() if name == instance_type]
        found: list[PlacementScore] = []
        with translating_errors(
            f"asking for placement scores of {count} {instance_type}"
        ):
            for zone in zones:
                found += self._ask_score(zone, kind, count)
        return found

    def _ask_score(
        self, zone: str, kind: GcpInstanceKind, count: int
    ) -> Iterator[PlacementScore]:
        region = requests.region_of(zone)
        arguments = requests.advice(kind, count, zone)
        answer = self._clients.call("advice", "capacity", arguments)
        for advised in answer.get("recommendations", ())[:1]:
            score = float(advised.get("scores", {}).get("obtainability", 0.0))
            yield PlacementScore(region=region, zone=zone, score=score)

    def price_history(self, since_s: float) -> list[Offer]:
        """Return the spot list prices of our regions valid since a time."""
        found = []
        ours = set(self.places())
        pairs = {(requests.region_of(zone), name) for zone, name in ours}
        for region, instance_type in sorted(pairs):
            with translating_errors(
                f"asking for past prices of {instance_type} in {region}"
            ):
                records = self._ask_history(region, instance_type)
            zones = sorted(
                zone
                for zone, name in ours
                if name == instance_type and requests.region_of(zone) == region
            )
            for began_s, ended_s, usd in records:
                if ended_s is not None and ended_s <= since_s:
                    continue
                found += [
                    self._offer(zone, instance_type, True, usd, began_s)
                    for zone in zones
                ]
        return found

    def _ask_history(
        self, region: str, instance_type: str
    ) -> list[tuple[float, float | None, float]]:
        """Return (start, end, USD per hour) of each price, oldest first."""
        kind = requests.kind_of(instance_type)
        arguments = requests.history(region, kind)
        answer = self._clients.call("advice", "capacity_history", arguments)
        records = []
        for record in answer.get("price_history", ()):
            price, interval = record["list_price"], record["interval"]
            usd = int(price.get("units", 0)) + price.get("nanos", 0) / 1e9
            end = interval.get("end_time")
            began_s = answers.parse_time_s(interval["start_time"])
            records.append((began_s, answers.parse_time_s(end) if end else None, usd))
        return sorted(records, key=lambda record: record[0])

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


def _quotas(
    region: str, content: dict[str, Any], families: set[str]
) -> Iterator[Quota]:
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
                family=metric.removeprefix(_SPOT),
                spot=metric.startswith(_SPOT),
                limit=float(quota.get("limit", 0.0)),
                unit="vcpu" if metric.endswith("_CPUS") else "gpu",
                used=float(quota.get("usage", 0.0)),
            )
