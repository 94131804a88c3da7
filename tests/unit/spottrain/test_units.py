"""Counts in words."""

from __future__ import annotations

from spottrain.units import counted


def test_one_is_no_plural() -> None:
    assert counted(1, "worker") == "1 worker"
    assert counted(0, "worker") == "0 workers"
    assert counted(1, "slow machine was", "slow machines were") == "1 slow machine was"
    assert counted(2, "slow machine was", "slow machines were") == "2 slow machines were"
