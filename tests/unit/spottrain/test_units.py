"""Counts and sizes in words."""

from __future__ import annotations

from spottrain.units import counted, size


def test_one_is_no_plural() -> None:
    assert counted(1, "worker") == "1 worker"
    assert counted(0, "worker") == "0 workers"
    assert counted(1, "slow machine was", "slow machines were") == "1 slow machine was"
    assert counted(2, "slow machine was", "slow machines were") == "2 slow machines were"


def test_a_size_has_the_unit_that_keeps_it_short() -> None:
    given = (0, 999, 1000, 12_300_000, 5e9, 7.25e15)
    assert [size(x) for x in given] == ["0 B", "999 B", "1.0 kB", "12.3 MB", "5.0 GB", "7,250.0 TB"]
