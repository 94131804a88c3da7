"""When to move to another offer: pure, asked again at every price tick or new hazard.

After Narayanan's dissertation, section 6.3.2, which moves to whatever is cheapest per
example and takes moves as free; here what a move costs counts, and so does what an
offer's interruptions waste.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spottrain.pricing.billing.money import is_amount
from spottrain.pricing.billing.terms import CLOUD_USD_PER_GB
from spottrain.pricing.prices.place import Place
from spottrain.units import GB_BYTES, HOUR_S

_TIE = 1e-9
"""Relative difference of two costs that is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """What training in one place costs and yields at this moment."""

    place: Place
    usd_per_hour: float
    """Of all that ``examples_per_s`` needs."""
    examples_per_s: float
    """Undisturbed; more than 0."""
    losses_per_hour: float = 0.0
    """Interruptions to expect."""

    @property
    def is_sound(self) -> bool:
        """Whether its numbers can be: an infinite or unknown one cannot be compared."""
        numbers = self.usd_per_hour, self.examples_per_s, self.losses_per_hour
        return all(map(is_amount, numbers)) and self.examples_per_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frictions:
    """What moves and interruptions cost; all zero in the dissertation."""

    boot_s: float = 0.0
    """From paying for new machines to training on them."""
    lost_s: float = 0.0
    """Training time done again after an interruption."""
    move_s: float = 0.0
    """Training time done again, or stood still, in a move of one's own will."""
    checkpoint_bytes: float = 0.0
    dataset_bytes: float = 0.0
    """Fetched once into each cloud that has no copy yet."""
    zone_usd_per_gb: float = 0.01
    region_usd_per_gb: float = 0.02
    cloud_usd_per_gb: float = CLOUD_USD_PER_GB
    """Egress out of a zone, a region, a cloud; coming in is free."""

    def checkpoint_usd(self, here: Place, there: Place) -> float:
        """Return what moving the newest checkpoint costs."""
        if here.cloud != there.cloud:
            usd_per_gb = self.cloud_usd_per_gb
        elif here.region != there.region:
            usd_per_gb = self.region_usd_per_gb
        else:
            usd_per_gb = self.zone_usd_per_gb * (here.zone != there.zone)
        return self.checkpoint_bytes / GB_BYTES * usd_per_gb

    def dataset_usd(self, cloud: str, copies: Collection[str]) -> float:
        """Return what fetching the dataset costs, unless a copy is there already.

        Args:
            cloud: Where it is needed.
            copies: Clouds that hold it.
        """
        if cloud in copies:
            return 0.0
        return self.dataset_bytes / GB_BYTES * self.cloud_usd_per_gb

    def throughput(self, quote: Quote) -> float:
        """Return examples per hour to expect, interruptions counted.

        Each hour of training is followed by what its interruptions waste: the work done
        again and the boot of machines in place of the lost ones.
        """
        wasted = quote.losses_per_hour * (self.boot_s + self.lost_s) / HOUR_S
        return quote.examples_per_s * HOUR_S / (1.0 + wasted)

    def usd_per_example(self, quote: Quote) -> float:
        """Return what an example costs here, interruptions counted, moves not."""
        return quote.usd_per_hour / self.throughput(quote)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingRule:
    """How much better another offer must be.

    With the defaults and no frictions: whatever is cheapest now, as in the dissertation.
    """

    hysteresis: float = 0.0
    """Share by which another offer must train more for a dollar."""
    horizon_s: float | None = None
    """How long today's prices are believed; a saving counts no further. None: to the
    end of the job."""


