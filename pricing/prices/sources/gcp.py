"""GCP Billing Catalog: a machine's price as the sum of its parts.

Google sells cores, memory, GPUs and local disks separately, each at its own price in each
region. Spot prices change once a month at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from spottrain.cloud.http import PriceSourceError, get_json
from spottrain.pricing.prices.catalogue import GIB_BYTES, InstanceType
from spottrain.pricing.prices.price import Price
from spottrain.pricing.prices.refresh import TTL_S, PriceQuery
from spottrain.units import MONTH_H

URL = "https://cloudbilling.googleapis.com"
NAME = "gcp billing catalog"
_COMPUTE_ENGINE = "services/6F81-5844-456A"
_PAGE = 5000
_SSD = "SSD backed Local Storage"
_PART = re.compile(
    r"^(?:Spot Preemptible )?(?P<part>.+?)(?: attached to Spot Preemptible VMs)?"
    r"(?: running)? in .+$"
)


@dataclass(frozen=True, slots=True)
class _Series:
    """Names of the parts of a machine series in the catalogue."""

    host: str
    """Of cores and memory; empty where the GPU's price holds everything."""
    gpus: tuple[str, ...]
    """Names of the GPU: the first that has a price in the region. None: it has none."""


_SERIES: Mapping[str, _Series] = {
    "a2-highgpu": _Series("A2 Instance", ("Nvidia Tesla A100 GPU",)),
    "a2-megagpu": _Series("A2 Instance", ("Nvidia Tesla A100 GPU",)),
    "a2-ultragpu": _Series("A2 Instance", ("Nvidia Tesla A100 80GB GPU",)),
    "a3-highgpu": _Series("A3 Instance", ("Nvidia H100 80GB GPU",)),
    "a3-megagpu": _Series(
        "A3Plus Instance", ("Nvidia H100 80GB Mega GPU", "Nvidia H100 80GB Plus GPU")
    ),
    "a3-ultragpu": _Series("A3Ultra Instance", ("H200 141GB GPU", "Nvidia H200 141GB GPU")),
    "a4-highgpu": _Series("", ("A4 Nvidia B200 (1 gpu slice)",)),
    "c3-standard": _Series("C3 Instance", ()),
    "g2-standard": _Series("G2 Instance", ("Nvidia L4 GPU",)),
    "g4-standard": _Series("G4 Instance", ("RTX 6000 96GB",)),
    "n1-standard/T4": _Series("N1 Predefined Instance", ("Nvidia Tesla T4 GPU",)),
    "n2-standard": _Series("N2 Instance", ()),
    "n1-standard/P100": _Series("N1 Predefined Instance", ("Nvidia Tesla P100 GPU",)),
    "n1-standard/V100": _Series("N1 Predefined Instance", ("Nvidia Tesla V100 GPU",)),
}

_Parts = dict[tuple[str, str, bool], float]
"""USD per hour and unit, by part, region and market."""


class GcpBillingCatalog:
    """The API.

    Args:
        client: The HTTP client.
        credentials: Returns headers with an API key or an access token, or raises
            ``PriceSourceError``.
        url: Where the API is.
    """

    name = NAME
    cloud = "gcp"
    markets = frozenset({True, False})
    ttl_s = TTL_S

    def __init__(
        self,
        client: httpx.Client,
        credentials: Callable[[], Mapping[str, str]],
        url: str = URL,
    ) -> None:
        self._client, self._url = client, url.rstrip("/")
        self._credentials = credentials

    def fetch(self, question: PriceQuery) -> Iterator[Price]:
        """Yield a price for each type, region and market that has all its parts.

        Raises:
            PriceSourceError: there are no credentials; the API is down, refuses, or its
                answer cannot be read.
        """
        parts: _Parts = {}
        for sku in self._skus(self._credentials()):
            _take(sku, parts)
        offered = {(region, spot) for _, region, spot in parts}
        for kind in question.kinds:
            for region, spot in sorted(offered):
                if question.regions and region not in question.regions:
                    continue
                usd = _sum(kind, region, spot, parts)
                if usd is not None:
                    yield Price(
                        cloud="gcp",
                        region=region,
                        zone=region,
                        instance_type=kind.name,
                        spot=spot,
                        usd_per_hour=usd,
                        since_s=question.now_s,
                        seen_s=question.now_s,
                        source=NAME,
                    )

    def _skus(self, credentials: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        token = ""
        while True:
            page = get_json(
                self._client,
                f"{self._url}/v1/{_COMPUTE_ENGINE}/skus",
                {"currencyCode": "USD", "pageSize": str(_PAGE), "pageToken": token},
                credentials,
            )
            skus = page.get("skus", [])
            if not isinstance(skus, list):
                raise PriceSourceError(f"{NAME}: a page whose skus are not a list")
            yield from skus
            before, token = token, str(page.get("nextPageToken") or "")
            if not token:
                return
            if token == before:
                raise PriceSourceError(f"{NAME}: a page whose next page is itself")


def _take(sku: Mapping[str, Any], parts: _Parts) -> None:
    """Add the price of one part, if machines consist of such parts."""
    try:
        usage = sku["category"]["usageType"]
        match = _PART.match(sku["description"])
        if usage not in ("OnDemand", "Preemptible") or match is None:
            return
        expression = sku["pricingInfo"][-1]["pricingExpression"]
        unit = expression["usageUnit"]
        if unit not in ("h", "GiBy.h", "GiBy.mo"):
            return
        # The last tier is the price: an earlier one may be a free quota.
        price = expression["tieredRates"][-1]["unitPrice"]
        usd = float(price.get("units") or 0) + float(price.get("nanos") or 0) / 1e9
        if price.get("currencyCode", "USD") != "USD":
            return
        per_hour = usd / MONTH_H if unit == "GiBy.mo" else usd
        for region in sku["serviceRegions"]:
            parts[match["part"], str(region), usage == "Preemptible"] = per_hour
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise PriceSourceError(
            f"{NAME}: an entry that cannot be read: {type(error).__name__}: {error}"
        ) from error


def _sum(kind: InstanceType, region: str, spot: bool, parts: _Parts) -> float | None:
    """Return a machine's price; None if a part has none."""
    series = _series(kind)
    if series is None:
        return None
    needed: list[tuple[float, tuple[str, ...]]] = []
    if series.gpus:
        needed.append((kind.gpus, series.gpus))
    if series.host:
        needed.append((kind.vcpus, (f"{series.host} Core",)))
        needed.append((kind.memory_bytes / GIB_BYTES, (f"{series.host} Ram",)))
        if kind.local_ssd_gib:
            needed.append((kind.local_ssd_gib, (_SSD,)))
    costs = []
    for amount, names in needed:
        prices = (parts.get((name, region, spot)) for name in names)
        unit_usd = next((price for price in prices if price is not None), None)
        if unit_usd is None:
            return None
        costs.append(amount * unit_usd)
    return math.fsum(costs)


def _series(kind: InstanceType) -> _Series | None:
    name = "-".join(kind.name.split("-")[:2])
    return _SERIES.get(name) or _SERIES.get(f"{name}/{kind.gpu.name}")
