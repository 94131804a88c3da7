"""Azure Retail Prices: public, by region, spot and pay as you go in one table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx

from spottrain.cloud.http import PriceSourceError, get_json

NAME = "azure retail prices"
_API_VERSION = "2023-01-01-preview"
_TYPES_PER_CALL = 10
"""Limits the length of the filter in the URL."""
_NOT_OURS = ("Windows", "CloudServices", "Cloud Services")
"""Products of the same size with other software."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetailPrice:
    """The price of a size with Linux in a region."""

    region: str
    instance_type: str
    spot: bool
    usd_per_hour: float
    """NaN if the table has none."""
    since_s: float
    """Seconds since the epoch."""


def retail_prices(
    client: httpx.Client,
    url: str,
    names: Sequence[str],
    regions: Sequence[str],
    now_s: float,
) -> Iterator[RetailPrice]:
    """Yield the current price of each type, region and market.

    Args:
        client: Asks over HTTP.
        url: Where the API is.
        names: Of instance types.
        regions: As ARM names them; all if empty.
        now_s: Seconds since the epoch.

    Raises:
        PriceSourceError: the API is down or gives an unreadable answer.
    """
    newest: dict[tuple[str, str, bool], RetailPrice] = {}
    for start in range(0, len(names), _TYPES_PER_CALL):
        few = names[start : start + _TYPES_PER_CALL]
        for item in _items(client, url.rstrip("/"), _filter(few, regions)):
            price = _price(item, now_s)
            if price is None:
                continue
            key = (price.region, price.instance_type, price.spot)
            if key not in newest or newest[key].since_s < price.since_s:
                newest[key] = price
    yield from newest.values()


def _items(client: httpx.Client, base: str, condition: str) -> Iterator[dict[str, Any]]:
    url = f"{base}/api/retail/prices"
    params: dict[str, str] | None = {
        "api-version": _API_VERSION,
        "currencyCode": "USD",
        "$filter": condition,
    }
    seen = set()
    while url:
        page = get_json(client, url, params)
        items = page.get("Items")
        if not isinstance(items, list):
            raise PriceSourceError(f"{NAME}: a page without Items")
        yield from items
        seen.add(url)
        # The link to the next page contains the whole query.
        url, params = str(page.get("NextPageLink") or ""), None
        if url and (url in seen or not url.startswith(f"{base}/")):
            raise PriceSourceError(f"{NAME}: unexpected link to the next page: {url}")


def _filter(names: Sequence[str], regions: Sequence[str]) -> str:
    """Return the OData filter. Values are case-sensitive in this version of the API."""
    parts = [
        "serviceName eq 'Virtual Machines'",
        "priceType eq 'Consumption'",
        _any_of("armSkuName", names),
    ]
    if regions:
        parts.append(_any_of("armRegionName", regions))
    return " and ".join(parts)


def _any_of(field: str, values: Sequence[str]) -> str:
    quoted = (value.replace("'", "''") for value in values)
    conditions = (f"{field} eq '{value}'" for value in quoted)
    return f"({' or '.join(conditions)})"


def _price(item: dict[str, Any], now_s: float) -> RetailPrice | None:
    """Return the price of an entry; None if it is not relevant."""
    try:
        meter, product = str(item["meterName"]), str(item["productName"])
        since_s = datetime.fromisoformat(item["effectiveStartDate"]).timestamp()
        if (
            item["unitOfMeasure"] != "1 Hour"
            or item["currencyCode"] != "USD"
            or "Low Priority" in meter
            or any(word in product for word in _NOT_OURS)
            or since_s > now_s
        ):
            return None
        usd = item["retailPrice"]
        return RetailPrice(
            region=str(item["armRegionName"]),
            instance_type=str(item["armSkuName"]),
            spot="Spot" in meter,
            usd_per_hour=float(usd) if isinstance(usd, int | float) else math.nan,
            since_s=since_s,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PriceSourceError(
            f"{NAME}: unreadable entry: {type(error).__name__}: {error}"
        ) from error
