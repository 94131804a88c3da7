"""Workers that need more memory than predicted, in virtual time."""

from __future__ import annotations

import pytest
from tests.simulation.test_simulation import check_end, torment, world
from tests.tiers import first_always


@pytest.mark.parametrize("seed", first_always(range(3)))
def test_a_plan_that_does_not_fit_is_planned_around(seed: int) -> None:
    job = world(seed)
    job.workers.memory_factor = 1.3
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    (shortage,) = job.shortages.values()
    first, *_, last = job.generations
    assert "out of memory" in first.ended_by
    assert last.pipeline_depth > first.pipeline_depth
    assert shortage.times == len(job.generations) - 1


@pytest.mark.rotated
@pytest.mark.parametrize("seed", first_always(range(2)))
def test_it_is_planned_around_whatever_else_happens(seed: int) -> None:
    job = world(seed)
    job.workers.memory_factor = 1.3
    torment(job)
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"


def test_where_nothing_fits_the_job_ends_with_what_was_lacking() -> None:
    job = world(0)
    job.workers.memory_factor = 9.0
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "capacity"
    assert "no plan" in job.finished.reason
    assert "out of memory" in job.finished.reason
