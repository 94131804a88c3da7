"""Azure Retail Prices as a source of prices."""

from __future__ import annotations

from collections.abc import Iterator

import httpx

from spottrain.cloud.azure.prices import NAME, retail_prices
from spottrain.cloud.azure.settings import PRICES_URL
from spottrain.pricing.prices.price import Price
from spottrain.pricing.prices.refresh import TTL_S, PriceQuery

URL = PRICES_URL


class AzureRetailPrices:
    """The API.

    Args:
        client: The HTTP client.
        url: Where the API is.
    """

    name = NAME
    cloud = "azure"
    markets = frozenset({True, False})
    ttl_s = TTL_S

    def __init__(self, client: httpx.Client, url: str = URL) -> None:
        self._client, self._url = client, url

    def fetch(self, question: PriceQuery) -> Iterator[Price]:
        """Yield a price for each type, region and market.

        Raises:
            PriceSourceError: the API is down, or its answer cannot be read.
        """
        names = [kind.name for kind in question.kinds]
        found = retail_prices(self._client, self._url, names, question.regions, question.now_s)
        for price in found:
            yield Price(
                cloud="azure",
                region=price.region,
                zone=price.region,
                instance_type=price.instance_type,
                spot=price.spot,
                usd_per_hour=price.usd_per_hour,
                since_s=price.since_s,
                seen_s=question.now_s,
                source=NAME,
            )
