"""Offers, prices, eviction rates and quotas of Azure."""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from spottrain.cloud.azure import requests
from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.prices import RetailPrice, retail_prices
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.azure.translate import translating_errors
from spottrain.cloud.http import TIMEOUT
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.facts import CloudFacts, make_offer, with_attached
from spottrain.cloud.port.provider import ANY_FAMILY, Offer, Quota, SpotPool

logger = logging.getLogger(__name__)

SIZES_KEEP_S = 3600.0
"""The list of a region's sizes has megabytes and rarely changes."""
PRICES_KEEP_S = 600.0
"""Azure's prices change a few times a month."""


_GRAPH_URL = "/providers/Microsoft.ResourceGraph/resources?api-version=2022-10-01"
_BANDS = {"0-5": 0.025, "5-10": 0.075, "10-15": 0.125, "15-20": 0.175, "20+": 0.25}
"""Share of spot VMs evicted within an hour ("Build workloads on spot virtual machines",
Azure Architecture Center): the middles, and 25 % for the open one."""
_ADDRESS_QUOTAS = frozenset(
    {
        "publicipaddresses",
        "standardskupublicipaddresses",
        "ipv4standardskupublicipaddresses",
    }
)
"""Of all public addresses, and of those of our SKU; subscriptions name them differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A VM size in one region."""

    zones: tuple[str, ...]
    """Numbers of the zones open to the account; one empty number if the region has no
    zones."""
    spot: bool
    family: str
    """Family of its on-demand quota."""
    accelerated: bool
    """True if it supports accelerated networking."""


class AzureMarket:
    """The market of one subscription."""

    def __init__(self, clients: AzureClients, settings: AzureSettings, facts: CloudFacts) -> None:
        self._clients = clients
        self._settings = settings
        self._facts = facts
        self._lock = threading.Lock()
        self._sizes: dict[str, tuple[float, dict[str, Size]]] = {}
        self._prices: dict[str, tuple[float, float, list[RetailPrice]]] = {}

    def offers(self, region: str) -> list[Offer]:
        """Return offers of sizes that have a price and are open to the account, by
        zone.

        Prices are per region.

        Raises:
            CloudError: Azure does not answer.
        """
        sizes = self.sizes(region)
        seen_s, prices = self._prices_seen(region)
        attached = self._settings.attached_usd_per_hour
        return [
            with_attached(
                make_offer(
                    self._facts,
                    cloud=requests.CLOUD,
                    region=region,
                    zone=zone,
                    instance_type=price.instance_type,
                    spot=price.spot,
                    usd_per_hour=price.usd_per_hour,
                    observed_at_s=seen_s,
                    family=requests.SPOT_QUOTA if price.spot else sizes[price.instance_type].family,
                ),
                attached,
            )
            for price in prices
            if price.usd_per_hour > 0
            for zone in self._zones(region, price, sizes.get(price.instance_type))
        ]

    def _zones(self, region: str, price: RetailPrice, size: Size | None) -> Iterator[str]:
        if size is None or (price.spot and not size.spot):
            return
        for number in size.zones:
            zone = requests.zone_of(region, number)
            if not self._settings.zones or zone in self._settings.zones:
                yield zone

    def size(self, region: str, instance_type: str) -> Size | None:
        """Return a size in a region; None if it is not open to the account."""
        return self.sizes(region).get(instance_type)

    def sizes(self, region: str) -> dict[str, Size]:
        """Return our types that are open to the account in a region."""
        with self._lock:
            asked_s, kept = self._sizes.get(region, (-SIZES_KEEP_S, {}))
            if time.monotonic() - asked_s < SIZES_KEEP_S:
                return kept
            asked_s = time.monotonic()
            with translating_errors(f"asking for sizes in {region}"):
                listed = self._clients.compute.resource_skus.list(filter=f"location eq '{region}'")
                wanted = self._settings.instance_types
                found = {
                    sku.name: size
                    for sku in listed
                    if sku.resource_type == "virtualMachines" and sku.name in wanted
                    if (size := size_of(sku.as_dict(), region)) is not None
                }
            self._sizes[region] = asked_s, found
            return found

    def quotas(self, region: str) -> list[Quota]:
        """Return the quotas of our types, in virtual CPUs."""
        families = {size.family.lower() for size in self.sizes(region).values()}
        families |= {requests.SPOT_QUOTA.lower(), "cores"}
        with translating_errors(f"asking for quotas in {region}"):
            listed = [use.as_dict() for use in self._clients.compute.usage.list(region)]
        found = []
        for use in listed:
            name = use["name"]["value"].strip()  # some have stray spaces
            if name.lower() in families:
                spot = name == requests.SPOT_QUOTA
                found.append(_quota(region, name, use, "vcpu", spot=spot))
        return found + self._address_quotas(region)

    def _address_quotas(self, region: str) -> list[Quota]:
        """Return the quotas of public addresses, of which each VM has one."""
        if not self._settings.public_addresses:
            return []
        try:
            with translating_errors(f"asking for quotas of addresses in {region}"):
                usages = self._clients.network.usages.list(region)
                listed = [use.as_dict() for use in usages]
        except CloudError as error:  # a refusal will tell
            logger.info("%s", error)
            return []
        return [
            _quota(region, ANY_FAMILY, use, "vm")
            for use in listed
            if use["name"]["value"].strip().lower() in _ADDRESS_QUOTAS
        ]

    def image_versions(self, region: str, named: str) -> list[str]:
        """Return the versions that a region has of ``publisher:offer:sku:version``."""
        part = requests.image(named)
        with translating_errors(f"looking for image {named} in {region}"):
            found = self._clients.compute.virtual_machine_images.list(
                region, part["publisher"], part["offer"], part["sku"]
            )
        return [each.name for each in found]

    def spot_pools(self) -> list[SpotPool]:
        """Return the eviction rates of our types in our regions.

        The table must be asked at tenant scope: a query that names subscriptions finds
        nothing in it.
        """
        from azure.core.rest import HttpRequest

        types, regions = self._settings.instance_types, self._settings.regions
        body = eviction_query(types, regions)
        with translating_errors("asking for eviction rates"):
            asked = HttpRequest("POST", _GRAPH_URL, json=body)
            answer = self._clients.resources.send_request(asked)
            answer.raise_for_status()
        return eviction_pools(answer.json().get("data", ()), types)

    def _prices_seen(self, region: str) -> tuple[float, list[RetailPrice]]:
        """Return (time of observation, prices)."""
        with self._lock:
            asked_s, seen_s, kept = self._prices.get(region, (-PRICES_KEEP_S, 0.0, []))
            if time.monotonic() - asked_s < PRICES_KEEP_S:
                return seen_s, kept
            asked_s, seen_s = time.monotonic(), time.time()
            settings = self._settings
            trusted = settings.ca_file
            verify = ssl.create_default_context(cafile=trusted) if trusted else True
            with httpx.Client(timeout=TIMEOUT, verify=verify) as client:
                found = list(
                    retail_prices(
                        client,
                        settings.prices_url,
                        settings.instance_types,
                        [region],
                        seen_s,
                    )
                )
            self._prices[region] = asked_s, seen_s, found
            return seen_s, found


