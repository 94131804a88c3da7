"""The caps hold in virtual time, under faults of market, manager and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.simulation.test_simulation import SPEC, check_end, world
from tests.simulation.world import World
from tests.tiers import first_always

from spottrain.varuna_manager.core.limits import DRAIN_S
from spottrain.varuna_manager.core.model.events import LimitsChanged
from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.core.model.state import JobPhase, budget

LONG = replace(SPEC, steps=100_000, checkpoint_every_steps=1000)


def usd_per_hour(job: World) -> float:
    """What the cloud charges now."""
    alive = (vm for vm in job.cloud.vms.values() if vm.ended_at_s is None)
    return sum(vm.offer.usd_per_hour for vm in alive)


def change(job: World, name: str, value: float) -> None:
    limit = Limit(name=name, value=value)  # type: ignore[arg-type]
    job.feed(LimitsChanged(at_s=job.now_s, by="a person", limits=(limit,)))


def gpu_hours(job: World) -> float:
    """What all VMs, each of one GPU, have run."""
    lives = ((vm.ended_at_s or job.now_s) - vm.launched_at_s for vm in job.cloud.vms.values())
    return sum(lives) / 3600


@pytest.mark.parametrize(
    ("key", "used"),
    [("max_usd", lambda job: job.cloud.bill_usd(job.now_s)), ("max_gpu_hours", gpu_hours)],
)
@pytest.mark.parametrize("seed", first_always(range(3)))
def test_the_cap_holds_though_the_manager_dies_while_the_job_ends(
    seed: int, key: str, used: Callable[[World], float]
) -> None:
    job = world(seed, spec=LONG, **{key: 4.0})
    died: list[float] = []

    def strike() -> None:
        if job.state.phase is JobPhase.ENDING and job.vms and not died:
            died.append(job.now_s)
            job.kill_manager(down_s=300.0)
        job.after(0.2, strike)

    strike()
    job.run()
    check_end(job)
    assert died
    assert 2.5 < used(job) <= 4.0


def test_the_cap_holds_with_traffic_though_the_manager_is_away_just_then() -> None:
    max_usd = 16.0
    job = world(0, spec=LONG, max_usd=max_usd, zone_usd_per_gb=0.01)
    died: list[float] = []

    def strike() -> None:
        trains = job.state.phase is JobPhase.ACTIVE and job.current_generation is not None
        lasts_s = budget(job.state).lasts_s if trains else None
        # What is left comes down by the traffic of all mini-batches that the core is told
        # of at once.
        if lasts_s is not None and lasts_s < 20.0 and not died:
            died.append(job.now_s)
            job.kill_manager(down_s=800.0)  # nearly all that is kept back
        job.after(0.2, strike)

    strike()
    job.run()
    assert died
    assert job.state.phase is JobPhase.ENDED
    rent_usd, traffic_usd = (
        job.cloud.bill_usd(job.now_s),
        job.tally.egress.usd,
    )
    assert traffic_usd > rent_usd, "rent alone would be kept back for too short a time"
    assert 0.95 * max_usd < rent_usd + traffic_usd <= max_usd
    assert job.ledger.spent(job.now_s).usd <= max_usd


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_a_raised_cap_is_used_and_held(seed: int) -> None:
    job = world(seed, spec=LONG, max_usd=3.0)
    job.after(120.0, lambda: change(job, "max_usd", 5.0))
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "budget"
    assert 2.5 < job.cloud.bill_usd(job.now_s) <= 5.0


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_the_fleet_never_exceeds_its_hourly_cap(seed: int) -> None:
    spec = replace(SPEC, steps=400)
    job = world(seed, spec=spec, max_usd_per_hour=6.5)
    lowered_s = job.now_s + 200.0
    most: list[float] = []

    def look() -> None:
        settled = job.now_s > lowered_s + DRAIN_S + 30.0
        bound = 4.5 if settled else 6.5
        assert usd_per_hour(job) <= bound
        most.append(usd_per_hour(job))
        job.after(1.0, look)

    job.after(200.0, lambda: change(job, "max_usd_per_hour", 4.5))
    look()
    job.run()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert max(most) > 4.5
    assert job.minibatches_recomputed == 0, "it morphs, it loses nothing"
