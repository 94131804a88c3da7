"""What mini-batches of more slots than cores say of sharing cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.steps import FACTS, PROFILE

from spottrain.pipeline.calibrate.crowd import (
    MAX_S,
    CrowdTimes,
    commit_times,
    crowded_plan,
    growth,
    minibatches_for,
    stage_works_s,
)
from spottrain.wire.model import Plan, Slot


def pipeline(depth: int, count: int) -> Plan:
    slots = [Slot(vm_id=f"vm-{p}", index=0) for p in range(depth)]
    return crowded_plan(slots, 4, 1, count)


@given(st.floats(0, 100), st.integers(1, 64))
def test_a_crowd_trains_within_its_bound(work_s: float, cores: int) -> None:
    count = minibatches_for(work_s, cores)
    assert count * work_s / cores <= MAX_S
    assert count or 6 * work_s / cores > MAX_S


@given(st.floats(1.0, 3.0), st.floats(0.1, 1.0), st.integers(0, 5))
def test_times_on_a_core_grow_by_what_they_take_beyond_the_profile(
    factor: float, core_share: float, recomputes: int
) -> None:
    plan, again = pipeline(4, 5), dict.fromkeys(range(3), recomputes)
    works_s = stage_works_s(plan, PROFILE, FACTS, "fast", again)
    assert sum(works_s) == pytest.approx(4 * 5 * 3.0 + 3 * recomputes)
    times = [
        CrowdTimes(
            stage=p,
            tasks_s=factor * core_share * work_s,
            recomputes=again.get(p, 0),
            sections_s=core_share * 1.6,
            exchange_s=core_share * 0.5,
            trained_s=0.0,
            step_s=0.0,
        )
        for p, work_s in enumerate(works_s)
    ]
    found = growth(times, plan, PROFILE, FACTS, "fast", core_share)
    assert found == pytest.approx(factor)
    s_per_byte, exchange_s = commit_times(times, FACTS, core_share)
    assert s_per_byte == pytest.approx(4 * 1.6 / (4 * 800))
    assert exchange_s == pytest.approx(0.5)
