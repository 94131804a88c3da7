"""Watches the market for a running job: ranks offers, and records prices and how VMs end.

Its findings reach the core as events; the core can do without them. If the price history
cannot be used, offers are ranked without measured hazards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spottrain.cloud.port.facts import without_attached
from spottrain.cloud.port.provider import Offer, SpotPool
from spottrain.morphing.errors import PlanError
from spottrain.pricing.prices.catalogue import CLOUDS, catalogue
from spottrain.pricing.prices.hazard import Hazards
from spottrain.pricing.prices.history import History, HistoryError, VmLife
from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.prices.price import Price
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.varuna_manager.core.deadline import is_cost_optimal
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.daemon.ports import EventSink
from spottrain.varuna_manager.jobs.vm_history import open_history
from spottrain.varuna_manager.offers.market import hazards_of
from spottrain.varuna_manager.offers.ranker import OfferRanker

logger = logging.getLogger(__name__)

TOLERANCE = 0.02
"""Relative worths that have changed by no more than this are not reported again."""


class MarketWatch:
    """Reports the market to a job's core, and the job's VMs to the machine's price history.

    Args:
        sink: Where events go.
    """

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._ranker = OfferRanker()
        self._hazards: Hazards | None = None
        # As reported to the core last:
        self._offers: Mapping[str, Offer] | None = None
        self._worths: Mapping[str, OfferWorth] | None = None
        self._rated: tuple[FleetTerms, FleetTerms | None] | None = None

    async def seen(self, offers: Sequence[Offer]) -> None:
        """Feed offers that have changed, and before them what they are worth.

        All are fed once, then changes: they are journalled, and markets are large.
        """
        worths = await asyncio.to_thread(self._rank, tuple(offers))
        if worths is not None and not _about_equal(worths, self._worths):
            self._feed_worths(worths)
        rated = await asyncio.to_thread(self._fleet_terms, tuple(offers))
        if rated is not None and rated != self._rated:
            self._rated = rated
            terms, other = rated
            self._sink.feed(e.FleetRated(at_s=self._sink.now_s(), terms=terms, elsewhere=other))
        if self._feed_offers(offers):
            await asyncio.to_thread(self._remember_prices, tuple(offers))

    def _feed_worths(self, worths: Mapping[str, OfferWorth]) -> None:
        """Feed worths that differ from what the core knows."""
        known = self._worths or {}
        changed = {k: v for k, v in worths.items() if not _is_about(v, known.get(k))}
        self._worths = {key: changed.get(key) or known[key] for key in worths}
        ranked = e.OffersRanked(
            at_s=self._sink.now_s(),
            worths=tuple(changed.values()),
            only_changes=bool(known),
            gone=tuple(sorted(known.keys() - worths.keys())),
        )
        self._sink.feed(ranked)

    def _feed_offers(self, offers: Sequence[Offer]) -> bool:
        """Feed offers that differ from what the core knows; return whether any do."""
        now = {offer_key(offer): replace(offer, observed_at_s=0.0) for offer in offers}
        known, self._offers = self._offers, now
        if now == known:
            return False
        fresh = {offer_key(offer): offer for offer in offers}
        before = known or {}
        changed = (fresh[key] for key in now if now[key] != before.get(key))
        seen = e.OffersSeen(
            at_s=self._sink.now_s(),
            offers=tuple(changed),
            only_changes=known is not None,
            gone=tuple(sorted(before.keys() - now.keys())),
        )
        self._sink.feed(seen)
        return True

    async def pools(self, pools: Sequence[SpotPool]) -> None:
        """Record what a cloud says of its spot VMs: offers are ranked by that."""
        await asyncio.to_thread(
            self._record, lambda history: history.record_pools(pools, time.time())
        )

    async def ended(self, lives: Sequence[VmLife]) -> None:
        """Record how VMs have ended: hazards are estimated from that."""
        await asyncio.to_thread(self._record, lambda history: history.record_vms(lives))

    def _rank(self, offers: tuple[Offer, ...]) -> Mapping[str, OfferWorth] | None:
        """Return what offers are worth to the job; None if there is nothing new."""
        if self._hazards is None:
            self._hazards = self._known_hazards()
        state = self._sink.state
        try:
            return self._ranker.rank(state, offers, self._hazards)
        except PlanError as error:
            logger.warning("offers are not ranked: %s", error)
            return None

    def _fleet_terms(
        self, offers: tuple[Offer, ...]
    ) -> tuple[FleetTerms, FleetTerms | None] | None:
        """Return what fleets do for the job, if it has a deadline or a minimum throughput, and
        what those of the best other kind do, if it may move."""
        state, hazards = self._sink.state, self._hazards
        if hazards is None or not state.job.has_slo:
            return None
        try:
            terms = self._ranker.fleet_terms(state, offers, hazards)
            if terms is None:
                return None
            if not is_cost_optimal(state):
                return terms, None  # it never moves
            return terms, self._ranker.fleet_terms(state, offers, hazards, elsewhere=True)
        except PlanError:
            return None  # logged with the ranking

    def _known_hazards(self) -> Hazards:
        try:
            with open_history() as history:
                return hazards_of(history, time.time())
        except HistoryError as error:
            logger.warning("%s", error)
            return Hazards((), catalogue().bands())

    def _record(self, record: Callable[[History], None]) -> None:
        """Record something, and estimate interruption rates again."""
        try:
            with open_history() as history:
                record(history)
                self._hazards = hazards_of(history, time.time())
        except HistoryError as error:
            logger.warning("%s", error)

    def _remember_prices(self, offers: Sequence[Offer]) -> None:
        """Record clouds' prices; those of other providers are not market data."""
        seen_s = time.time()
        prices = [
            Price(
                cloud=offer.cloud,
                region=offer.region,
                zone=offer.zone,
                instance_type=offer.instance_type,
                spot=offer.spot,
                usd_per_hour=offer.usd_per_hour,
                since_s=offer.observed_at_s,
                seen_s=max(seen_s, offer.observed_at_s),
                source=f"{offer.cloud} offers",
            )
            for offer in map(without_attached, offers)
            if offer.cloud in CLOUDS
        ]
        if not prices:
            return
        try:
            with open_history() as history:
                history.record_prices(prices)
        except HistoryError as error:
            logger.warning("%s", error)


def _about_equal(new: Mapping[str, OfferWorth], old: Mapping[str, OfferWorth] | None) -> bool:
    """Return whether relative worths are the same within ``TOLERANCE``."""
    if old is None or new.keys() != old.keys():
        return False
    before, now = _relative(old), _relative(new)
    return all(abs(now[k] - before[k]) <= TOLERANCE * max(now[k], before[k]) for k in now)


def _is_about(new: OfferWorth, old: OfferWorth | None) -> bool:
    """Return whether a worth is what it was within ``TOLERANCE``."""
    if old is None:
        return False
    before, now = old.at(1.0), new.at(1.0)
    return abs(now - before) <= TOLERANCE * max(now, before)


def _relative(worths: Mapping[str, OfferWorth]) -> dict[str, float]:
    """Return each worth relative to the best, all at the same price."""
    values = {key: worth.at(1.0) for key, worth in worths.items()}
    best = max(values.values(), default=0.0) or 1.0
    return {key: value / best for key, value in values.items()}
