"""Coverage of intervals, its own interval, the interval score, the correction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.deadline.model import Interval
from spottrain_lab.markets.coverage import Foretold, corrected, coverage

UNIT = Interval(low=9.0, expected=10.0, high=12.0)


def told(actual: float, market: str = "a", interval: Interval = UNIT) -> Foretold:
    return Foretold(market=market, interval=interval, actual=actual)


def test_the_score_is_the_width_and_a_fine_for_what_lies_outside() -> None:
    assert told(10.0).score(0.9) == pytest.approx(3 / 10)
    assert told(13.0).score(0.9) == pytest.approx((3 + 20 * 1) / 13)
    assert told(8.0).score(0.8) == pytest.approx((3 + 10 * 1) / 8)


def test_the_coverage_of_markets_that_differ_is_less_sure_than_that_of_like_ones() -> None:
    like = [told(x, market) for market in "abcdef" for x in (11.0, 11.0, 13.0, 13.0)]
    differ = [
        told(x, market)
        for market, x in zip("abcdef", (11.0, 13.0) * 3, strict=True)
        for _ in range(4)
    ]
    sure, unsure = coverage(like), coverage(differ)
    assert sure is not None
    assert unsure is not None
    assert sure.kept == unsure.kept == 0.5
    assert sure.kept_low == sure.kept_high == 0.5
    assert unsure.kept_low < 0.4
    assert unsure.kept_high > 0.6
    assert coverage([]) is None


@given(st.floats(1.0, 50.0))
def test_a_position_and_its_interval_are_the_inverse_of_each_other(x: float) -> None:
    one = told(x)
    moved = one.scaled(min(0.0, one.position()), max(0.0, one.position()))
    ends = (moved.interval.low, moved.interval.high)
    assert min(abs(end - x) for end in ends) == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1.0, 50.0)), min_size=1, max_size=40))
def test_a_correction_depends_on_other_markets_only(
    rows: list[tuple[str, float]],
) -> None:
    found = [told(x, market) for market, x in rows]
    moved = [told(x + 5.0 * (m == "a"), m) for m, x in rows]
    own = [one.interval for one in corrected(found, 0.8) if one.market == "a"]
    again = [one.interval for one in corrected(moved, 0.8) if one.market == "a"]
    assert own == again


def test_too_narrow_intervals_are_widened_to_what_they_promise() -> None:
    narrow = Interval(low=99.0, expected=100.0, high=101.0)
    rows = [told(90.0 + x, f"{market}", narrow) for market in range(10) for x in range(21)]
    before, after = coverage(rows, 0.8), coverage(corrected(rows, 0.8), 0.8)
    assert before is not None
    assert after is not None
    assert before.kept < 0.2
    assert 0.8 <= after.kept <= 0.95
    assert after.score < before.score


def test_intervals_without_width_and_single_markets_are_not_corrected() -> None:
    point = Interval(low=1.0, expected=1.0, high=1.0)
    assert corrected([told(1.0, "a", point), told(1.0, "b", point)], 0.9) == []
    assert corrected([told(11.0)], 0.9) == []
