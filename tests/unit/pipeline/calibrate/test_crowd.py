"""What mini-batches of more slots than cores say of sharing cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import slots_of
from tests.unit.morphing.steps import FACTS, PROFILE

from spottrain.morphing.simulate.sharing import SharedCores
from spottrain.morphing.simulate.simulator import expect_step
from spottrain.pipeline.calibrate.crowd import (
    MAX_S,
    CrowdTimes,
    commit_times,
    crowded_plan,
    growth,
    minibatches_for,
    stage_works_s,
    step_growth,
)
from spottrain.wire.model import Crowding, Plan


def pipeline(depth: int, count: int) -> Plan:
    slots = slots_of(f"vm-{p}" for p in range(depth))
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
            step_s=0.0,
        )
        for p, work_s in enumerate(works_s)
    ]
    found = growth(times, plan, PROFILE, FACTS, "fast", core_share)
    assert found == pytest.approx(factor)
    s_per_byte, exchange_s = commit_times(times, FACTS, core_share)
    assert s_per_byte == pytest.approx(4 * 1.6 / (4 * 800))
    assert exchange_s == pytest.approx(0.5)


@given(st.floats(0.5, 3.0))
def test_steps_grow_by_what_they_take_beyond_their_own_simulation(
    factor: float,
) -> None:
    plan, sharing = pipeline(4, 5), SharedCores((0,) * 4, (2,))
    some = Crowding(
        ranks=4,
        cores=2,
        task_growth=1.5,
        core_growth=1.25,
        commit_s_per_byte=0.01,
        commit_s=3.0,
    )
    crowded = replace(PROFILE, crowding=some)
    step = expect_step(plan, crowded, FACTS, reduction="fast", sharing=sharing)
    times = [
        CrowdTimes(
            stage=p,
            tasks_s=0.0,
            recomputes=0,
            sections_s=0.0,
            exchange_s=0.0,
            step_s=factor * step.step_s * (1 - p / 100),
        )
        for p in range(4)
    ]
    found = step_growth(times, plan, crowded, FACTS, "fast", 2)
    assert found == pytest.approx(max(1.0, factor))
    crowded = replace(PROFILE, crowding=replace(some, step_growth=found))
    step = expect_step(plan, crowded, FACTS, reduction="fast", sharing=sharing)
    assert step.step_s == pytest.approx(max(times[0].step_s, step.step_s / found))
