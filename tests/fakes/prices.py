"""The clouds' price APIs on loopback: paging, throttling, refusals, and what they said.

It checks what it is asked, as the real ones do: a wrong question is answered with 400.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.http_server import running, url_of

NOW_S = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
DAY_S = 86400.0
KEY = "the-key"


def azure_item(
    name: str, usd: float, *, spot: bool = False, region: str = "eastus", **changes: Any
) -> dict[str, Any]:
    """An entry of Azure's table; fields as the API documents them."""
    meter = name.removeprefix("Standard_").replace("_", " ") + " Spot" * spot
    item = {
        "currencyCode": "USD",
        "retailPrice": usd,
        "unitPrice": usd,
        "armRegionName": region,
        "effectiveStartDate": "2026-01-01T00:00:00Z",
        "meterName": meter,
        "productName": "Virtual Machines NCads Series",
        "skuName": meter,
        "serviceName": "Virtual Machines",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "armSkuName": name,
    }
    return item | changes


def gcp_sku(
    description: str,
    usd: float,
    *,
    usage: str = "OnDemand",
    unit: str = "h",
    regions: tuple[str, ...] = ("us-central1",),
) -> dict[str, Any]:
    """An entry of Google's catalogue."""
    units, nanos = divmod(round(usd * 1e9), 10**9)
    price = {"currencyCode": "USD", "units": str(units), "nanos": nanos}
    return {
        "skuId": "0000-0000-0000",
        "description": description,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Compute",
            "resourceGroup": "GPU",
            "usageType": usage,
        },
        "serviceRegions": list(regions),
        "pricingInfo": [
            {
                "effectiveTime": "2026-11-01T00:00:00Z",
                "pricingExpression": {
                    "usageUnit": unit,
                    "tieredRates": [{"startUsageAmount": 0, "unitPrice": price}],
                },
            }
        ],
    }


def aws_product(
    name: str, usd: str, *, region: str = "us-east-1", gpu: str = "8"
) -> dict[str, Any]:
    """An entry of AWS's price list."""
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": usd}}
    term = {
        "effectiveDate": "2026-11-01T00:00:00Z",
        "priceDimensions": {"X.Y.Z": dimension},
    }
    facts = {"instanceType": name, "regionCode": region, "gpu": gpu}
    return {"product": {"attributes": facts}, "terms": {"OnDemand": {"X.Y": term}}}


