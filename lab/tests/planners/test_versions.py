"""Versions are those of the dissertation's sections 2.3.3 and 3.2.1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.schedule import Work
from spottrain_lab.planners.versions import StaleSchedule, stale_schedule


def updates_before(schedule: StaleSchedule) -> list[list[int]]:
    """Return by stage and micro-batch how many updates precede its forward there."""
    found = []
    for tasks in schedule.lists:
        backwards, own = 0, []
        for task in tasks:
            if task.work is Work.FORWARD:
                own.append(backwards // schedule.microbatches_per_update)
            backwards += task.work is Work.BACKWARD
        found.append(own)
    return found


def test_the_fifth_input_of_figure_2_8_uses_versions_1_to_4() -> None:
    schedule = stale_schedule("pipedream", 4, 8)
    assert [versions[4] for versions in schedule.versions] == [1, 2, 3, 4]
    assert schedule.format()[3].startswith("F0@0 B0@0 F1@1 B1@1")
    assert schedule.max_versions() == [4, 3, 2, 1]


def test_input_9_of_figure_3_2_is_the_first_to_use_the_first_update() -> None:
    schedule = stale_schedule("2bw", 4, 4, minibatches=4)
    expected = (0,) * 8 + (1,) * 4 + (2,) * 4
    assert schedule.versions == (expected,) * 4
    assert schedule.max_versions() == [2, 2, 2, 2]


@given(st.integers(1, 9), st.integers(1, 40))
def test_stashed_weights_are_the_newest_that_the_forward_finds(depth: int, count: int) -> None:
    schedule = stale_schedule("pipedream", depth, count)
    assert updates_before(schedule) == [list(own) for own in schedule.versions]
    most = schedule.max_versions()
    assert all(n <= depth - p for p, n in enumerate(most))


@given(st.integers(1, 9), st.integers(1, 40))
def test_vertical_sync_uses_what_the_first_stage_saw(depth: int, count: int) -> None:
    synced = stale_schedule("pipedream", depth, count, vertical_sync=True)
    first = stale_schedule("pipedream", depth, count).versions[0]
    assert set(synced.versions) == {first}


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 5), st.booleans())
def test_double_buffers_suffice_and_delay_by_one(
    depth: int, more: int, minibatches: int, recompute: bool
) -> None:
    schedule = stale_schedule(
        "2bw", depth, depth + more, minibatches=minibatches, recompute=recompute
    )
    assert max(schedule.max_versions()) <= 2
    for own, done in zip(schedule.versions, updates_before(schedule), strict=True):
        assert all(used <= have for used, have in zip(own, done, strict=True))
    number = schedule.microbatches_per_update
    assert schedule.versions[0][::number] == tuple(max(t - 1, 0) for t in range(minibatches))


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(PlanError, match=r"as many micro-batches .* got 3 for 4"):
        stale_schedule("2bw", 4, 3)
    with pytest.raises(PlanError, match="vertical sync is an option of pipedream"):
        stale_schedule("2bw", 2, 3, vertical_sync=True)
    with pytest.raises(PlanError, match="got 2; change it"):
        stale_schedule("pipedream", 2, 3, minibatches=2)
