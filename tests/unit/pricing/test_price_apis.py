"""The price APIs, against servers on loopback that speak their protocols."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.fakes.gcp import service_account
from tests.fakes.prices import (
    DAY_S,
    KEY,
    NOW_S,
    FakePrices,
    aws_product,
    azure_item,
    gcp_sku,
)

from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.http import PriceSourceError
from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.price import Price
from spottrain.pricing.prices.refresh import PriceQuery, PriceSource
from spottrain.pricing.prices.sources.aws import AwsPriceList, AwsSpotPrices
from spottrain.pricing.prices.sources.registry import AZURE_URL, GCP_URL, price_sources

A100 = "Standard_NC24ads_A100_v4"
T4 = "Standard_NC4as_T4_v3"


@pytest.fixture
def fake() -> Iterator[FakePrices]:
    with FakePrices().serving() as fake:
        yield fake


@pytest.fixture
def sources(fake: FakePrices, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, PriceSource]]:
    for name, value in (
        ("AWS_ENDPOINT_URL", fake.url),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_CONFIG_FILE", "/nonexistent"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    environment = {AZURE_URL: fake.url, GCP_URL: fake.url, "GOOGLE_API_KEY": KEY}
    with httpx.Client() as client:
        yield {s.name: s for s in price_sources(client, environment)}


def ask(
    source: PriceSource,
    *names: str,
    regions: Sequence[str] = (),
    since_s: float = NOW_S - 7 * DAY_S,
) -> list[Price]:
    kinds = catalogue().matching(clouds=[source.cloud], names=names)
    question = PriceQuery(kinds=kinds, regions=regions, now_s=NOW_S, since_s=since_s)
    return sorted(source.fetch(question), key=lambda p: (p.name, p.since_s))


def brief(prices: Sequence[Price]) -> list[tuple[str, Any]]:
    return [(price.name, pytest.approx(price.usd_per_hour)) for price in prices]


# --- Azure --------------------------------------------------------------------------------


def test_azure_is_read_page_by_page(fake: FakePrices, sources: dict[str, PriceSource]) -> None:
    fake.azure = [
        azure_item(A100, 3.67),
        azure_item(A100, 1.2, spot=True),
        azure_item(A100, 4.0, region="westeurope"),
        azure_item(A100, 1.5, spot=True, region="westeurope"),
        azure_item(T4, 0.5),
    ]
    prices = ask(sources["azure retail prices"], A100, T4)
    assert brief(prices) == [
        (f"azure eastus {A100} on-demand", 3.67),
        (f"azure eastus {A100} spot", 1.2),
        (f"azure eastus {T4} on-demand", 0.5),
        (f"azure westeurope {A100} on-demand", 4.0),
        (f"azure westeurope {A100} spot", 1.5),
    ]
    assert {price.zone for price in prices} == {"eastus", "westeurope"}
    assert len(fake.asked) == 3


def test_azure_regions_are_asked_for(fake: FakePrices, sources: dict[str, PriceSource]) -> None:
    fake.azure = [azure_item(A100, 3.0), azure_item(A100, 4.0, region="westeurope")]
    source = sources["azure retail prices"]
    (price,) = ask(source, A100, regions=["westeurope"])
    assert price.region == "westeurope"


@pytest.mark.parametrize(
    "changes",
    [
        {"productName": "Virtual Machines NCads Series Windows"},
        {"meterName": "NC24ads A100 v4 Low Priority"},
        {"unitOfMeasure": "1/Month"},
        {"currencyCode": "EUR"},
        {"effectiveStartDate": "2027-01-01T00:00:00Z"},
    ],
)
def test_other_azure_products_than_linux_vms_by_the_hour_are_skipped(
    fake: FakePrices, sources: dict[str, PriceSource], changes: dict[str, Any]
) -> None:
    fake.azure = [azure_item(A100, 3.0), azure_item(A100, 9.0, **changes)]
    prices = ask(sources["azure retail prices"], A100)
    assert brief(prices) == [(f"azure eastus {A100} on-demand", 3.0)]


def test_of_two_azure_prices_the_one_that_began_last_counts(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    older: dict[str, Any] = {"effectiveStartDate": "2025-01-01T00:00:00Z"}
    fake.azure = [azure_item(A100, 3.0), azure_item(A100, 9.0, **older)]
    (price,) = ask(sources["azure retail prices"], A100)
    assert price.usd_per_hour == 3.0


def test_a_price_that_is_not_a_number_becomes_nan(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    fake.azure = [azure_item(A100, math.nan), azure_item(T4, 0.5, retailPrice="?")]
    prices = ask(sources["azure retail prices"], A100, T4)
    assert all(math.isnan(price.usd_per_hour) for price in prices)


def test_throttled_requests_wait_as_long_as_the_cloud_says(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    fake.azure = [azure_item(A100, 3.0)]
    fake.faults = [(429, {"Retry-After": "0"}), (503, {"Retry-After": "0"})]
    assert ask(sources["azure retail prices"], A100)
    assert len(fake.asked) == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"faults": [(404, {})]}, "127.0.0.1 refused the request: HTTP 404 Not Found"),
        (
            {"faults": [(503, {"Retry-After": "0"})] * 4},
            "request to 127.0.0.1 failed: HTTP 503 Service Unavailable",
        ),
        ({"faults": [(200, {})]}, "did not answer with a JSON object"),
        ({"azure": [{"armSkuName": A100}]}, "unreadable entry"),
    ],
)
def test_an_api_that_fails_says_why_in_one_line(
    fake: FakePrices,
    sources: dict[str, PriceSource],
    change: dict[str, list[object]],
    expected: str,
) -> None:
    vars(fake).update(change)
    with pytest.raises(PriceSourceError, match=expected) as error:
        ask(sources["azure retail prices"], A100)
    assert "\n" not in str(error.value)


def test_a_redirect_to_another_host_is_not_followed(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    fake.azure = [azure_item(A100, 3.0) for _ in range(3)]
    url, fake.url = fake.url, "http://127.0.0.1:1"
    with pytest.raises(PriceSourceError, match="unexpected link"):
        ask(sources["azure retail prices"], A100)
    fake.url = url


# --- GCP ----------------------------------------------------------------------------------


def a2_skus(region: str = "us-central1") -> list[dict[str, object]]:
    where: dict[str, Any] = {"regions": (region,)}
    spot: dict[str, Any] = {"usage": "Preemptible", **where}
    return [
        gcp_sku("A2 Instance Core running in Americas", 0.031611, **where),
        gcp_sku("A2 Instance Ram running in Americas", 0.004237, unit="GiBy.h", **where),
        gcp_sku("Nvidia Tesla A100 GPU running in Americas", 2.933908, **where),
        gcp_sku("Spot Preemptible A2 Instance Core running in Americas", 0.01, **spot),
        gcp_sku("Spot Preemptible A2 Instance Ram running in Americas", 0.002, **spot),
        gcp_sku(
            "Nvidia Tesla A100 GPU attached to Spot Preemptible VMs running in Americas",
            0.88,
            **spot,
        ),
    ]


def test_gcp_sums_the_parts_of_a_machine(fake: FakePrices, sources: dict[str, PriceSource]) -> None:
    """a2-highgpu-1g: the published price of us-central1."""
    fake.gcp = a2_skus()
    prices = ask(sources["gcp billing catalog"], "a2-highgpu-1g", "g2-standard-4")
    assert brief(prices) == [
        ("gcp us-central1 a2-highgpu-1g on-demand", 3.673385),
        ("gcp us-central1 a2-highgpu-1g spot", 0.88 + 12 * 0.01 + 85 * 0.002),
    ]


def test_gcp_counts_local_disks_by_the_month(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    """a2-ultragpu-1g: the published price of us-central1, 375 GiB of disk in it."""
    fake.gcp = [
        *a2_skus(),
        gcp_sku("Nvidia Tesla A100 80GB GPU running in Americas", 3.9278),
        gcp_sku("SSD backed Local Storage in Americas", 0.08, unit="GiBy.mo"),
    ]
    (price,) = ask(sources["gcp billing catalog"], "a2-ultragpu-1g")
    assert price.usd_per_hour == pytest.approx(5.0688, abs=2e-3)


def test_gcp_types_with_a_part_missing_have_no_price(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    fake.gcp = a2_skus()[1:]
    (price,) = ask(sources["gcp billing catalog"], "a2-highgpu-1g")
    assert price.spot


def test_gcp_skips_products_that_are_not_sold_by_the_hour(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    part = "Nvidia Tesla A100 GPU running in Americas"
    fake.gcp = [
        *a2_skus(),
        gcp_sku(part, 1.0, usage="Commit1Yr"),
        gcp_sku("Commitment v1: " + part, 1.0),
        gcp_sku(part, 1.0, unit="By"),
    ]
    prices = ask(sources["gcp billing catalog"], "a2-highgpu-1g")
    assert prices[0].usd_per_hour == pytest.approx(3.673385)


def test_gcp_regions_are_distinguished(fake: FakePrices, sources: dict[str, PriceSource]) -> None:
    fake.gcp = [*a2_skus(), *a2_skus("europe-west4")]
    source = sources["gcp billing catalog"]
    prices = ask(source, "a2-highgpu-1g", regions=["europe-west4"])
    assert {price.region for price in prices} == {"europe-west4"}


def test_gcp_n1_machines_take_the_gpu_that_is_attached(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    fake.gcp = [
        gcp_sku("N1 Predefined Instance Core running in Americas", 0.03),
        gcp_sku("N1 Predefined Instance Ram running in Americas", 0.004),
        gcp_sku("Nvidia Tesla T4 GPU running in Americas", 0.35),
    ]
    name = "n1-standard-8+1xT4"
    (price,) = ask(sources["gcp billing catalog"], name, "n1-standard-8+1xV100")
    assert price.usd_per_hour == pytest.approx(0.35 + 8 * 0.03 + 30 * 0.004)


def test_gcp_accepts_the_credentials_of_googles_other_tools(
    fake: FakePrices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps(service_account(fake.url)))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    fake.gcp = [
        gcp_sku(f"{part} running in Americas", 0.01)
        for part in (
            "N1 Predefined Instance Core",
            "N1 Predefined Instance Ram",
            "Nvidia Tesla T4 GPU",
        )
    ]
    with httpx.Client() as client:
        source = price_sources(client, {GCP_URL: fake.url})[-1]
        (price,) = ask(source, "n1-standard-8+1xT4")
    assert price.usd_per_hour == pytest.approx(0.01 + 8 * 0.01 + 30 * 0.01)


def test_gcp_without_credentials_says_what_to_do(
    fake: FakePrices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with httpx.Client() as client:
        source = price_sources(client, {GCP_URL: fake.url})[-1]
        with pytest.raises(PriceSourceError, match="application-default login"):
            ask(source, "a2-highgpu-1g")
    assert fake.asked == []


def test_gcp_that_refuses_the_key_does_not_print_it(fake: FakePrices) -> None:
    environment = {GCP_URL: fake.url, "GOOGLE_API_KEY": "a-wrong-secret"}
    with httpx.Client() as client:
        source = price_sources(client, environment)[-1]
        with pytest.raises(PriceSourceError, match="HTTP 403") as error:
            ask(source, "a2-highgpu-1g")
    assert "secret" not in str(error.value)


# --- AWS ----------------------------------------------------------------------------------


def test_aws_spot_prices_hold_until_the_next_one_begins(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    day = [NOW_S - n * DAY_S for n in range(6)]
    fake.aws_spot = [
        ("us-east-1a", "p4d.24xlarge", "9.000000", day[1]),
        ("us-east-1a", "p4d.24xlarge", "8.000000", day[3]),
        ("us-east-1b", "p4d.24xlarge", "12.00000", day[5]),
        ("us-west-2a", "p4d.24xlarge", "7.000000", day[2]),
        ("us-west-2a", "p5.48xlarge", "20.00000", day[2]),
    ]
    prices = ask(sources[AwsSpotPrices.name], "p4d.24xlarge")
    assert [(p.region, p.zone, p.usd_per_hour, p.since_s, p.seen_s) for p in prices] == [
        ("us-east-1", "us-east-1a", 8.0, day[3], day[1]),
        ("us-east-1", "us-east-1a", 9.0, day[1], NOW_S),
        ("us-east-1", "us-east-1b", 12.0, day[5], NOW_S),
        ("us-west-2", "us-west-2a", 7.0, day[2], NOW_S),
    ]
    assert fake.asked[0] == "DescribeRegions"


def test_aws_regions_that_are_named_are_not_looked_up(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    source = sources[AwsSpotPrices.name]
    assert ask(source, "p4d.24xlarge", regions=["us-east-1"]) == []
    assert fake.asked == ["DescribeSpotPriceHistory"]


def test_aws_lists_on_demand_prices_with_the_gpus(
    fake: FakePrices, sources: dict[str, PriceSource]
) -> None:
    fake.aws_products = [
        aws_product("p4d.24xlarge", "21.9576420000"),
        aws_product("p4d.24xlarge", "23.0000000000", region="eu-west-1"),
        aws_product("p4d.24xlarge", "", region="us-west-2"),
        aws_product("p5.48xlarge", "55.0400000000"),
    ]
    source = sources[AwsPriceList.name]
    prices = ask(source, "p4d.24xlarge", regions=["us-east-1", "us-west-2"])
    assert [(p.zone, p.gpus) for p in prices] == [("us-east-1", 8), ("us-west-2", 8)]
    assert prices[0].usd_per_hour == pytest.approx(21.957642)
    assert math.isnan(prices[1].usd_per_hour)


def test_aws_throttling_is_left_to_boto3(fake: FakePrices, sources: dict[str, PriceSource]) -> None:
    fake.aws_spot = [("us-east-1a", "p4d.24xlarge", "9.0", NOW_S)]
    fake.faults = [(503, {})]
    source = sources[AwsSpotPrices.name]
    assert len(ask(source, "p4d.24xlarge", regions=["us-east-1"])) == 1


def test_aws_without_credentials_says_what_to_run(
    sources: dict[str, PriceSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(AuthError, match="'aws configure'"):
        ask(sources[AwsSpotPrices.name], "p4d.24xlarge", regions=["us-east-1"])


def test_aws_that_cannot_be_reached_is_a_cloud_error(
    monkeypatch: pytest.MonkeyPatch, sources: dict[str, PriceSource]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    impatient = AwsSpotPrices(AwsClients(AwsSettings(instance_types=(), tries=1)))
    with pytest.raises(CloudError, match="AWS cannot be reached, asking for spot"):
        ask(impatient, "p4d.24xlarge", regions=["us-east-1"])
