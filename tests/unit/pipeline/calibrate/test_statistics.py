from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pipeline.calibrate.statistics import fit_line, is_steady, sigma, spread

TIMES = st.floats(1e-6, 10.0)
LATENCY = st.floats(1e-6, 1e-2)
PER_BYTE = st.floats(1e-12, 1e-6)
SIZES = (1024, 16384, 262144, 1048576)


def line(latency_s: float, s_per_byte: float) -> dict[int, list[float]]:
    return {size: [latency_s + size * s_per_byte] * 9 for size in SIZES}


@given(LATENCY, PER_BYTE)
def test_a_line_is_found_again(latency_s: float, s_per_byte: float) -> None:
    found = fit_line(line(latency_s, s_per_byte))

    for size in SIZES:
        meant = latency_s + size * s_per_byte
        assert found[0] + size * found[1] == pytest.approx(meant, rel=1e-6)


@given(LATENCY, PER_BYTE, st.lists(st.floats(1.0, 1e3), max_size=4))
def test_outliers_do_not_move_the_line(
    latency_s: float, s_per_byte: float, outliers: list[float]
) -> None:
    clean = line(latency_s, s_per_byte)
    dirty = {size: times + outliers for size, times in clean.items()}

    assert fit_line(dirty) == fit_line(clean)


@given(st.dictionaries(st.integers(1, 10**9), st.lists(TIMES, min_size=1), min_size=1))
def test_a_line_never_gives_messages_for_nothing(
    seconds: dict[int, list[float]],
) -> None:
    latency_s, s_per_byte = fit_line(seconds)

    assert latency_s >= 0
    assert s_per_byte > 0


def test_a_single_size_gives_the_bandwidth_only() -> None:
    latency_s, s_per_byte = fit_line({1000: [2.0]})

    assert latency_s == 0.0
    assert s_per_byte == pytest.approx(0.002)


@given(st.lists(TIMES, min_size=9, max_size=9), st.lists(st.floats(20, 1e6), max_size=4))
def test_outliers_do_not_move_median_and_spread_out_of_range(
    times: list[float], outliers: list[float]
) -> None:
    assert statistics.median(times + outliers) <= max(times)
    assert sigma(times + outliers) <= 1.4826 * max(times)


def test_spread_is_a_share_of_the_median() -> None:
    assert spread([9.0, 10.0, 11.0]) == pytest.approx(0.14826)
    assert spread([0.0, 0.0]) == 0.0


def test_steady_are_many_times_near_to_one_another() -> None:
    assert is_steady([1.0, 1.001, 0.999] * 3)
    assert not is_steady([1.0] * 6), "too few"
    assert not is_steady([1.0, 1.3, 0.7] * 3), "too far apart"
