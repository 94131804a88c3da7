"""Days of a volatile market in seconds: the core with a simulated cloud and workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.builders import a_spec, model_facts, section_facts
from tests.simulation.market import Cloud
from tests.simulation.world import World
from tests.tiers import first_always
from tests.view import settings_with

from spottrain.varuna_manager.core.model.events import StopRequested
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    on_demand_usd,
    spent_usd,
)
from spottrain.wire import messages
from spottrain.wire.plan import Slot

FACTS = model_facts(
    (
        section_facts(i, param_bytes=1 << 28, optimizer_bytes=1 << 29, activation_bytes=1 << 10)
        for i in range(4)
    ),
    num_parameters=4_000_000,
    dataset_len=1000,
    heldout_len=10,
)
"""A slot of 4 GiB holds at most two of the four sections, so P >= 2."""

SPEC = a_spec(
    entrypoint="m:f",
    seed=0,
    steps=150,
    microbatch_size=1,
    checkpoint_every_steps=25,
    checkpoint_keep=3,
)


STRIKES = (
    *("kill", "silence", "notice", "notice", "worker", "slow"),
    *("market", "manager"),
)


def settings(**changes: Any) -> JobSettings:
    base = JobSettings(uid="u", spec=SPEC, facts=FACTS)
    return settings_with(base, **{"max_vms": 8, "alerts": ()} | changes)


def world(seed: int, **changes: Any) -> World:
    cloud = Cloud(capacity={"a": 5, "b": 6}, prices={"a": 1.0, "b": 1.2})
    return World(seed, settings(**changes), cloud)


def torment(world: World, mean_s: float = 40.0) -> None:
    """Let something happen to a VM, to the market or to the manager, again and again."""
    draw = world.random

    def strike() -> None:
        alive = [v for v in world.cloud.vms.values() if v.alive and not v.doomed]
        kind = draw.choice(STRIKES)
        if kind == "market":
            world.cloud.capacity[draw.choice("ab")] = draw.randint(0, 8)
            world.cloud.prices[draw.choice("ab")] = draw.uniform(0.5, 2.0)
        elif kind == "manager":
            world.kill_manager(down_s=draw.uniform(0.1, 60.0))
        elif alive:
            strike_vm(world, kind, draw.choice(alive).vm_id)
        world.after(draw.expovariate(1 / mean_s), strike)

    world.after(draw.expovariate(1 / mean_s), strike)


def strike_vm(world: World, kind: str, vm_id: str) -> None:
    vm = world.cloud.vms[vm_id]
    vm.doomed = kind not in ("worker", "slow")
    if kind == "kill":
        world.end_vm(vm_id)
    elif kind == "silence":
        world.freeze_vm(vm_id)
    elif kind == "slow":
        vm.slowness = world.random.uniform(1.1, 4.0)
    elif kind == "worker":
        world.workers.worker_dies(Slot(vm_id=vm_id, index=0))
    else:
        lead_s = world.random.choice([0.5, 5.0, 30.0, 120.0])
        world.report(vm, messages.InterruptionNoticed(lead_s=lead_s))
        world.after(lead_s, lambda: world.end_vm(vm_id))


def check_end(world: World) -> None:
    """What must hold after any end."""
    assert world.finished is not None, world.state.activity
    assert world.state.phase is JobPhase.ENDED
    left = [v for v in world.cloud.vms.values() if v.ended_at_s is None]
    assert not left, "every VM was returned or lost"
    spent = world.ledger.spent(world.now_s)
    # To the micro-dollar, which is rounded up; prices and times are rounded for each VM.
    bound = 1.0 + 0.01 * len(world.cloud.vms)
    assert abs(spent.microusd - 1e6 * world.cloud.bill_usd(world.now_s)) <= bound
    world.check_journal()


def test_an_undisturbed_job_succeeds_in_one_generation() -> None:
    calm = world(seed=0)
    calm.run()
    check_end(calm)
    assert calm.finished is not None
    assert (calm.finished.kind, calm.finished.exit_code) == ("succeeded", 0)
    (only,) = calm.generations
    assert (only.generation, only.num_slots) == (1, 8)
    assert calm.step == calm.highest_step == SPEC.steps
    assert calm.minibatches_recomputed == 0
    assert on_demand_usd(calm.state, calm.now_s) > spent_usd(calm.state, calm.now_s)


def test_a_manager_that_dies_after_any_event_rents_nothing_twice() -> None:
    spec = replace(SPEC, steps=3, checkpoint_every_steps=2)
    reference = world(seed=1, spec=spec, max_vms=4)
    reference.run()
    for crash_at in range(2, len(reference.journal)):
        job = world(seed=1, spec=spec, max_vms=4)
        job.crash_at = crash_at
        job.run()
        check_end(job)
        assert job.finished is not None
        assert job.finished.kind == "succeeded"
        assert len(job.cloud.vms) == job.settings.resources.max_vms, crash_at
        assert job.minibatches_recomputed == 0
        assert [g.generation for g in job.generations] == [1]


@pytest.mark.parametrize("seed", first_always(range(6)))
def test_a_job_with_many_faults_still_succeeds_and_loses_nothing(seed: int) -> None:
    job = world(seed)
    torment(job)
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
    assert job.step == SPEC.steps
    assert job.minibatches_lost == 0


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    one, other = world(seed), world(seed)
    for job in (one, other):
        torment(job)
        job.run(until_s=300.0)
    assert one.journal == other.journal


@pytest.mark.rotated
@pytest.mark.parametrize("seed", first_always(range(4)))
def test_a_budget_is_never_exceeded(seed: int) -> None:
    max_usd, max_gpu_hours = 2.0, 1.0 + seed / 2
    job = world(seed, max_usd=max_usd, max_gpu_hours=max_gpu_hours)
    torment(job)
    job.run()
    check_end(job)
    assert job.cloud.bill_usd(job.now_s) <= max_usd
    assert job.ledger.gpu_hours(job.now_s).usd <= max_gpu_hours
    assert job.finished is not None
    assert job.finished.kind in ("budget", "succeeded")


@pytest.mark.rotated
@pytest.mark.parametrize("seed", first_always(range(4)))
def test_a_stop_saves_returns_everything_and_can_be_resumed(seed: int) -> None:
    job = world(seed)
    torment(job, mean_s=60.0)
    stop = StopRequested(at_s=job.now_s + 90.0, by="a person")
    job.after(90.0, lambda: job.feed(stop) if job.manager_alive else None)
    job.run()
    check_end(job)
    assert job.finished is not None
    if job.finished.kind == "stopped":
        committed = job.step
        job.finished = None
        job.start_manager()
        job.run_on()
        check_end(job)
        assert job.finished is not None
        assert job.step == SPEC.steps
        assert committed <= SPEC.steps
