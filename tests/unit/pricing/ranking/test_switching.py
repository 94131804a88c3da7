"""When to move: by hand-made quotes, and laws that every decision must obey."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.prices.place import Place
from spottrain.pricing.ranking.switching import (
    CHEAPEST_NOW,
    NO_FRICTIONS,
    Frictions,
    Quote,
    SwitchingRule,
    SwitchingState,
    decide,
)

HERE = Place("aws", "us-east-1", "us-east-1a", "p3.2xlarge")
BESIDE = HERE._replace(zone="us-east-1b")
FAR = HERE._replace(region="us-west-2", zone="us-west-2a")
OTHER = Place("azure", "us_east", "us_east", "NC6s v3")
HOUR = 3600.0
"""Examples in an hour at one a second."""


def quote(place: Place = HERE, usd: float = 1.0, rate: float = 1.0, losses: float = 0.0) -> Quote:
    return Quote(place=place, usd_per_hour=usd, examples_per_s=rate, losses_per_hour=losses)


def state(hours: float = 100.0, held: Place | None = HERE) -> SwitchingState:
    return SwitchingState(
        examples=hours * HOUR, held=held, checkpoint=held, copies=frozenset({"aws"})
    )


def test_the_first_choice_is_the_most_examples_for_a_dollar() -> None:
    quotes = [quote(usd=1.0), quote(OTHER, usd=1.5, rate=2.0), quote(FAR, usd=3.0)]
    decision = decide(quotes, state(held=None), NO_FRICTIONS, CHEAPEST_NOW)
    assert decision.quote.place == OTHER
    assert not decision.moves


def test_the_first_choice_counts_the_data_that_is_elsewhere() -> None:
    quotes = [quote(usd=1.0), quote(OTHER, usd=0.9)]
    frictions = Frictions(dataset_bytes=150e9)
    stays = decide(quotes, state(100.0, None), frictions, CHEAPEST_NOW)
    goes = decide(quotes, state(200.0, None), frictions, CHEAPEST_NOW)
    assert (stays.quote.place, goes.quote.place) == (HERE, OTHER)


def test_without_frictions_any_better_price_is_taken() -> None:
    quotes = [quote(usd=1.0), quote(BESIDE, usd=0.999)]
    decision = decide(quotes, state(), NO_FRICTIONS, CHEAPEST_NOW)
    assert decision.moves
    assert decision.quote.place == BESIDE


def test_of_equal_prices_the_first_place_is_taken_in_whatever_order_they_come() -> None:
    third = 0.1 + 0.2  # not 0.3, but equal to it, rounding aside
    quotes = [quote(FAR, usd=third), quote(usd=0.3), quote(BESIDE, usd=third)]
    for held in (None, OTHER):
        for order in (quotes, quotes[::-1]):
            own = [quote(OTHER, usd=2.0)] if held else []
            decision = decide([*order, *own], state(held=held), NO_FRICTIONS, CHEAPEST_NOW)
            assert decision.quote.place == HERE


def test_an_equal_price_is_no_reason_to_move() -> None:
    quotes = [quote(BESIDE), quote(usd=1.0), quote(OTHER, usd=2.0, rate=2.0)]
    decision = decide(quotes, state(), NO_FRICTIONS, CHEAPEST_NOW)
    assert not decision.moves


def test_hysteresis_keeps_what_is_nearly_as_good() -> None:
    rule = SwitchingRule(hysteresis=0.05)
    near = [quote(usd=1.04), quote(BESIDE)]
    off = [quote(usd=1.06), quote(BESIDE)]
    stays = decide(near, state(), NO_FRICTIONS, rule)
    assert not stays.moves
    assert decide(off, state(), NO_FRICTIONS, rule).moves


def test_prices_within_the_hysteresis_cause_one_move_at_most() -> None:
    held, moves = HERE, 0
    for day in range(20):
        wave = 0.02 if day % 2 else -0.02
        quotes = [quote(usd=1.0 + wave), quote(BESIDE, usd=1.0 - wave)]
        rule = SwitchingRule(hysteresis=0.05)
        decision = decide(quotes, state(held=held), NO_FRICTIONS, rule)
        held, moves = decision.quote.place, moves + decision.moves
    assert moves == 0


def test_a_move_must_save_more_than_boot_and_lost_work_cost() -> None:
    frictions = Frictions(boot_s=1800, move_s=1800)
    quotes = [quote(usd=2.0), quote(BESIDE, usd=1.0)]
    # Saves 1 USD an hour; half an hour's boot and half an hour again cost 1 USD.
    stays = decide(quotes, state(0.99), frictions, CHEAPEST_NOW)
    goes = decide(quotes, state(1.01), frictions, CHEAPEST_NOW)
    assert (stays.moves, goes.moves) == (False, True)


def test_savings_count_no_further_than_the_horizon() -> None:
    frictions = Frictions(boot_s=3600)
    quotes = [quote(usd=1.1), quote(BESIDE, usd=1.0)]
    short, long = (SwitchingRule(horizon_s=hours * HOUR) for hours in (9, 11))
    assert not decide(quotes, state(), frictions, short).moves
    assert decide(quotes, state(), frictions, long).moves


@pytest.mark.parametrize(("there", "usd"), [(HERE, 0.0), (BESIDE, 1.0), (FAR, 2.0), (OTHER, 9.0)])
def test_a_checkpoint_costs_more_the_further_it_goes(there: Place, usd: float) -> None:
    moved = Frictions(checkpoint_bytes=100e9).checkpoint_usd(HERE, there)
    assert moved == pytest.approx(usd)


@pytest.mark.parametrize(("size_gb", "share"), [(0.098, 0.00006), (0.408, 0.00025), (150, 0.0913)])
def test_egress_is_that_of_the_dissertation(size_gb: float, share: float) -> None:
    # Table 6.2, against 160 V100-hours of spot; datasets there have their first GB free.
    frictions = Frictions(checkpoint_bytes=(size_gb - (size_gb > 1)) * 1e9)
    moved = frictions.checkpoint_usd(HERE, OTHER)
    assert moved / (160 * 0.918) == pytest.approx(share, rel=0.03)


def test_a_dataset_is_fetched_once_into_a_cloud() -> None:
    frictions = Frictions(dataset_bytes=100e9)
    assert frictions.dataset_usd("azure", {"aws"}) == pytest.approx(9.0)
    assert frictions.dataset_usd("azure", {"aws", "azure"}) == 0.0


def test_interruptions_that_become_frequent_drive_a_job_away() -> None:
    frictions = Frictions(boot_s=300, lost_s=900)
    rule = SwitchingRule(hysteresis=0.05)
    calm = [quote(usd=1.0), quote(BESIDE, usd=1.2)]
    rough = [quote(usd=1.0, losses=1.0), quote(BESIDE, usd=1.2)]
    assert not decide(calm, state(), frictions, rule).moves
    assert decide(rough, state(), frictions, rule).quote.place == BESIDE


def test_an_interruption_wastes_its_boot_and_the_work_done_again() -> None:
    frictions = Frictions(boot_s=600, lost_s=1200)
    assert frictions.throughput(quote(losses=1.0)) == pytest.approx(HOUR / 1.5)


def test_a_held_place_without_a_quote_is_replaced() -> None:
    quotes = [quote(FAR, usd=1.0), quote(OTHER, usd=1.0)]
    frictions = Frictions(checkpoint_bytes=100e9)
    decision = decide(quotes, state(), frictions, SwitchingRule(hysteresis=9.0))
    assert decision.quote.place == FAR


def test_alone_there_is_nothing_to_move_to() -> None:
    assert not decide([quote()], state(), NO_FRICTIONS, CHEAPEST_NOW).moves


def test_no_quotes_are_no_market() -> None:
    for quotes in ([], [quote(usd=math.nan), quote(rate=0.0)]):
        with pytest.raises(ValueError, match="no quotes"):
            decide(quotes, state(), NO_FRICTIONS, CHEAPEST_NOW)


def test_a_held_place_with_an_invalid_price_is_left() -> None:
    quotes = [quote(usd=math.nan), quote(OTHER, usd=5.0)]
    decision = decide(quotes, state(), NO_FRICTIONS, CHEAPEST_NOW)
    assert decision.quote.place == OTHER


def test_free_machines_are_worth_a_move_and_are_not_left() -> None:
    quotes = [quote(usd=1.0), quote(BESIDE, usd=0.0)]
    assert decide(quotes, state(), NO_FRICTIONS, CHEAPEST_NOW).moves
    assert not decide(quotes, state(held=BESIDE), NO_FRICTIONS, CHEAPEST_NOW).moves


PLACES = [HERE, BESIDE, FAR, OTHER]
QUOTES = st.lists(
    st.builds(
        quote,
        st.sampled_from(PLACES),
        st.floats(0.1, 10),
        st.floats(0.1, 10),
        st.floats(0, 2),
    ),
    min_size=1,
    max_size=8,
)
FRICTIONS = st.builds(
    Frictions,
    boot_s=st.floats(0, 3600),
    lost_s=st.floats(0, 3600),
    move_s=st.floats(0, 3600),
    checkpoint_bytes=st.floats(0, 1e12),
    dataset_bytes=st.floats(0, 1e12),
)
RULES = st.builds(
    SwitchingRule,
    hysteresis=st.floats(0, 1),
    horizon_s=st.none() | st.floats(60, 1e6),
)


@given(QUOTES, FRICTIONS, RULES, st.floats(0.01, 1000))
def test_a_move_saves_more_than_it_costs_and_beats_the_hysteresis(
    quotes: list[Quote], frictions: Frictions, rule: SwitchingRule, hours: float
) -> None:
    decision = decide(quotes, state(hours), frictions, rule)
    assert decision.quote in quotes
    if not decision.moves:
        return
    held = min((q for q in quotes if q.place == HERE), key=frictions.usd_per_example)
    there, asked = decision.quote, state(hours)
    own, goes = map(frictions.usd_per_example, (held, there))
    assert own / goes - 1 >= rule.hysteresis
    most = frictions.throughput(held) * (rule.horizon_s or math.inf) / HOUR
    switch_usd = (
        there.usd_per_hour * frictions.boot_s / HOUR
        + frictions.dataset_usd(there.place.cloud, asked.copies)
        + frictions.checkpoint_usd(HERE, there.place)
        + held.examples_per_s * frictions.move_s * goes
    )
    assert (own - goes) * min(asked.examples, most) > switch_usd * (1 - 1e-9)


@given(QUOTES, FRICTIONS, RULES, st.floats(0.01, 1000))
def test_having_moved_one_does_not_move_back_at_the_same_prices(
    quotes: list[Quote], frictions: Frictions, rule: SwitchingRule, hours: float
) -> None:
    first = decide(quotes, state(hours), frictions, rule)
    there = state(hours, first.quote.place)
    again = decide(quotes, replace(there, copies=frozenset({"aws", "azure"})), frictions, rule)
    if first.moves:
        assert again.quote.place != HERE


@given(QUOTES, FRICTIONS, RULES, st.floats(1, 1000), st.floats(1.01, 10))
def test_more_work_left_never_unmakes_a_move(
    quotes: list[Quote],
    frictions: Frictions,
    rule: SwitchingRule,
    hours: float,
    factor: float,
) -> None:
    if decide(quotes, state(hours), frictions, rule).moves:
        assert decide(quotes, state(hours * factor), frictions, rule).moves


UNSOUND = st.builds(
    quote,
    st.sampled_from(PLACES),
    st.sampled_from([math.nan, math.inf, -1.0]),
) | st.builds(
    quote,
    st.sampled_from(PLACES),
    rate=st.sampled_from([math.nan, math.inf, -1.0, 0.0]),
)


@given(QUOTES, UNSOUND, st.integers(0, 8), FRICTIONS, RULES, st.sampled_from(PLACES))
def test_invalid_quotes_change_nothing(
    quotes: list[Quote],
    unsound: Quote,
    where: int,
    frictions: Frictions,
    rule: SwitchingRule,
    held: Place,
) -> None:
    mixed = [*quotes[:where], unsound, *quotes[where:]]
    for at in (None, held):
        asked = state(held=at), frictions, rule
        assert decide(mixed, *asked) == decide(quotes, *asked)
