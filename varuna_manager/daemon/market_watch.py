"""Watches the market for a running job: what offers are worth to it, how its VMs end.

Beside the core: what is found out reaches it as events, and nothing of it is needed to
go on. A database of prices that cannot be used costs the ranking its hazards, no more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spottrain.cloud.port.provider import Offer
from spottrain.morphing.errors import PlanError
from spottrain.pricing.prices.catalogue import CLOUDS, catalogue
from spottrain.pricing.prices.hazard import Hazards
from spottrain.pricing.prices.history import HistoryError, VmLife
from spottrain.pricing.prices.price import Price
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.core.model.events import (
    FleetRated,
    OffersRanked,
    OffersSeen,
)
from spottrain.varuna_manager.jobs.vm_history import open_history
from spottrain.varuna_manager.offers.market import hazards_of
from spottrain.varuna_manager.offers.ranker import OfferRanker

if TYPE_CHECKING:
    from spottrain.varuna_manager.daemon.effects import EventSink

logger = logging.getLogger(__name__)

SAME = 0.02
"""Worths that differ by no more, among themselves, from those that the core knows are not
told again."""


@dataclass(frozen=True, slots=True)
class _Messages:
    """What the core was told last."""

    offers: tuple[Offer, ...] | None = None
    worths: Mapping[str, OfferWorth] | None = None
    terms: FleetTerms | None = None


class MarketWatch:
    """Tells a job's core about the market, and the machine's database about the job.

    Args:
        sink: Where events go.
    """

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._appraiser = OfferRanker()
        self._hazards: Hazards | None = None
        self._told = _Messages()

    async def seen(self, offers: Sequence[Offer]) -> None:
        """Tell what has changed of the offers, and before that what they are worth."""
        same = tuple(replace(offer, observed_at_s=0.0) for offer in offers)
        worths = await asyncio.to_thread(self._weigh, tuple(offers))
        if worths is not None and not _alike(worths, self._told.worths):
            self._told = replace(self._told, worths=worths)
            self._sink.feed(
                OffersRanked(at_s=self._sink.now_s(), worths=tuple(worths.values()))
            )
        terms = await asyncio.to_thread(self._fleet_terms, tuple(offers))
        if terms is not None and terms != self._told.terms:
            self._told = replace(self._told, terms=terms)
            self._sink.feed(FleetRated(at_s=self._sink.now_s(), terms=terms))
        if same != self._told.offers:
            self._told = replace(self._told, offers=same)
            self._sink.feed(OffersSeen(at_s=self._sink.now_s(), offers=tuple(offers)))
            await asyncio.to_thread(self._remember_prices, tuple(offers))

    async def ended(self, lives: Sequence[VmLife]) -> None:
        """Remember how VMs have ended: hazards are made of that."""
        await asyncio.to_thread(self._remember, tuple(lives))

    def _weigh(self, offers: tuple[Offer, ...]) -> Mapping[str, OfferWorth] | None:
        """Return what offers are worth to the job; None if there is nothing new."""
        if self._hazards is None:
            self._hazards = self._known_hazards()
        state = self._sink.state
        try:
            return self._appraiser.rank(state, offers, self._hazards)
        except PlanError as error:
            logger.warning("offers are not ranked: %s", error)
            return None

    def _fleet_terms(self, offers: tuple[Offer, ...]) -> FleetTerms | None:
        """Return what fleets do, if the job has promised anything."""
        state = self._sink.state
        if self._hazards is None or not state.job.has_slo:
            return None
        try:
            return self._appraiser.fleet_terms(state, offers, self._hazards)
        except PlanError:
            return None  # told with the ranking

    def _known_hazards(self) -> Hazards:
        try:
            with open_history() as history:
                return hazards_of(history, time.time())
        except HistoryError as error:
            logger.warning("%s", error)
            return Hazards((), catalogue().bands())

    def _remember(self, lives: Sequence[VmLife]) -> None:
        try:
            with open_history() as history:
                history.record_vms(lives)
                self._hazards = hazards_of(history, time.time())
        except HistoryError as error:
            logger.warning("%s", error)

    def _remember_prices(self, offers: Sequence[Offer]) -> None:
        """Remember what clouds ask; other providers' prices are no facts of a market."""
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
            for offer in offers
            if offer.cloud in CLOUDS
        ]
        if not prices:
            return
        try:
            with open_history() as history:
                history.record_prices(prices)
        except HistoryError as error:
            logger.warning("%s", error)


def _alike(new: Mapping[str, OfferWorth], old: Mapping[str, OfferWorth] | None) -> bool:
    """Whether the core would hardly decide otherwise: it compares, and knows prices."""
    if old is None or new.keys() != old.keys():
        return False
    before, now = _relative(old), _relative(new)
    return all(abs(now[k] - before[k]) <= SAME * max(now[k], before[k]) for k in now)


def _relative(worths: Mapping[str, OfferWorth]) -> dict[str, float]:
    """Return worths over that of the best, all at the same price."""
    values = {key: worth.at(1.0) for key, worth in worths.items()}
    most = max(values.values(), default=0.0) or 1.0
    return {key: value / most for key, value in values.items()}
