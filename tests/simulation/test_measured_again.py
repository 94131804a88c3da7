"""What a busy machine measured is measured again once it is calm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.test_simulation import SPEC, check_end, world
from tests.simulation.world import World

from spottrain.morphing.plan.profiles import is_noisy
from spottrain.varuna_manager.core.preparation import MEASURED_AGAIN_S


def busy(load: float = 4.0, **changes: Any) -> World:
    """A job whose model was measured beside other work, which has ended since."""
    job = world(0, spec=replace(SPEC, steps=500), **changes)
    job.workers.load = load
    job.run(until_s=120.0)
    assert job.profile is not None
    assert is_noisy(job.profile)
    return job


def test_once_the_load_is_gone_the_model_is_measured_again() -> None:
    job = busy()
    job.workers.load = 1.0
    job.run_on(until_s=MEASURED_AGAIN_S + 600.0)
    assert job.profile is not None
    assert not is_noisy(job.profile)
    assert job.generation.reason == "what a busy machine measured is measured again"
    job.run_on()
    check_end(job)
    assert job.minibatches_recomputed == 0


@pytest.mark.parametrize("load", [4.0, 3.6])
def test_it_is_not_while_the_machine_is_busy(load: float) -> None:
    job = busy()
    before = job.profile
    job.workers.load = load
    job.run_on()
    check_end(job)
    assert job.profile == before


def test_nor_shortly_before_the_end() -> None:
    job = busy()
    before = job.profile
    while job.step < 480:
        job.run_on(until_s=10.0)
    job.workers.load = 1.0
    job.run_on()
    check_end(job)
    assert job.profile == before


def test_where_that_fails_the_job_goes_on_as_before() -> None:
    job = busy()
    before = job.profile
    job.workers.load = 1.0
    job.workers.fails_to_measure = True
    job.run_on()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert job.profile == before
