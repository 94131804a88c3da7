"""A job on two clouds in virtual time, one of which dies in the middle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.test_simulation import SPEC, check_end, settings, torment
from tests.simulation.two_clouds import Sky, TwoClouds
from tests.tiers import first_always

from spottrain.varuna_manager.core.fleet import BOOT_BOUND_S


def world(seed: int, **changes: object) -> TwoClouds:
    sky = Sky(
        capacity={"a": 8, "b": 8},
        prices={"a": 1.0, "b": 1.5},
        clouds={"a": "east", "b": "west"},
    )
    return TwoClouds(seed, settings(**changes), sky)


def clouds_of(job: TwoClouds) -> set[str]:
    """Return the clouds of VMs that count."""
    return {vm.offer.cloud for vm in job.vms.values() if vm.counts}


def dies(job: TwoClouds, name: str, *, with_vms: bool) -> None:
    """Let a cloud stop answering, and its VMs end without notice."""
    job.sky.down.add(name)
    if with_vms:
        for vm in job.sky.vms.values():
            if vm.offer.cloud == name and vm.alive:
                job.freeze_vm(vm.vm_id)
                job.end_vm(vm.vm_id)


def test_a_job_begins_where_it_is_cheapest_and_stays_in_one_region() -> None:
    job = world(0)
    seen: set[frozenset[str]] = set()

    def look() -> None:
        seen.add(frozenset(clouds_of(job)))
        job.after(1.0, look)

    look()
    job.run()
    check_end(job)
    assert seen == {frozenset(), frozenset({"east"})}


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_a_job_moves_when_its_cloud_dies_and_pays_for_nothing_twice(seed: int) -> None:
    job = world(seed, max_vms=4)
    where: list[set[str]] = []
    job.after(60.0, lambda: dies(job, "east", with_vms=True))
    # VMs that were to boot there are waited for as long as for any.
    job.after(60.0 + BOOT_BOUND_S + 120.0, lambda: where.append(clouds_of(job)))
    job.after(60.0 + BOOT_BOUND_S + 600.0, job.sky.down.clear)
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
    assert job.step == SPEC.steps
    assert where in ([set()], [{"west"}])
    assert {vm.offer.cloud for vm in job.sky.vms.values()} == {"east", "west"}


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_vms_of_a_cloud_that_refuses_new_ones_train_on(seed: int) -> None:
    job = world(seed, max_vms=4)
    job.after(100.0, lambda: dies(job, "east", with_vms=False))
    job.after(2000.0, job.sky.down.clear)
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
    assert job.tally.preemptions_unnoticed == 0


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_clouds_that_come_and_go_leave_nothing_behind(seed: int) -> None:
    job = world(seed, max_vms=5, spec=replace(SPEC, steps=50))
    torment(job, mean_s=60.0)

    def flip() -> None:
        name = job.random.choice(job.names)
        (job.sky.down.discard if name in job.sky.down else job.sky.down.add)(name)
        job.after(job.random.expovariate(1 / 60.0), flip)

    job.after(30.0, flip)
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
