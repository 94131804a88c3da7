"""Queries the clouds' price APIs, and falls back on known prices where one does not answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from spottrain.errors import SpottrainError
from spottrain.pricing.prices.catalogue import Catalogue, InstanceType
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.price import FilteredPrices, Price, fresh, published, sift, usable
from spottrain.units import DAY_S, HOUR_S

TTL_S = HOUR_S
"""Prices that were queried so recently are not queried again."""
ON_DEMAND_TTL_S = 7 * DAY_S
"""The same for on-demand prices."""
HISTORY_S = 7 * DAY_S
"""How far back the first query goes, where a cloud keeps a history."""
KEPT_S = 90 * DAY_S
"""Prices last seen before that are deleted; AWS itself keeps no more."""
_EVERYWHERE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceQuery:
    """Prices to query of one cloud."""

    kinds: Sequence[InstanceType]
    regions: Sequence[str]
    """All if empty."""
    now_s: float
    """Seconds since the epoch."""
    since_s: float
    """How far back, where the cloud keeps a history."""


class PriceSource(Protocol):
    """One price API of one cloud."""

    name: str
    cloud: str
    markets: frozenset[bool]
    """Markets it covers: spot (True), on demand (False)."""
    ttl_s: float

    def fetch(self, question: PriceQuery) -> Iterable[Price]:
        """Return prices as the API gives them, unchecked.

        Raises:
            SpottrainError: the API does not answer; one line.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRequest:
    """Prices that are wanted, of any clouds."""

    kinds: Collection[InstanceType]
    """Of any clouds."""
    regions: Sequence[str] = ()
    """All if empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """Outcome of a refresh."""

    failures: Mapping[str, str]
    """By cloud: why it did not answer."""
    warnings: tuple[str, ...]
    """A line for each price left out."""


def refresh(
    sources: Sequence[PriceSource],
    history: History,
    facts: Catalogue,
    request: PriceRequest,
    now_s: float,
    *,
    ttl_s: float | None = None,
    history_s: float = HISTORY_S,
) -> Refreshed:
    """Query all sources in parallel for what is due.

    If a source fails, its earlier prices stay known.

    Args:
        sources: Of any clouds.
        history: To which answers are added.
        facts: The catalogue of machines.
        request: Prices that are wanted.
        now_s: Seconds since the epoch.
        ttl_s: What was queried so recently is not due; by default the source's own.
        history_s: How far back the first query goes.
    """
    due = [
        (source, question)
        for source in sources
        if (question := _due(source, history, request, now_s, ttl_s, history_s)).kinds
    ]
    failures: dict[str, str] = {}
    warnings: list[str] = []
    with ThreadPoolExecutor(max(1, len(due))) as pool:
        answers = list(pool.map(_fetch, due))
    for (source, question), answer in zip(due, answers, strict=True):
        if isinstance(answer, SpottrainError):
            failures.setdefault(source.cloud, str(answer))
            continue
        sifted = sift(answer, facts, now_s)
        history.record_prices(sifted.prices)
        regions = question.regions or (_EVERYWHERE,)
        history.mark_asked(
            [_scope(source, kind, r) for kind in question.kinds for r in regions], now_s
        )
        warnings += sifted.warnings
    history.forget_prices(now_s - KEPT_S)
    return Refreshed(failures=failures, warnings=tuple(warnings))


def known(
    history: History,
    facts: Catalogue,
    request: PriceRequest,
    now_s: float,
    *,
    estimates: bool = False,
) -> FilteredPrices:
    """Return the newest price of every offer: observed, else as shipped with us.

    Args:
        history: What was observed.
        facts: The catalogue of machines.
        request: Prices that are wanted.
        now_s: Seconds since the epoch.
        estimates: Add the estimates of spot prices that ship with us, of types whose spot
            price was not observed in the region.

    Invalid prices, spot prices without a discount, and prices of a clock that was ahead
    are left out with a warning.
    """
    wanted = {(kind.cloud, kind.name) for kind in request.kinds}

    def is_wanted(price: Price) -> bool:
        here = not request.regions or price.region in request.regions
        return here and (price.cloud, price.instance_type) in wanted

    newest: dict[tuple[str, str, str, bool], Price] = {}
    seen = sift(filter(is_wanted, history.latest(now_s)), facts, now_s)
    observed = {(p.cloud, p.region, p.instance_type) for p in seen.prices if p.spot}
    shipped = (
        price
        for price in filter(is_wanted, published(facts))
        if not price.is_estimate
        or (estimates and (price.cloud, price.region, price.instance_type) not in observed)
    )
    for price in (*shipped, *seen.prices):
        key = (price.cloud, price.zone, price.instance_type, price.spot)
        if key not in newest or newest[key].seen_s <= price.seen_s:
            newest[key] = price
    cheaper = usable(list(newest.values()))
    return FilteredPrices(cheaper.prices, (*seen.warnings, *cheaper.warnings))


def on_demand_prices(
    history: History, facts: Catalogue, cloud: str, now_s: float
) -> Callable[[str, str], float | None]:
    """Return a function of (region, instance type): USD per hour on demand.

    It returns None where no price is new enough to rent by.
    """
    kinds = [kind for kind in facts.types.values() if kind.cloud == cloud]
    believed = known(history, facts, PriceRequest(kinds=kinds), now_s)
    usd = {
        (price.region, price.instance_type): price.usd_per_hour
        for price in fresh(believed.prices, now_s).prices
        if not price.spot
    }
    return lambda region, instance_type: usd.get((region, instance_type))


def answered_s(
    source: PriceSource, history: History, kind: InstanceType, region: str
) -> float | None:
    """Return when a source last answered for one type in one region."""
    times = [
        at_s
        for where in (region, _EVERYWHERE)
        if (at_s := history.asked_s(_scope(source, kind, where))) is not None
    ]
    return max(times, default=None)


def _due(
    source: PriceSource,
    history: History,
    request: PriceRequest,
    now_s: float,
    ttl_s: float | None,
    history_s: float,
) -> PriceQuery:
    """Return the query of a source; no kinds if nothing is due."""
    ttl_s = source.ttl_s if ttl_s is None else ttl_s
    kinds = []
    since_s = now_s
    for kind in request.kinds:
        if kind.cloud != source.cloud:
            continue
        answers = [
            answered_s(source, history, kind, region)
            for region in request.regions or (_EVERYWHERE,)
        ]
        # A clock may have jumped back: answers from the future do not count.
        times = [at_s for at_s in answers if at_s is not None and at_s <= now_s]
        complete = len(times) == len(answers)
        if not complete or min(times) <= now_s - ttl_s:
            kinds.append(kind)
            asked_s = min(times) if complete else now_s - history_s
            since_s = min(since_s, asked_s)
    return PriceQuery(kinds=kinds, regions=request.regions, now_s=now_s, since_s=since_s)


def _fetch(due: tuple[PriceSource, PriceQuery]) -> list[Price] | SpottrainError:
    source, query = due
    try:
        return list(source.fetch(query))
    except SpottrainError as error:
        return error


def _scope(source: PriceSource, kind: InstanceType, region: str) -> str:
    return f"{source.name}|{kind.name}|{region}"