def _quota(
    region: str, family: str, use: Mapping[str, Any], unit: str, *, spot: bool = False
) -> Quota:
    return Quota(
        region=region,
        family=family,
        spot=spot,
        limit=float(use["limit"]),
        unit=unit,
        used=float(use["currentValue"]),
    )


def size_of(sku: dict[str, Any], region: str) -> Size | None:
    """Parse an entry of Resource SKUs; None if it is not open to the account."""
    locations = [
        each for each in sku.get("locationInfo") or () if each["location"].lower() == region
    ]
    zones = {zone for each in locations for zone in each.get("zones") or ()}
    zonal = bool(zones)
    for restriction in sku.get("restrictions") or ():
        if restriction["type"] == "Location":
            return None
        closed = restriction.get("restrictionInfo", {}).get("zones") or ()
        zones -= set(closed)
    if not locations or (zonal and not zones):
        return None
    can = {each["name"]: each["value"] for each in sku.get("capabilities") or ()}
    return Size(
        zones=tuple(sorted(zones)) or ("",),
        spot=can.get("LowPriorityCapable") == "True",
        family=str(sku.get("family", "")),
        accelerated=can.get("AcceleratedNetworkingEnabled") == "True",
    )


def eviction_query(sizes: Sequence[str], regions: Sequence[str]) -> dict[str, Any]:
    """Return the body of a query for the eviction rates of sizes in regions."""
    text = (
        "SpotResources "
        "| where type =~ 'microsoft.compute/skuspotevictionrate/location' "
        f"| where sku.name in~ ({_quoted(sizes)}) and location in~ ({_quoted(regions)}) "
        "| project size = tostring(sku.name), location, "
        "rate = tostring(properties.evictionRate)"
    )
    return {"query": text, "options": {"resultFormat": "objectArray"}}


def eviction_pools(rows: Iterable[Mapping[str, Any]], sizes: Sequence[str]) -> list[SpotPool]:
    """Return the rows of an answer as pools; those of an unknown band are left out.

    Azure's case of names varies.
    """
    names = {size.lower(): size for size in sizes}
    return [
        SpotPool(
            cloud=requests.CLOUD,
            region=region,
            zone=region,
            instance_type=names[name],
            losses_per_hour=-math.log1p(-_BANDS[row["rate"]]),
        )
        for row in rows
        if row.get("rate") in _BANDS
        if (name := str(row.get("size", "")).lower()) in names
        if (region := str(row.get("location", "")).lower())
    ]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))