NO_FRICTIONS, CHEAPEST_NOW = Frictions(), SwitchingRule()
"""What the dissertation assumes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecision:
    """Where to be from now on, and why."""

    quote: Quote
    moves: bool
    """Whether that is elsewhere; the first choice is no move."""
    reason: str
    saving_usd: float = 0.0
    """Of the best other offer, over the horizon, before what the move costs."""
    switch_usd: float = 0.0
    """What moving to it costs: data, boot and work done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingState:
    """Where a job is and what it still has to do."""

    examples: float
    """Left to do."""
    held: Place | None = None
    """None before the first choice, or when what was held is gone."""
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

    A move must save more over the horizon than it costs, and the new offer train more
    for a dollar by the rule's hysteresis. Of several, the one that saves most after its
    cost; the first of equals. What is held has its say only through its quote: without
    one it cannot be had any more.

    Args:
        quotes: What can be had now, in any order; at least one. One with numbers that
            cannot be, such as a price that is no number, is taken for none.
        state: Where the job is.
        frictions: What moves and interruptions cost.
        rule: How much better another offer must be.

    Raises:
        ValueError: no quotes.
    """
    quotes = [quote for quote in quotes if quote.is_sound]
    if not quotes:
        raise ValueError("no quotes to decide between")
    held = _cheapest_of(quotes, state.held, frictions)
    if held is None:
        return _first(quotes, state, frictions)
    examples = state.examples
    if rule.horizon_s is not None:
        examples = min(examples, frictions.throughput(held) * rule.horizon_s / HOUR_S)
    others = [quote for quote in quotes if quote.place != held.place]
    options = [
        _option(held, quote, examples, state, frictions, rule) for quote in others
    ]
    if not options:
        return PlaceDecision(quote=held, moves=False, reason="nothing else can be had")
    best = max(options, key=lambda option: (option.enough, option.net_usd))
    return best.decision(held, rule)


@dataclass(frozen=True, slots=True)
class _Option:
    """A move that could be made."""

    quote: Quote
    gain: float
    """Examples per dollar over those of the held offer, less 1."""
    saving_usd: float
    switch_usd: float
    enough: bool
    """Whether the gain reaches the hysteresis and is more than rounding."""

    @property
    def net_usd(self) -> float:
        return self.saving_usd - self.switch_usd

    def decision(self, held: Quote, rule: SwitchingRule) -> PlaceDecision:
        told = "/".join(self.quote.place)
        moves = self.enough and self.net_usd > 0
        if self.gain <= _TIE:
            reason = f"nothing trains more for a dollar; next is {told}"
        elif not self.enough:
            reason = (
                f"{told} trains {self.gain:.1%} more for a dollar, less than the "
                f"{rule.hysteresis:.1%} asked for"
            )
        else:
            reason = (
                f"{told} saves ${self.saving_usd:.2f}; moving there costs "
                f"${self.switch_usd:.2f}"
            )
        return PlaceDecision(
            quote=self.quote if moves else held,
            moves=moves,
            reason=reason,
            saving_usd=self.saving_usd,
            switch_usd=self.switch_usd,
        )


def _option(
    held: Quote,
    quote: Quote,
    examples: float,
    state: SwitchingState,
    frictions: Frictions,
    rule: SwitchingRule,
) -> _Option:
    stays_usd, goes_usd = map(frictions.usd_per_example, (held, quote))
    if goes_usd > 0:
        gain = stays_usd / goes_usd - 1.0
    else:
        gain = math.inf if stays_usd > 0 else 0.0
    redone = held.examples_per_s * frictions.move_s
    switch_usd = _enter_usd(quote, state, frictions) + redone * goes_usd
    saving_usd = (stays_usd - goes_usd) * examples
    enough = gain > _TIE and gain >= rule.hysteresis
    return _Option(quote, gain, saving_usd, switch_usd, enough)


def _cheapest_of(
    quotes: Sequence[Quote], place: Place | None, frictions: Frictions
) -> Quote | None:
    """Return the best quote of one place: there may be several of a day."""
    own = [quote for quote in quotes if quote.place == place]
    return min(own, key=frictions.usd_per_example) if own else None


def _first(
    quotes: Sequence[Quote], state: SwitchingState, frictions: Frictions
) -> PlaceDecision:
    """Return where the rest of the job costs least, getting there included."""

    def total_usd(quote: Quote) -> float:
        usd = frictions.usd_per_example(quote) * state.examples
        return usd + _enter_usd(quote, state, frictions)

    best = min(quotes, key=total_usd)
    return PlaceDecision(
        quote=best,
        moves=False,
        reason=f"{'/'.join(best.place)} costs least: ${total_usd(best):.2f} to the end",
        switch_usd=_enter_usd(best, state, frictions),
    )


def _enter_usd(quote: Quote, state: SwitchingState, frictions: Frictions) -> float:
    """Return what beginning in a place costs: boot, and data that is not there yet."""
    usd = quote.usd_per_hour * frictions.boot_s / HOUR_S
    usd += frictions.dataset_usd(quote.place.cloud, state.copies)
    if state.checkpoint is not None:
        usd += frictions.checkpoint_usd(state.checkpoint, quote.place)
    return usd
