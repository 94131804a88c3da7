"""Examples per dollar in virtual time: what a plan leaves unused is returned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.test_simulation import (
    SPEC,
    check_end,
    strike_vm,
    torment,
    world,
)
from tests.simulation.world import World
from tests.tiers import first_always

from spottrain.varuna_manager.core.planning import UNUSED_S


def cost_optimal(seed: int, steps: int = 400, **changes: Any) -> World:
    """Five VMs at 1.0 and three at 1.2 $/h; four do the most for their money."""
    spec = replace(SPEC, steps=steps)
    return world(seed, spec=spec, objective="examples_per_dollar", **changes)


def alive(job: World) -> set[str]:
    return {vm.vm_id for vm in job.cloud.vms.values() if vm.ended_at_s is None}


def planned(job: World) -> set[str]:
    return {slot.vm_id for slot in job.generation.plan.slots}


@pytest.mark.parametrize("seed", first_always(range(3)))
def test_machines_that_the_plan_leaves_unused_are_returned_for_good(seed: int) -> None:
    job = cost_optimal(seed)
    job.run(until_s=UNUSED_S / 2)
    assert len(alive(job)) == 8
    job.run_on(until_s=400.0)
    assert alive(job) == planned(job)
    assert len(planned(job)) < 8
    assert all(vm.offer.usd_per_hour == 1.0 for vm in job.vms.values())
    job.run_on()
    check_end(job)
    assert len(job.cloud.vms) == 8, "nothing was rented again"
    assert len(job.generations) == 1, "nobody who trains was disturbed"
    assert job.minibatches_recomputed == 0


def test_never_fewer_are_kept_than_the_job_wants() -> None:
    job = cost_optimal(0, min_vms=6)
    job.run(until_s=500.0)
    assert len(alive(job)) == 6
    assert planned(job) < alive(job)


def test_for_throughput_nothing_is_returned() -> None:
    job = world(0, spec=replace(SPEC, steps=400), max_vms=7)
    job.run(until_s=500.0)
    assert len(alive(job)) == 7


def test_a_lost_machine_is_replaced_but_no_more_than_that() -> None:
    job = cost_optimal(0)
    job.run(until_s=400.0)
    enough = len(alive(job))
    strike_vm(job, "kill", min(planned(job)))
    job.run_on(until_s=300.0)
    assert len(alive(job)) == enough
    assert len(job.cloud.vms) == 9
    job.run_on()
    check_end(job)


@pytest.mark.parametrize(("price", "rented"), [(0.95, 8), (0.6, 12), (1.5, 8)])
def test_only_a_price_that_is_much_lower_has_more_rented(price: float, rented: int) -> None:
    job = cost_optimal(0, steps=900)
    job.run(until_s=400.0)
    job.cloud.prices["a"] = price
    job.run_on(until_s=60.0)
    assert len(alive(job)) == (8 if rented > 8 else 4)
    job.run_on(until_s=400.0)
    assert alive(job) == planned(job)
    assert len(job.cloud.vms) == rented
    job.run_on()
    check_end(job)
    assert len(job.cloud.vms) == rented, "the lower price is not tried again"


def test_training_moves_to_machines_that_do_the_same_for_less() -> None:
    job = cost_optimal(0, steps=900)
    job.run(until_s=400.0)
    assert {vm.offer.usd_per_hour for vm in job.vms.values()} == {1.0}
    job.cloud.prices["b"] = 0.5
    job.run_on(until_s=600.0)
    assert {vm.offer.usd_per_hour for vm in job.vms.values()} == {0.5}
    assert alive(job) == planned(job)
    assert job.generation.reason == "cheaper per example: +0 slots"
    job.run_on()
    check_end(job)
    assert job.minibatches_recomputed == 0


@pytest.mark.rotated
@pytest.mark.parametrize("seed", range(3))
def test_a_cost_optimal_job_finishes_in_a_volatile_market(seed: int) -> None:
    job = cost_optimal(seed, steps=150)
    torment(job)
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
    assert job.minibatches_lost == 0
