"""Long jobs of large fleets, and whether a bug in the core would be found in them."""

from __future__ import annotations

import pytest
from tests.simulation.long_run import LongWorld
from tests.simulation.mutations import MUTATIONS, Mutation, caught, small_world
from tests.tiers import first_always

FEW_SEEDS = 10
"""Those that are not rare are caught within so many."""


def test_a_calm_job_of_32_vms_trains_for_days() -> None:
    job = LongWorld(0, max_vms=32, hours=100.0, fault_h=0.0)
    job.live()
    assert len(job.cloud.vms) == 32
    assert job.minibatches_recomputed == 0


@pytest.mark.nightly
def test_a_job_of_32_vms_lives_through_a_day_of_faults() -> None:
    job = LongWorld(1, max_vms=32, hours=24.0, fault_h=2.0)
    job.live()
    assert job.faults


@pytest.mark.parametrize("seed", first_always([*range(3), 17, 45]))
def test_small_jobs_live_through_a_fault_every_three_minutes(seed: int) -> None:
    job = small_world(seed)
    job.live()
    assert job.faults


@pytest.mark.rotated
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(one, marks=[pytest.mark.nightly] if one.slow else [], id=one.name)
        for one in MUTATIONS
        if not one.rare
    ],
)
def test_a_bug_in_the_core_is_found(mutation: Mutation) -> None:
    assert caught(mutation, range(FEW_SEEDS))


def test_every_mutation_is_of_a_place_that_the_core_has() -> None:
    assert len(MUTATIONS) >= 20
    for mutation in MUTATIONS:
        with mutation.applied():
            pass
