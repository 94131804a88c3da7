"""How a job's own forecasts change the next ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pricing.deadline import tuning
from spottrain.pricing.deadline.model import Forecast, Interval
from spottrain.pricing.deadline.rolling import Rolling, drift, is_due, note, width

WORK, USD, TIME_S = 1000.0, 50.0, 36_000.0


def foretold(usd: float, finish_s: float) -> Forecast:
    def exactly(value: float) -> Any:
        return Interval(low=value, expected=value, high=value)

    return Forecast(finish_s=exactly(finish_s), usd=exactly(usd))


def run(paid: float, revised: float, until: float = 0.5) -> tuple[Rolling, float]:
    """A job whose work costs ``paid`` times what was foretold, and whose foretold costs
    swing by a share of the whole from one tenth to the next; return what it spent, too."""
    rolling, done, spent = None, 0.0, 0.0
    while done <= until:
        swing = 1 + revised * (round(done / 0.1) % 2)
        plain = foretold(USD * swing * (1 - done), TIME_S)
        if is_due(rolling, WORK * (1 - done)):
            rolling = note(rolling, plain, WORK * (1 - done), TIME_S * done, spent)
        done += 0.02
        spent += 0.02 * paid * USD
    assert rolling is not None
    return rolling, spent - 0.02 * paid * USD


def test_nothing_is_corrected_before_there_is_anything_to_learn_from() -> None:
    assert drift(None, 3.0) == width(None, "usd", 3.0) == 1.0
    first = note(None, foretold(USD, TIME_S), WORK, 0.0, 0.0)
    assert drift(first, 0.0) == 1.0
    assert not is_due(first, 0.99 * WORK)
    assert is_due(first, 0.97 * WORK)


@given(st.floats(0.3, 3.0))
def test_what_is_left_costs_more_or_less_as_what_was_done_did(paid: float) -> None:
    halfway = drift(*run(paid, 0.0))
    early = drift(*run(paid, 0.0, until=0.1))
    assert min(paid, 1.0) - 1e-9 <= halfway <= max(paid, 1.0) + 1e-9
    assert abs(halfway - 1) >= abs(early - 1) - 1e-9


def test_a_job_whose_forecasts_hold_has_narrow_intervals_and_one_whose_do_not_wide_ones() -> None:
    steady, _ = run(1.0, 0.0)
    unsteady, _ = run(1.0, 0.5)
    left = USD / 2
    assert width(steady, "usd", left) < 1.0 < width(unsteady, "usd", left)
    assert width(unsteady, "usd", left) <= tuning.MAX_WIDTH


def test_unknown_costs_teach_nothing() -> None:
    never = foretold(float("inf"), float("inf"))
    rolling = None
    for done in range(6):
        rolling = note(rolling, never, WORK * (1 - done / 10), 0.0, float(done))
    assert drift(rolling, 5.0) == 1.0
    known = note(rolling, foretold(USD, TIME_S), 0.3 * WORK, 0.0, 7.0)
    assert width(known, "usd", USD) == pytest.approx(
        (tuning.WIDTH_WEIGHT / (tuning.WIDTH_WEIGHT + known.marks)) ** 0.5
    )
