"""When to move to another offer: one pure decision at every change of prices or hazards.

After Narayanan's dissertation, section 6.3.2, which moves to whatever is cheapest per
example and takes moves as free; here the cost of a move counts, and so does what
interruptions waste.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.pricing.prices.place import Place
from spottrain.pricing.ranking.frictions import Frictions, Quote
from spottrain.units import HOUR_S

_TIE = 1e-9
"""Relative difference of two costs that counts as rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingRule:
    """How much better another offer must be.

    The defaults, without frictions: whatever is cheapest now, as in the dissertation.
    """

    hysteresis: float = 0.0
    """Share by which another offer must train more for a dollar."""
    horizon_s: float | None = None
    """How long today's prices are expected to hold; None: to the end of the job."""


CHEAPEST_NOW = SwitchingRule()
"""As in the dissertation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecision:
    """Where to be from now on, and why."""

    quote: Quote
    moves: bool
    """False for the first choice."""
    reason: str
    saving_usd: float = 0.0
    """Of the best other offer, over the horizon, without the cost of the move."""
    switch_usd: float = 0.0
    """Cost of moving to it: data, boot and work done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingState:
    """Where a job is, and the work that is left."""

    examples: float
    """Left to do."""
    held: Place | None = None
    """None before the first choice, or when what was held is lost."""
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
    """Return where to be from now on.

    A move must save more over the horizon than it costs, and the new offer must train
    more per dollar by the rule's hysteresis. Of several, the one that saves most after
    its cost; the first of equals. What is held counts as lost without a quote.

    Args:
        quotes: What can be had now, in any order; at least one. Quotes with numbers that
            are not finite are ignored.
        state: Of the job.
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
    """The gain reaches the hysteresis and is more than rounding."""

    @property
    def net_usd(self) -> float:
        return self.saving_usd - self.switch_usd

    def decision(self, held: Quote, rule: SwitchingRule) -> PlaceDecision:
        place = "/".join(self.quote.place)
        moves = self.enough and self.net_usd > 0
        if self.gain <= _TIE:
            reason = f"nothing trains more for a dollar; next is {place}"
        elif not self.enough:
            reason = (
                f"{place} trains {self.gain:.1%} more for a dollar, less than the "
                f"{rule.hysteresis:.1%} asked for"
            )
        else:
            reason = (
                f"{place} saves ${self.saving_usd:.2f}; moving there costs "
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
    """Return the best quote of one place, which may have several a day."""
    own = [quote for quote in quotes if quote.place == place]
    return min(own, key=frictions.usd_per_example) if own else None


def _first(
    quotes: Sequence[Quote], state: SwitchingState, frictions: Frictions
) -> PlaceDecision:
    """Return the place where the job costs least, getting there included."""

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
    """Return the cost of starting in a place: boot, and data that is not there yet."""
    usd = quote.usd_per_hour * frictions.boot_s / HOUR_S
    usd += frictions.dataset_usd(quote.place.cloud, state.copies)
    if state.checkpoint is not None:
        usd += frictions.checkpoint_usd(state.checkpoint, quote.place)
    return usd
