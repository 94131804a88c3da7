"""AWS's price APIs through boto3: spot price history and the price list.

boto3 is imported when the first question is asked: it comes with the extra ``aws``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from spottrain.cloud.errors import AuthError, CloudError, ThrottledError

PRICE_LIST_REGION = "us-east-1"
"""The price list of all regions is answered there."""
_LINUX = "Linux/UNIX"
_TRIES, _CONNECT_S, _READ_S = 5, 5, 20
_RETRY_AFTER_S = 30.0
_NO_CREDENTIALS = {
    "AuthFailure",
    "AccessDenied",
    "AccessDeniedException",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnauthorizedOperation",
    "UnrecognizedClientException",
}
_THROTTLED = {
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPrice:
    """A spot price that began at a moment."""

    zone: str
    """As this account names it."""
    instance_type: str
    usd_per_hour: str
    """As AWS writes it."""
    since_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPrice:
    """An on-demand price of the price list."""

    region: str
    instance_type: str
    usd_per_hour: str
    gpus: str
    """As the list tells; empty if it does not."""
    since_s: float


def regions() -> list[str]:
    """Return the regions that the account may use.

    Raises:
        CloudError: AWS cannot be asked.
    """
    with _explained():
        answer = _client("ec2", None).describe_regions()
        return [str(region["RegionName"]) for region in answer["Regions"]]


def spot_prices(
    region: str, instance_types: Sequence[str], since_s: float
) -> Iterator[SpotPrice]:
    """Yield the spot prices of Linux that have held since a moment, in any order.

    Raises:
        CloudError: AWS cannot be asked.
    """
    with _explained():
        pages = _client("ec2", region).get_paginator("describe_spot_price_history")
        for page in pages.paginate(
            InstanceTypes=list(instance_types),
            ProductDescriptions=[_LINUX],
            StartTime=datetime.fromtimestamp(since_s, UTC),
        ):
            for row in page["SpotPriceHistory"]:
                yield SpotPrice(
                    zone=row["AvailabilityZone"],
                    instance_type=row["InstanceType"],
                    usd_per_hour=row["SpotPrice"],
                    since_s=row["Timestamp"].timestamp(),
                )


def list_prices(instance_type: str, regions: Sequence[str]) -> Iterator[ListPrice]:
    """Yield the on-demand prices of Linux of one type; of all regions if none is given.

    Raises:
        CloudError: AWS cannot be asked.
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
        {"Type": "TERM_MATCH", "Field": field, "Value": value}
        for field, value in wanted.items()
    ]
    with _explained():
        pages = _client("pricing", PRICE_LIST_REGION).get_paginator("get_products")
        for page in pages.paginate(ServiceCode="AmazonEC2", Filters=filters):
            for text in page["PriceList"]:
                yield from _listed(json.loads(text), regions)


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


def _client(service: str, region: str | None) -> Any:
    """Return a client; boto3 itself retries and slows down when throttled."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise CloudError(
            "boto3 is not installed; run pip install 'spottrain[aws]'"
        ) from None
    # A session of its own: the default one is not safe to share between threads.
    session = boto3.session.Session()
    config = Config(
        retries={"mode": "standard", "total_max_attempts": _TRIES},
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
    )
    region = region or session.region_name or PRICE_LIST_REGION
    return session.client(service, region_name=region, config=config)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what boto3 raises into what a caller can act on."""
    try:
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            NoCredentialsError,
            PartialCredentialsError,
        )
    except ImportError:
        raise CloudError(
            "boto3 is not installed; run pip install 'spottrain[aws]'"
        ) from None
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError):
        raise AuthError("no AWS credentials; run 'aws configure'") from None
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _NO_CREDENTIALS:
            raise AuthError(f"AWS refuses the credentials: {error}") from None
        if code in _THROTTLED:
            raise ThrottledError(f"AWS throttles: {error}", _RETRY_AFTER_S) from None
        raise CloudError(f"AWS refuses: {error}") from None
    except BotoCoreError as error:
        raise CloudError(f"AWS cannot be asked: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CloudError(
            f"AWS answered what cannot be read: {type(error).__name__}: {error}"
        ) from None
