"""The pool's core and those of its jobs together: every cap holds, and every job ends."""

from __future__ import annotations

import pytest
from tests.simulation.pool_jobs import Lab


@pytest.mark.rotated
@pytest.mark.parametrize("policy", ["fair", "priority"])
def test_caps_hold_and_every_job_ends_whatever_fails(policy: str) -> None:
    lab = Lab(policy, seed=0)
    lab.live()
    assert lab.faults


@pytest.mark.rotated
def test_a_pool_whose_money_is_used_up_stays_within_it() -> None:
    lab = Lab("fair", seed=4)
    lab.live()
    assert lab.is_short
