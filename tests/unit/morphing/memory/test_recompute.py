from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.memory.recompute import best_runs, recompute_bytes

counts, sizes = st.integers(1, 60), st.integers(1, 10**9)


@given(counts, sizes, sizes, st.integers(1, 40))
def test_no_other_number_of_runs_needs_less(
    sections: int, entry: int, saved: int, in_flight: int
) -> None:
    def needed(runs: int) -> int:
        return recompute_bytes(sections, runs, entry, saved, in_flight)

    best = best_runs(sections, entry, saved, in_flight)
    assert 1 <= best <= sections
    assert needed(best) == min(needed(runs) for runs in range(1, sections + 1))


@given(st.integers(1, 30), st.integers(1, 30), sizes)
def test_it_is_the_square_root_where_that_divides(
    runs: int, length: int, entry: int
) -> None:
    # c = sqrt(l A_int / A_inp), dissertation 4.3.5
    sections, saved = runs * length, runs * entry
    if saved % length == 0:
        saved //= length
        ideal = math.sqrt(sections * saved / entry)
        assert ideal == pytest.approx(runs)
        assert recompute_bytes(
            sections, best_runs(sections, entry, saved), entry, saved
        ) == recompute_bytes(sections, runs, entry, saved)


def test_layers_of_gpt_are_best_recomputed_one_or_two_at_a_time() -> None:
    """As the dissertation says of most cases; 24 layers of hidden size 4096, batch 1."""
    entry, saved = 2 * 2048 * 4096, 2048 * 4096 * (34 + 5 * 32 * 2048 // 4096)
    runs = best_runs(24, entry, saved)
    assert 24 / runs <= 2


def test_many_in_flight_leave_room_for_few_inputs_each() -> None:
    assert best_runs(16, 1, 16) == 16
    assert best_runs(16, 1, 16, in_flight=16) == 4
    assert best_runs(16, 1, 16, in_flight=4096) == 1
