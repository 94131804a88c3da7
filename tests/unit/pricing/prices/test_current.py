"""Prices that stay current while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.fakes.prices import KEY, NOW_S, FakePrices, gcp_sku

from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.current import RETRY_S, CurrentPrices
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.refresh import TTL_S, PriceRequest
from spottrain.pricing.prices.sources.registry import GCP_URL, gcp_prices
from spottrain.units import DAY_S

T4, REGION = "n1-standard-8+1xT4", "us-central1"


def skus(usd: float) -> list[dict[str, object]]:
    return [
        gcp_sku(f"Spot Preemptible {part} running in Americas", price, usage="Preemptible")
        for part, price in (
            ("N1 Predefined Instance Core", 0.0),
            ("N1 Predefined Instance Ram", 0.0),
            ("Nvidia Tesla T4 GPU", usd),
        )
    ]


class Market:
    """Prices over a fake catalogue, at a time that the test sets."""

    def __init__(self, fake: FakePrices, client: httpx.Client, path: Path) -> None:
        self.fake, self.now_s = fake, NOW_S
        environment = {GCP_URL: fake.url, "GOOGLE_API_KEY": KEY}
        self._source, self._path = gcp_prices(client, environment), path
        self.restart()

    def restart(self) -> None:
        """Read anew, as another process of the manager does."""
        kinds = catalogue().matching(clouds=["gcp"], names=[T4])
        self.prices = CurrentPrices(
            lambda: History(self._path),
            [self._source],
            catalogue(),
            PriceRequest(kinds=kinds, regions=[REGION]),
            lambda: self.now_s,
        )

    def spot_usd(self) -> float | None:
        return self.prices.usd_per_hour(REGION, T4, True)


@pytest.fixture
def market(tmp_path: Path) -> Iterator[Market]:
    with FakePrices().serving() as fake, httpx.Client() as client:
        fake.gcp = skus(0.11)
        yield Market(fake, client, tmp_path / "market.sqlite")


def test_prices_are_asked_again_after_an_hour(market: Market) -> None:
    assert market.spot_usd() == pytest.approx(0.11)
    asked = len(market.fake.asked)
    market.fake.gcp = skus(0.14)
    market.now_s += TTL_S - 1
    assert market.spot_usd() == pytest.approx(0.11)
    assert len(market.fake.asked) == asked
    market.now_s += 2
    assert market.spot_usd() == pytest.approx(0.14)
    assert market.prices.warning() == ""


def test_old_prices_are_used_with_a_warning_where_the_cloud_does_not_answer(
    market: Market, caplog: pytest.LogCaptureFixture
) -> None:
    market.spot_usd()
    market.now_s += 30 * DAY_S
    market.fake.faults = [(403, {})] * 3
    market.restart()
    assert market.spot_usd() == pytest.approx(0.11)
    assert market.prices.warning().startswith("gcp: spot prices of 2026-11-20 are used")
    asked = len(market.fake.asked)
    market.now_s += RETRY_S - 1
    assert market.spot_usd() == pytest.approx(0.11)
    assert len(market.fake.asked) == asked
    assert len(caplog.records) == 1
    market.now_s += 2
    assert market.spot_usd() == pytest.approx(0.11)
    assert len(caplog.records) == 1, "the same line is logged once"


def test_an_unknown_spot_price_is_told(market: Market) -> None:
    market.fake.faults = [(403, {})]
    assert market.spot_usd() is None
    assert "no spot price is known, so no spot VM can be rented" in (market.prices.warning())
    assert market.prices.usd_per_hour(REGION, T4, False), "it ships with spottrain"


def test_a_clock_that_jumps_back_does_not_stop_refreshing(market: Market) -> None:
    market.spot_usd()
    market.fake.gcp = skus(0.2)
    market.now_s -= 30 * DAY_S
    asked = len(market.fake.asked)
    market.spot_usd()
    assert len(market.fake.asked) > asked
