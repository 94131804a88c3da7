"""All price APIs, with this machine's credentials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import httpx

from spottrain.cloud.azure.settings import PRICES_VARIABLE
from spottrain.cloud.gcp.clients import authorization
from spottrain.pricing.prices.refresh import PriceSource
from spottrain.pricing.prices.sources import azure, gcp
from spottrain.pricing.prices.sources.aws import (
    AwsPriceList,
    AwsSpotPrices,
    aws_clients,
)
from spottrain.pricing.prices.sources.azure import AzureRetailPrices
from spottrain.pricing.prices.sources.gcp import GcpBillingCatalog

AZURE_URL, GCP_URL = PRICES_VARIABLE, "SPOTTRAIN_GCP_PRICES_URL"
"""Environment variables with other URLs, such as a proxy's; boto3 has its own."""


def price_sources(client: httpx.Client, environment: Mapping[str, str]) -> list[PriceSource]:
    """Return all price APIs; nothing is queried or imported yet.

    Args:
        client: The HTTP client.
        environment: May hold GOOGLE_API_KEY or GOOGLE_OAUTH_ACCESS_TOKEN. Without them
            Google's SDK finds the credentials, as boto3 does AWS's; Azure needs none.
    """
    aws = aws_clients()
    return [
        AwsSpotPrices(aws),
        AwsPriceList(aws),
        AzureRetailPrices(client, environment.get(AZURE_URL) or azure.URL),
        gcp_prices(client, environment),
    ]


def gcp_prices(client: httpx.Client, environment: Mapping[str, str]) -> GcpBillingCatalog:
    """Return Google's price API; see ``price_sources``."""
    find: Callable[[], dict[str, str]] = partial(_gcp_credentials, environment)
    return GcpBillingCatalog(client, find, environment.get(GCP_URL) or gcp.URL)


def _gcp_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return headers: a key in the URL would end up in logs.

    Raises:
        PriceSourceError: There are no credentials.
    """
    if key := environment.get("GOOGLE_API_KEY"):
        return {"X-Goog-Api-Key": key}
    if token := environment.get("GOOGLE_OAUTH_ACCESS_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    return authorization(gcp.URL)
