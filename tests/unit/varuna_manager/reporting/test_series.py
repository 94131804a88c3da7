"""Downsampled time series."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.varuna_manager.reporting.series import Bins, downsampled

VALUES = st.floats(0.0, 1e6)
RUNS = st.lists(st.tuples(st.floats(0.001, 500.0), VALUES), min_size=1, max_size=200)


def filled(runs: list[tuple[float, float]], most: int) -> tuple[Bins, float]:
    bins, now_s = Bins(most), 1000.0
    for seconds, value in runs:
        bins.add(now_s, now_s + seconds, value)
        now_s += seconds
    return bins, now_s


@given(RUNS, st.sampled_from([2, 8, 64]))
def test_bins_stay_few_and_keep_the_sum_and_the_extremes(
    runs: list[tuple[float, float]], most: int
) -> None:
    bins, _ = filled(runs, most)
    means = bins.means()
    assert len(means) <= most
    area = sum(mean * bins.width_s for _, mean, _, _ in means)
    assert area == pytest.approx(sum(s * v for s, v in runs), rel=1e-6, abs=1e-6)
    assert max(high for *_, high in means) == max(value for _, value in runs)
    assert min(low for _, _, low, _ in means) == min(value for _, value in runs)


def test_time_in_which_nothing_was_noted_counts_as_nothing() -> None:
    bins = Bins(width_s=10.0)
    bins.add(0.0, 5.0, 4.0)
    bins.add(25.0, 30.0, 8.0)
    assert bins.means() == [(0.0, 2.0, 4.0, 4.0), (20.0, 4.0, 8.0, 8.0)]


def test_what_has_no_length_or_lies_before_the_beginning_adds_nothing() -> None:
    bins = Bins()
    bins.add(100.0, 101.0, 1.0)
    bins.add(101.0, 101.0, 9.0)
    bins.add(90.0, 100.0, 9.0)
    assert bins.means() == [(100.0, 1.0, 1.0, 1.0)]


@pytest.mark.rotated
@given(st.lists(VALUES, max_size=300), st.integers(4, 50))
def test_a_downsampled_line_keeps_its_ends_extremes_and_order(
    values: list[float], most: int
) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    few = downsampled(points, most)
    assert len(few) <= most or len(few) == len(points)
    assert few == sorted(few, key=lambda point: point[0])
    assert set(few) <= set(points)
    if points:
        assert (few[0], few[-1]) == (points[0], points[-1])
        assert max(v for _, v in few) == max(values)
        assert min(v for _, v in few) == min(values)
