"""The clock of bills, against a wall clock that a test sets."""

from __future__ import annotations

import time

import pytest

from spottrain.cloud.port.clock import Clock


def set_wall(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + by_s)


def test_it_starts_at_the_wall_clocks_time() -> None:
    clock = Clock()
    assert abs(clock.now_s() - time.time()) < 1.0
    assert clock.set_by_s() == 0.0


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_a_change_of_the_wall_clock_is_reported_once_and_not_followed(
    monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    clock = Clock()
    before_s = clock.now_s()
    set_wall(monkeypatch, by_s)
    assert 0.0 <= clock.now_s() - before_s < 1.0
    assert clock.set_by_s() == pytest.approx(by_s, abs=1.0)
    assert clock.set_by_s() == 0.0
    set_wall(monkeypatch, -by_s)
    assert clock.set_by_s() == pytest.approx(-by_s, abs=1.0)


def test_it_starts_no_earlier_than_the_newest_event() -> None:
    known_s = time.time() + 7200.0
    clock = Clock(known_s)
    assert known_s <= clock.now_s() < known_s + 1.0
    assert clock.set_by_s() == pytest.approx(-7200.0, abs=1.0)


HOURS_S = 8 * 3600.0


def test_a_wall_clock_that_is_far_ahead_counts_once_it_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true_s = time.time()
    set_wall(monkeypatch, HOURS_S)
    clock = Clock(true_s - 10.0)
    assert clock.is_unsettled
    assert clock.now_s() == pytest.approx(true_s - 10.0, abs=1.0)
    assert clock.set_by_s() == 0.0
    assert clock.settle(true_s) == pytest.approx(HOURS_S, abs=1.0)
    assert clock.now_s() == pytest.approx(true_s, abs=1.0)
    assert clock.set_by_s() == 0.0
    assert not clock.is_unsettled


def test_a_machine_that_was_off_pays_for_the_time_in_between() -> None:
    true_s = time.time()
    clock = Clock(true_s - HOURS_S)
    assert clock.is_unsettled
    assert clock.settle(true_s + 5.0) == pytest.approx(0.0, abs=10.0)
    assert clock.now_s() == pytest.approx(true_s, abs=10.0)


def test_where_nobody_tells_the_time_the_wall_clock_does() -> None:
    true_s = time.time()
    clock = Clock(true_s - HOURS_S)
    clock.settle()
    assert clock.now_s() == pytest.approx(true_s, abs=1.0)


def test_a_short_pause_needs_no_check() -> None:
    assert not Clock(time.time() - 60.0).is_unsettled
    assert not Clock().is_unsettled
