"""AWS's price APIs: spot price history and the price list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.translate import translating_errors
from spottrain.cloud.port.errors import CloudError

HOME_REGION = "us-east-1"
"""Region that serves the list of regions and the price list."""
_LINUX = "Linux/UNIX"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPrice:
    """A spot price and when it took effect."""

    zone: str
    """Zone name of this account."""
    instance_type: str
    usd_per_hour: str
    """Text, as AWS reports it."""
    since_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPrice:
    """An on-demand price of the price list."""

    region: str
    instance_type: str
    usd_per_hour: str
    gpus: str
    """Text, as listed; empty if missing."""
    since_s: float


def regions(clients: AwsClients) -> list[str]:
    """Return the enabled regions of the account.

    Raises:
        CloudError: the call failed.
    """
    with translating_errors("asking for regions"):
        answer = clients.get("ec2", HOME_REGION).describe_regions()
    return [str(region["RegionName"]) for region in answer["Regions"]]


def spot_prices(
    clients: AwsClients, region: str, instance_types: Sequence[str], since_s: float
) -> Iterator[SpotPrice]:
    """Yield the spot prices of Linux valid since a time, in any order.

    Raises:
        CloudError: the call failed.
    """
    with translating_errors(f"asking for spot prices in {region}"):
        ec2 = clients.get("ec2", region)
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=list(instance_types),
            ProductDescriptions=[_LINUX],
            StartTime=datetime.fromtimestamp(since_s, UTC),
        )
        rows = [row for page in pages for row in page["SpotPriceHistory"]]
    for row in rows:
        yield SpotPrice(
            zone=row["AvailabilityZone"],
            instance_type=row["InstanceType"],
            usd_per_hour=row["SpotPrice"],
            since_s=row["Timestamp"].timestamp(),
        )


def list_prices(
    clients: AwsClients, instance_type: str, regions: Sequence[str]
) -> Iterator[ListPrice]:
    """Yield the on-demand Linux prices of one type; of all regions if none is given.

    Raises:
        CloudError: the call failed.
    """
    wanted = {
        "instanceType": instance_type,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "marketoption": "OnDemand",
    }
    if len(regions) == 1:
        wanted["regionCode"] = regions[0]
    filters = [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()
    ]
    with translating_errors(f"asking for the price of {instance_type}"):
        pricing = clients.get("pricing", HOME_REGION)
        pages = pricing.get_paginator("get_products").paginate(
            ServiceCode="AmazonEC2", Filters=filters
        )
        texts = [text for page in pages for text in page["PriceList"]]
    for text in texts:
        try:
            yield from _listed(json.loads(text), regions)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CloudError(
                f"AWS's price list has an unreadable entry: {type(error).__name__}: {error}"
            ) from error


def _listed(product: dict[str, Any], regions: Sequence[str]) -> Iterator[ListPrice]:
    facts = product["product"]["attributes"]
    region = str(facts.get("regionCode", ""))
    if not region or (regions and region not in regions):
        return
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        since_s = datetime.fromisoformat(term["effectiveDate"]).timestamp()
        for dimension in term["priceDimensions"].values():
            if dimension["unit"] == "Hrs" and "USD" in dimension["pricePerUnit"]:
                yield ListPrice(
                    region=region,
                    instance_type=str(facts["instanceType"]),
                    usd_per_hour=str(dimension["pricePerUnit"]["USD"]),
                    gpus=str(facts.get("gpu", "")),
                    since_s=since_s,
                )
