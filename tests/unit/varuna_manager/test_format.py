"""What is told to people."""

from __future__ import annotations

import math

from spottrain.varuna_manager.format import saved, utc


def test_a_moment_beyond_all_years_is_told_as_the_last() -> None:
    assert utc(0.0) == "1970-01-01T00:00:00Z"
    assert utc(1e15) == utc(math.inf) == "9999-12-31T23:59:59Z"


def test_what_was_saved_is_told_in_words() -> None:
    shares = [0.67, -2.33, 0.001, None]
    words = ["67% saved", "233% more was paid", "the same", "-"]
    assert [saved(share) for share in shares] == words
