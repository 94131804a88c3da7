"""Ranks offers at current prices: clouds are asked again for the few that would be rented."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

from spottrain.pricing.prices.catalogue import CLOUDS, catalogue
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.prices.recheck import check_live
from spottrain.pricing.prices.refresh import PriceSource
from spottrain.pricing.ranking.rank import EXACT, Priced, Ranking, RankingTerms, rank
from spottrain.pricing.ranking.throughput import ThroughputCache

FEW = 3
"""Offers whose prices are asked for at once."""
ROUNDS = 3
"""How often the current prices may change which is best, before last known prices serve."""


def rank_live(
    offers: Sequence[Priced],
    throughputs: ThroughputCache,
    terms: RankingTerms,
    history: History,
    now_s: float,
    *,
    exact: int = EXACT,
    sources: Sequence[PriceSource] | None = None,
) -> tuple[Ranking, tuple[str, ...]]:
    """Rank offers, and ask for current prices until the price of the best one is current.

    Where a cloud does not answer, its last known prices serve. Dated prices are not asked
    for again one by one: ``spottrain prices`` asks their whole cloud.

    Args:
        offers: Only those of clouds are asked for.
        throughputs: See ``rank``.
        terms: See ``rank``.
        history: Known prices; the answers are added.
        now_s: Seconds since the epoch.
        exact: See ``rank``.
        sources: The price APIs; by default all, over the network.

    Returns:
        The ranking, and warnings, a line each.
    """
    known = list(offers)
    asked: set[str] = set()
    warnings: list[str] = []
    ranking = rank(known, throughputs, terms, exact=exact)
    for _ in range(ROUNDS):
        best = ranking.best
        few = [
            row.priced
            for row in ranking.rows[:FEW]
            if not row.why_not and _is_to_ask(row.priced, asked)
        ]
        if best is None or best.priced not in few:
            break
        keys = {offer_key(priced.offer) for priced in few}
        live, more = _ask(few, sources, history, now_s)
        known = [p for p in known if offer_key(p.offer) not in keys] + live
        warnings += more
        asked |= keys
        ranking = rank(known, throughputs, terms, exact=exact)
    return ranking, tuple(dict.fromkeys(warnings))


def _is_to_ask(priced: Priced, asked: set[str]) -> bool:
    is_cloud = priced.offer.cloud in CLOUDS and not priced.is_dated
    return is_cloud and offer_key(priced.offer) not in asked


def _ask(
    few: Sequence[Priced],
    sources: Sequence[PriceSource] | None,
    history: History,
    now_s: float,
) -> tuple[list[Priced], tuple[str, ...]]:
    """Return offers at current prices, without those that are gone."""
    by_key = {offer_key(priced.offer): priced for priced in few}
    wanted = [priced.offer for priced in few]
    with contextlib.ExitStack() as stack:
        if sources is None:
            # Imported here: they take longer to import than most commands run.
            import httpx

            from spottrain.cloud.http import TIMEOUT
            from spottrain.pricing.prices.sources.registry import price_sources

            client = stack.enter_context(httpx.Client(timeout=TIMEOUT))
            sources = price_sources(client, os.environ)
        live, warnings = check_live(wanted, sources, history, catalogue(), now_s)
    return [replace(by_key[offer_key(o)], offer=o) for o in live], warnings
