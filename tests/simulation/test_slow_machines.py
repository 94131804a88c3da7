"""Slow machines in virtual time: found, given less to do, replaced when that pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.test_simulation import SPEC, check_end, world
from tests.simulation.world import World
from tests.tiers import first_always

from spottrain.varuna_manager.core.stragglers import MAX_REPLACED_PER_HOUR


def slow_world(seed: int, spare: int, steps: int = 400, **changes: Any) -> World:
    """Eight VMs train at most; ``spare`` more can be had."""
    # Interleaved plans cannot be shared anew.
    spec = replace(SPEC, steps=steps)
    job = world(seed, spec=spec, schedule="varuna", **changes)
    job.cloud.capacity = {"a": 8 + spare, "b": 0}
    return job


def slow_down(job: World, factor: float, count: int = 1, after_s: float = 500.0) -> None:
    """Let VMs of the plan become slow after a while."""

    def strike() -> None:
        slots = job.generation.plan.slots
        for slot in slots[len(slots) - count :]:
            job.cloud.vms[slot.vm_id].slowness = factor

    job.after(after_s, strike)


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_a_slow_vm_is_replaced_by_one_that_is_rented_for_it(seed: int) -> None:
    job = slow_world(seed, spare=1)
    slow_down(job, 2.0)
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    (slow,) = job.slow_vms
    assert job.tally.slow_vms_replaced == 1
    assert job.cloud.vms[slow.vm_id].slowness == 2.0
    assert slow.slowness == pytest.approx(2.0, rel=0.2)
    assert f"{slow.vm_id} is 2.0x slower" in slow.evidence
    assert len(job.cloud.vms) == 9
    assert "slow" in job.generations[-1].reason
    assert job.generations[-1].num_slots == 8
    assert job.minibatches_recomputed == 0
    assert job.interruptions == ()


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_a_warm_spare_takes_the_place_of_a_slow_vm(seed: int) -> None:
    job = slow_world(seed, spare=0, max_vms=9)
    job.cloud.capacity["a"] = 9
    slow_down(job, 2.0)
    job.run()
    check_end(job)
    plans = job.generations
    slow = job.slow_vms[0]
    assert job.cloud.vms[slow.vm_id].slowness == 2.0
    assert slow.replaced_by in job.cloud.vms
    assert plans[0].num_slots == 8
    assert plans[1].num_slots == 8
    assert job.tally.slow_vms_replaced == 1


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_without_any_other_vm_the_slow_one_gets_less_to_do(seed: int) -> None:
    job = slow_world(seed, spare=0)
    slow_down(job, 2.0)
    job.run()
    check_end(job)
    assert job.tally.slow_vms_replaced == 0
    assert len(job.cloud.vms) == 8
    assert job.workers.shared > 0
    (only,) = job.generations
    assert only.measured_step_s is not None
    assert only.measured_step_s < 1.8 * only.predicted_step_s


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_noise_replaces_no_vm_and_rebalances_nothing(seed: int) -> None:
    job = slow_world(seed, spare=3)
    job.run()
    check_end(job)
    assert job.tally.slow_vms_replaced == 0
    assert job.workers.shared == 0
    assert len(job.generations) == 1


def test_a_slow_vm_is_kept_if_a_replacement_costs_more_than_it_gains() -> None:
    job = slow_world(0, spare=1)
    slow_down(job, 1.5)
    # By then another machine costs eight times as much.
    job.after(490.0, lambda: job.cloud.prices.update(a=8.0))
    job.run()
    check_end(job)
    assert job.tally.slow_vms_replaced == 0
    assert len(job.cloud.vms) == 8


def test_no_vm_is_replaced_shortly_before_the_end() -> None:
    job = slow_world(0, spare=1, steps=71)
    slow_down(job, 1.3)  # found after some 70 mini-batches
    job.run()
    check_end(job)
    assert job.tally.slow_vms_replaced == 0


def test_a_bounded_number_of_vms_is_replaced_within_an_hour() -> None:
    job = slow_world(0, spare=8)
    slow_down(job, 2.0, count=1)

    def again() -> None:
        """Whatever is rented from now on becomes slow in time."""
        for vm in list(job.cloud.vms.values())[7:]:
            vm.slowness = 2.0
        job.after(50.0, again)

    job.after(600.0, again)
    job.run()
    check_end(job)
    found = [slow.found_at_s for slow in job.slow_vms]
    assert len(found) >= MAX_REPLACED_PER_HOUR
    for first, last in zip(found, found[MAX_REPLACED_PER_HOUR:], strict=False):
        assert last - first >= 3600.0


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_a_replacement_that_is_lost_at_once_costs_nothing(seed: int) -> None:
    job = slow_world(seed, spare=2)
    slow_down(job, 2.0)
    struck: list[str] = []

    def strike() -> None:
        slow = [vm.slow for vm in job.vms.values() if vm.slow is not None]
        if slow and slow[0].replaced_by and not struck:
            struck.append(slow[0].replaced_by)
            job.end_vm(slow[0].replaced_by)
        else:
            job.after(0.2, strike)

    job.after(500.0, strike)
    job.run()
    check_end(job)
    assert struck
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert job.minibatches_lost == 0


def test_a_manager_that_dies_sends_the_newest_share_again() -> None:
    job = slow_world(0, spare=0)
    slow_down(job, 2.0)
    job.run(until_s=1.0)
    while not job.workers.shared:
        job.run_on(until_s=1.0)
    assert job.current_generation is not None
    before = job.workers.shared
    job.kill_manager(down_s=1.0)
    job.run_on(until_s=30.0)
    assert job.workers.shared >= before + 8
    job.run_on()
    check_end(job)
