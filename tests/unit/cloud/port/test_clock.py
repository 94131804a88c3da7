"""The manager's clock, against a wall clock that a test sets."""

from __future__ import annotations

import time

import pytest

from spottrain.varuna_manager.daemon.clock import Clock


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
