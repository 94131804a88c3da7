"""All price APIs, with this machine's credentials."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from spottrain.cloud.azure.settings import PRICES_VARIABLE
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


def price_sources(
    client: httpx.Client, environment: Mapping[str, str]
) -> list[PriceSource]:
    """Return all price APIs; nothing is queried or imported yet.

    Args:
        client: The HTTP client.
        environment: Holds the GCP credentials: GOOGLE_API_KEY, or else
            GOOGLE_OAUTH_ACCESS_TOKEN. boto3 finds AWS's itself; Azure needs none.
    """
    aws = aws_clients()
    return [
        AwsSpotPrices(aws),
        AwsPriceList(aws),
        AzureRetailPrices(client, environment.get(AZURE_URL) or azure.URL),
        GcpBillingCatalog(
            client, _gcp_credentials(environment), environment.get(GCP_URL) or gcp.URL
        ),
    ]


def _gcp_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return headers: a key in the URL would end up in logs."""
    if key := environment.get("GOOGLE_API_KEY"):
        return {"X-Goog-Api-Key": key}
    if token := environment.get("GOOGLE_OAUTH_ACCESS_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    return {}
