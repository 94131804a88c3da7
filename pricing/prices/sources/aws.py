"""AWS: spot price history by zone, on-demand prices by region."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from spottrain.cloud.aws import prices as api
from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.prices import ListPrice, SpotPrice
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.pricing.prices.price import Price
from spottrain.pricing.prices.refresh import ON_DEMAND_TTL_S, TTL_S, PriceQuery

_CALLS = 8
"""Parallel calls: one per region, or one per instance type."""
_TRIES, _ANSWER_S = 4, 20.0


def aws_clients() -> AwsClients:
    """Return clients for the account that boto3 finds; nothing is imported yet."""
    return AwsClients(AwsSettings(instance_types=(), tries=_TRIES, answer_s=_ANSWER_S))


class AwsSpotPrices:
    """The spot price history, by zone.

    Args:
        clients: Of the account.
    """

    name = "aws spot price history"
    cloud = "aws"
    markets = frozenset({True})
    ttl_s = TTL_S

    def __init__(self, clients: AwsClients) -> None:
        self._clients = clients

    def fetch(self, question: PriceQuery) -> Iterator[Price]:
        """Yield each price with the time over which it held.

        Raises:
            CloudError: AWS does not answer.
        """
        names = [kind.name for kind in question.kinds]

        def ask(region: str) -> list[Price]:
            rows = api.spot_prices(self._clients, region, names, question.since_s)
            return list(_spans(region, rows, question.now_s))

        regions = question.regions or api.regions(self._clients)
        with ThreadPoolExecutor(_CALLS) as pool:
            for prices in pool.map(ask, regions):
                yield from prices


class AwsPriceList:
    """On-demand prices, by region.

    Args:
        clients: Of the account.
    """

    name = "aws price list"
    cloud = "aws"
    markets = frozenset({False})
    ttl_s = ON_DEMAND_TTL_S

    def __init__(self, clients: AwsClients) -> None:
        self._clients = clients

    def fetch(self, question: PriceQuery) -> Iterator[Price]:
        """Yield a price for each type and region.

        Raises:
            CloudError: AWS does not answer.
        """

        def ask(name: str) -> list[ListPrice]:
            return list(api.list_prices(self._clients, name, question.regions))

        with ThreadPoolExecutor(_CALLS) as pool:
            for rows in pool.map(ask, [kind.name for kind in question.kinds]):
                for row in rows:
                    yield Price(
                        cloud="aws",
                        region=row.region,
                        zone=row.region,
                        instance_type=row.instance_type,
                        spot=False,
                        usd_per_hour=_usd(row.usd_per_hour),
                        since_s=row.since_s,
                        seen_s=question.now_s,
                        source=self.name,
                        gpus=int(row.gpus) if row.gpus.isdigit() else None,
                    )


def _spans(region: str, rows: Iterable[SpotPrice], now_s: float) -> Iterator[Price]:
    """Yield prices, each of which held until the next one, the last until now."""
    changes: dict[tuple[str, str], list[SpotPrice]] = {}
    for row in rows:
        changes.setdefault((row.zone, row.instance_type), []).append(row)
    for series in changes.values():
        series.sort(key=lambda row: row.since_s)
        for row, end_s in _until(series, now_s):
            yield Price(
                cloud="aws",
                region=region,
                zone=row.zone,
                instance_type=row.instance_type,
                spot=True,
                usd_per_hour=_usd(row.usd_per_hour),
                since_s=row.since_s,
                seen_s=end_s,
                source=AwsSpotPrices.name,
            )


def _until(series: Sequence[SpotPrice], now_s: float) -> Iterator[tuple[SpotPrice, float]]:
    for row, after in pairwise(series):
        yield row, after.since_s
    yield series[-1], now_s


def _usd(text: str) -> float:
    """Return the price; NaN, which is refused by name later, if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
