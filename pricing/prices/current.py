"""Prices of one cloud that stay current while a manager runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from spottrain.pricing.prices.catalogue import Catalogue
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.price import Price
from spottrain.pricing.prices.refresh import (
    TTL_S,
    PriceRequest,
    PriceSource,
    known,
    refresh,
)

logger = logging.getLogger(__name__)

RETRY_S = 300.0
"""After a failed refresh the last known prices hold for so long."""
_Key = tuple[str, str, bool]
"""Region, instance type, spot."""


class CurrentPrices:
    """The last known prices of one cloud, refreshed once an hour as they are read.

    Old ones are still used where the cloud does not answer, with a warning: an old price
    makes a plan somewhat worse, none stops the job. Thread-safe.

    Args:
        open_history: Opens the database of prices.
        sources: Price APIs of the cloud.
        facts: The catalogue of machines.
        request: Prices that are wanted, all of one cloud.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        open_history: Callable[[], History],
        sources: Sequence[PriceSource],
        facts: Catalogue,
        request: PriceRequest,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._open_history = open_history
        self._sources = sources
        self._facts = facts
        self._request = request
        self._clock = clock
        self._refreshing = threading.Lock()
        self._due_at_s = 0.0
        self._prices: dict[_Key, Price] | None = None
        self._warning = ""

    def usd_per_hour(self, region: str, instance_type: str, spot: bool) -> float | None:
        """Return a price; None if none was ever known."""
        price = self._current().get((region, instance_type, spot))
        return None if price is None else price.usd_per_hour

    def warning(self) -> str:
        """Return a line if the cloud does not answer and older prices are used."""
        self._current()
        return self._warning

    def _current(self) -> dict[_Key, Price]:
        # One thread refreshes; the others wait for it only if nothing is known yet.
        if self._refreshing.acquire(blocking=self._prices is None):
            try:
                now_s = self._clock()
                is_current = now_s < self._due_at_s <= now_s + TTL_S  # a clock may jump
                if self._prices is None or not is_current:
                    self._prices = self._ask(now_s)
            finally:
                self._refreshing.release()
        return self._prices or {}

    def _ask(self, now_s: float) -> dict[_Key, Price]:
        with self._open_history() as history:
            outcome = refresh(self._sources, history, self._facts, self._request, now_s)
            believed = known(history, self._facts, self._request, now_s)
        prices = {(p.region, p.instance_type, p.spot): p for p in believed.prices}
        before, self._warning = self._warning, ""
        for cloud, why in outcome.failures.items():
            self._warning = f"{cloud}: {_told(prices)}: {why}"
        if self._warning not in ("", before):
            logger.warning("%s", self._warning)
        self._due_at_s = now_s + (RETRY_S if outcome.failures else TTL_S)
        return prices


def _told(prices: Mapping[_Key, Price]) -> str:
    """Return which prices are used although their cloud does not answer."""
    if not any(spot for _, _, spot in prices):
        return "no spot price is known, so no spot VM can be rented"
    seen_s = min(price.seen_s for price in prices.values() if price.spot)
    return f"spot prices of {datetime.fromtimestamp(seen_s, UTC):%Y-%m-%d} are used"
