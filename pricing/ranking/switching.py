"""When to move to another offer: a pure decision, made again at every price or hazard.

After Narayanan's dissertation, section 6.3.2, which moves to whatever is cheapest per
example and takes moves as free; here the cost of a move counts, and so does the work that
an offer's interruptions waste.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from spottrain.pricing.billing.money import is_amount
from spottrain.pricing.billing.terms import CLOUD_USD_PER_GB
from spottrain.pricing.prices.place import Place
from spottrain.units import GB_BYTES, HOUR_S

_TIE = 1e-9
"""Relative difference of two costs that is taken for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """Price and throughput of training in one place now."""

    place: Place
    usd_per_hour: float
    """Of the whole fleet."""
    examples_per_s: float
    """Without interruptions; more than 0."""
    losses_per_hour: float = 0.0
    """Interruptions to expect."""

    @property
    def is_sound(self) -> bool:
        """True if its numbers are finite and positive, so that it can be compared."""
        numbers = self.usd_per_hour, self.examples_per_s, self.losses_per_hour
        return all(map(is_amount, numbers)) and self.examples_per_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frictions:
    """The costs of moves and interruptions; all zero in the dissertation."""

    boot_s: float = 0.0
    """From paying for new machines to training on them."""
    lost_s: float = 0.0
    """Training time repeated after an interruption."""
    move_s: float = 0.0
    """Training time repeated or lost in a voluntary move."""
    checkpoint_bytes: float = 0.0
    dataset_bytes: float = 0.0
    """Fetched once into each cloud that has no copy yet."""
    zone_usd_per_gb: float = 0.01
    region_usd_per_gb: float = 0.02
    cloud_usd_per_gb: float = CLOUD_USD_PER_GB
    """Egress out of a zone, a region, a cloud; coming in is free."""

    def checkpoint_usd(self, here: Place, there: Place) -> float:
        """Return the cost of moving the newest checkpoint."""
        if here.cloud != there.cloud:
            usd_per_gb = self.cloud_usd_per_gb
        elif here.region != there.region:
            usd_per_gb = self.region_usd_per_gb
        else:
            usd_per_gb = self.zone_usd_per_gb * (here.zone != there.zone)
        return self.checkpoint_bytes / GB_BYTES * usd_per_gb

    def dataset_usd(self, cloud: str, copies: Collection[str]) -> float:
        """Return the cost of fetching the dataset, unless a copy is there already.

        Args:
            cloud: Where it is needed.
            copies: Clouds that hold it.
        """
        if cloud in copies:
            return 0.0
        return self.dataset_bytes / GB_BYTES * self.cloud_usd_per_gb

    def throughput(self, quote: Quote) -> float:
        """Return the expected examples per hour, interruptions counted.

        Each hour of training is followed by what its interruptions waste: repeated work
        and the boot of replacements.
        """
        wasted = quote.losses_per_hour * (self.boot_s + self.lost_s) / HOUR_S
        return quote.examples_per_s * HOUR_S / (1.0 + wasted)

    def usd_per_example(self, quote: Quote) -> float:
        """Return the cost of an example, interruptions counted, moves not."""
        return quote.usd_per_hour / self.throughput(quote)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingRule:
    """How much better another offer must be.

    With the defaults and no frictions: whatever is cheapest now, as in the dissertation.
    """

    hysteresis: float = 0.0
    """Share by which another offer must have more examples per dollar."""
    horizon_s: float | None = None
    """How long today's prices are expected to hold; savings count no further. None: to the
    end of the job."""


NO_FRICTIONS, CHEAPEST_NOW = Frictions(), SwitchingRule()
"""The dissertation's assumptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecision:
    """Where to be from now on."""

    quote: Quote
    moves: bool
    """True if that is another place; the first choice is no move."""
    saves_usd: float = 0.0
    """What the move saves over the horizon, its own cost subtracted; 0 without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingState:
    """Where a job is and how much work it has left."""

    examples: float
    """Examples left to train."""
    held: Place | None = None
    """None before the first choice, or when what was rented is gone."""
    checkpoint: Place | None = None
    """Where the newest one was written; None before the first."""
    copies: frozenset[str] = frozenset()
    """Clouds that hold the dataset."""