class FakePrices:
    """What the clouds would say, for a test to write."""

    def __init__(self) -> None:
        self.azure: list[dict[str, Any]] = []
        self.gcp: list[dict[str, Any]] = []
        self.aws_products: list[dict[str, Any]] = []
        self.aws_spot: list[tuple[str, str, str, float]] = []
        """(zone, type, price, since_s)"""
        self.aws_regions = ["us-east-1", "us-west-2"]
        self.page = 2
        """Entries on a page."""
        self.faults: list[tuple[int, dict[str, str]]] = []
        """Answers (status, headers) that come before any other."""
        self.down = False
        self.asked: list[str] = []
        """Method and path, or action, of every request."""
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[FakePrices]:
        """Answer on a free port until the end."""
        server = _Server(("127.0.0.1", 0), _Handler)
        server.prices = self
        self.url = url_of(server)
        with running(server):
            yield self

    def page_of(self, items: list[Any], start: int) -> tuple[list[Any], int | None]:
        end = start + self.page
        return items[start:end], end if end < len(items) else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    prices: FakePrices


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.fake.asked.append(f"GET {url.path}")
        if not self._fails():
            if url.path == "/api/retail/prices":
                self._azure(query)
            elif url.path == "/v1/services/6F81-5844-456A/skus":
                self._gcp(query)
            else:
                self._answer(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        target = self.headers.get("X-Amz-Target", "")
        if target:
            action, question = target.partition(".")[2], json.loads(body)
        else:
            question = {key: values[0] for key, values in parse_qs(body).items()}
            action = question["Action"]
        self.fake.asked.append(action)
        if not self._fails():
            answer = {
                "DescribeRegions": self._aws_regions,
                "DescribeSpotPriceHistory": self._aws_spot,
                "GetProducts": self._aws_products,
            }[action]
            answer(question)

    @property
    def fake(self) -> FakePrices:
        return self.server.prices

    def _fails(self) -> bool:
        status, headers = (503, {}) if self.fake.down else (0, dict[str, str]())
        if self.fake.faults:
            status, headers = self.fake.faults.pop(0)
        if status:
            self._answer(status, headers=headers)
        return bool(status)

    def _azure(self, query: dict[str, str]) -> None:
        condition = query.get("$filter", "")
        if (
            query.get("api-version") != "2023-01-01-preview"
            or query.get("currencyCode") != "USD"
            or "serviceName eq 'Virtual Machines'" not in condition
            or "priceType eq 'Consumption'" not in condition
        ):
            self._answer(400)
            return
        names = re.findall("armSkuName eq '([^']*)'", condition)
        regions = re.findall("armRegionName eq '([^']*)'", condition)
        items = [
            item
            for item in self.fake.azure
            if item["armSkuName"] in names and (not regions or item["armRegionName"] in regions)
        ]
        page, after = self.fake.page_of(items, int(query.get("$skip", 0)))
        link = None
        if after is not None:
            before = re.sub(r"&%24skip=\d+", "", self.path)
            link = f"{self.fake.url}{before}&%24skip={after}"
        self._json({"Items": page, "NextPageLink": link, "Count": len(page)})

    def _gcp(self, query: dict[str, str]) -> None:
        signed = self.headers.get("Authorization", "").startswith("Bearer ey")
        if self.headers.get("X-Goog-Api-Key") != KEY and not signed:
            self._answer(403)
            return
        start = int(query.get("pageToken", 0))
        page, after = self.fake.page_of(self.fake.gcp, start)
        self._json({"skus": page, "nextPageToken": "" if after is None else str(after)})

    def _aws_regions(self, _: dict[str, Any]) -> None:
        names = (f"<regionName>{name}</regionName>" for name in self.fake.aws_regions)
        items = "".join(f"<item>{name}</item>" for name in names)
        self._xml("DescribeRegions", f"<regionInfo>{items}</regionInfo>")

    def _aws_spot(self, question: dict[str, Any]) -> None:
        if question.get("ProductDescription.1") != "Linux/UNIX":
            self._answer(400)
            return
        wanted = [v for k, v in question.items() if k.startswith("InstanceType.")]
        region = self.headers["Authorization"].split("/")[2]
        rows = [row for row in self.fake.aws_spot if row[1] in wanted and row[0].startswith(region)]
        page, after = self.fake.page_of(rows, int(question.get("NextToken", 0)))
        items = "".join(
            f"<item><instanceType>{kind}</instanceType><spotPrice>{usd}</spotPrice>"
            "<productDescription>Linux/UNIX</productDescription>"
            f"<availabilityZone>{zone}</availabilityZone><timestamp>"
            f"{datetime.fromtimestamp(since_s, UTC):%Y-%m-%dT%H:%M:%S.000Z}"
            "</timestamp></item>"
            for zone, kind, usd, since_s in page
        )
        token = "" if after is None else str(after)
        self._xml(
            "DescribeSpotPriceHistory",
            f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{token}</nextToken>",
        )

    def _aws_products(self, question: dict[str, Any]) -> None:
        asked = {f["Field"]: f["Value"] for f in question["Filters"]}
        if asked.get("operatingSystem") != "Linux" or asked.get("tenancy") != "Shared":
            self._answer(400)
            return
        products = [
            product
            for product in self.fake.aws_products
            if product["product"]["attributes"]["instanceType"] == asked["instanceType"]
        ]
        page, after = self.fake.page_of(products, int(question.get("NextToken", 0)))
        document: dict[str, Any] = {"PriceList": [json.dumps(p) for p in page]}
        if after is not None:
            document["NextToken"] = str(after)
        self._json(document)

    def _json(self, document: Any) -> None:
        self._answer(200, json.dumps(document).encode())

    def _xml(self, action: str, inner: str) -> None:
        space = "http://ec2.amazonaws.com/doc/2016-11-15/"
        text = f'<{action}Response xmlns="{space}">{inner}</{action}Response>'
        self._answer(200, text.encode())

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
