"""A world whose offers are ranked whenever they change, all places training alike."""

from __future__ import annotations

from typing import Any

from tests.simulation.world import World

from spottrain.pricing.prices.place import offer_key
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.varuna_manager.core.model import events as e

EXAMPLES_PER_HOUR = 450.0
"""That one VM trains, anywhere: mini-batches of 64 examples take some 512 s."""


class RankedWorld(World):
    """Ranks what is seen."""

    def fold(self, event: e.Event) -> Any:
        commands = super().fold(event)
        if isinstance(event, e.OffersSeen):
            self.later(self.ranked)
        return commands

    def ranked(self) -> e.OffersRanked:
        worths = tuple(
            OfferWorth(
                offer=offer_key(offer),
                examples_per_usd=EXAMPLES_PER_HOUR / offer.usd_per_hour,
                usd_per_hour=offer.usd_per_hour,
            )
            for offer in self.cloud.offers()
        )
        return e.OffersRanked(at_s=self.now_s, worths=worths)