def decide(
    quotes: Sequence[Quote],
    state: SwitchingState,
    frictions: Frictions,
    rule: SwitchingRule,
) -> PlaceDecision:
    """Return whether to stay or where to go.

    A move must save more over the horizon than it costs, and the new offer must have more
    examples per dollar by the rule's hysteresis. Of several, the one that saves most after
    its cost; of equals, rounding aside, the first by name. A place without a quote cannot be rented any more, though
    the job is there.

    Args:
        quotes: What can be rented now, in any order; at least one. Those with impossible
            numbers, such as a price that is not finite, are left out.
        state: Where the job is.
        frictions: What moves and interruptions cost.
        rule: How much better another offer must be.

    Raises:
        ValueError: no quotes.
    """
    quotes = [quote for quote in quotes if quote.is_sound]
    if not quotes:
        raise ValueError("no quotes to decide between")
    own = [quote for quote in quotes if quote.place == state.held]
    if not own:
        best = _least(quotes, lambda quote: _total_usd(quote, state, frictions))
        return PlaceDecision(quote=best, moves=False)
    held = min(own, key=frictions.usd_per_example)
    stays_usd, examples = frictions.usd_per_example(held), state.examples
    if rule.horizon_s is not None:
        examples = min(examples, frictions.throughput(held) * rule.horizon_s / HOUR_S)
    redone = held.examples_per_s * frictions.move_s

    def net_usd(quote: Quote) -> float:
        """Return what a move there saves, less its cost: data, boot, repeated work."""
        goes_usd = frictions.usd_per_example(quote)
        switch_usd = _enter_usd(quote, state, frictions) + redone * goes_usd
        return (stays_usd - goes_usd) * examples - switch_usd

    better = [
        quote
        for quote in quotes
        if quote.place != held.place
        and _is_better(stays_usd, frictions.usd_per_example(quote), rule)
    ]
    best = _least(better, lambda quote: -net_usd(quote)) if better else held
    if best is held or net_usd(best) <= 0:
        return PlaceDecision(quote=held, moves=False)
    return PlaceDecision(quote=best, moves=True, saves_usd=net_usd(best))


def _least(quotes: Sequence[Quote], usd: Callable[[Quote], float]) -> Quote:
    """Return the quote of least cost; of equals, rounding aside, the first by its place.

    Not the first in order: files list the same prices in any order.
    """
    costs = [(usd(quote), quote) for quote in quotes]
    least = min(cost for cost, _ in costs)
    equal = (q for cost, q in costs if cost - least <= _TIE * max(1.0, abs(least)))
    return min(equal, key=lambda quote: quote.place)


def _is_better(stays_usd: float, goes_usd: float, rule: SwitchingRule) -> bool:
    """Return whether examples per dollar rise by the hysteresis, rounding aside."""
    if goes_usd <= 0:
        return stays_usd > 0
    gain = stays_usd / goes_usd - 1.0
    return gain > _TIE and gain >= rule.hysteresis


def _total_usd(quote: Quote, state: SwitchingState, frictions: Frictions) -> float:
    """Return the cost of the rest of the job in a place, the start there included."""
    usd = frictions.usd_per_example(quote) * state.examples
    return usd + _enter_usd(quote, state, frictions)


def _enter_usd(quote: Quote, state: SwitchingState, frictions: Frictions) -> float:
    """Return the cost of a start in a place: boot, and data that is not there yet."""
    usd = quote.usd_per_hour * frictions.boot_s / HOUR_S
    usd += frictions.dataset_usd(quote.place.cloud, state.copies)
    if state.checkpoint is not None:
        usd += frictions.checkpoint_usd(state.checkpoint, quote.place)
    return usd
