"""The all-knowing bound, against every schedule there is on small traces."""

from __future__ import annotations

import itertools
import math
import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_lab.traces import clairvoyant
from spottrain_lab.traces.clairvoyant import max_minibatches

Lives = tuple[tuple[int, int], ...]


def by_trying_everything(lives: Lives, step_s: dict[int, int], pause_s: int, end_s: int) -> int:
    """All choices of VMs, all lengths of runs, all waits of whole seconds."""

    @cache
    def after(free_s: int) -> int:
        if free_s >= end_s:
            return 0
        best = after(free_s + 1)
        here = [b for a, b in lives if a + pause_s <= free_s < b]
        for slots, step in step_s.items():
            for chosen in itertools.combinations(here, slots):
                until_s = min(*chosen, end_s)
                for count in range(1, (until_s - free_s) // step + 1):
                    rest = after(free_s + count * step + pause_s)
                    best = max(best, count + rest)
        return best

    return after(0)


small_lives = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 10)).map(lambda s: (s[0], sum(s))),
    max_size=5,
).map(tuple)
small_steps = st.dictionaries(st.integers(1, 4), st.integers(1, 6), max_size=3)


@given(small_lives, small_steps, st.integers(0, 3), st.integers(1, 16))
def test_the_bound_equals_an_exhaustive_search(
    lives: Lives, step_s: dict[int, int], pause_s: int, end_s: int
) -> None:
    assert max_minibatches(lives, step_s, pause_s, end_s) == by_trying_everything(
        lives, step_s, pause_s, end_s
    )


@given(small_lives, small_steps, st.integers(0, 3), st.integers(1, 12))
def test_parts_of_mini_batches_make_the_bound_a_little_larger(
    lives: Lives, step_s: dict[int, int], pause_s: int, end_s: int
) -> None:
    split = 8
    fine = {slots: step / split for slots, step in step_s.items()}
    with pytest.MonkeyPatch.context() as patch:
        whole = max_minibatches(lives, fine, pause_s, end_s)
        patch.setattr(clairvoyant, "MAX_COUNTED", 0)
        parts = max_minibatches(lives, fine, pause_s, end_s)
    assert whole <= parts
    if pause_s:
        assert parts <= whole + 1 + end_s / pause_s  # one a run


def test_a_clairvoyant_leaves_out_a_vm_that_is_lost_too_soon() -> None:
    lives = [(0.0, 100.0), (0.0, 100.0), (0.0, 15.0)]
    step_s = {2: 10.0, 3: 8.0}
    assert max_minibatches(lives, step_s, 0.0, 100.0) == 10
    assert max_minibatches(lives[:2], step_s, 0.0, 100.0) == 10


def test_nothing_is_possible_without_vms_or_plans() -> None:
    assert max_minibatches([], {1: 1.0}, 0.0, 10.0) == 0
    assert max_minibatches([(0.0, math.inf)], {}, 0.0, 10.0) == 0
    assert max_minibatches([(0.0, math.inf)], {2: 1.0}, 0.0, 10.0) == 0


def test_a_million_mini_batches_take_no_longer() -> None:
    lives = [(float(i), 9_000.0 + i) for i in range(50)]
    step_s = {n: 0.3 / n for n in range(1, 51)}
    began_s = time.process_time()
    most = max_minibatches(lives, step_s, 5.0, 9_000.0)
    assert time.process_time() - began_s < 60
    assert 1_450_000 < most <= 9_000 * 50 / 0.3
