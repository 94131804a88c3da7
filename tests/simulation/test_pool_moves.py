"""Moving for money within a pool's grant, in virtual time: never more VMs than it allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.pool_jobs import SMALL
from tests.simulation.ranked_world import RankedWorld
from tests.simulation.test_moves import Market, zones
from tests.simulation.test_simulation import SPEC, check_end, settings, torment
from tests.tiers import first_always

from spottrain.units import HOUR_S
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.settings import PoolGrant
from spottrain.varuna_manager.core.moves import PAUSE_S, READY_BOUND_S, RELOAD_S


class GrantedWorld(RankedWorld):
    """A pool grants so many VMs, and lets the job train nothing for as long as it asks to."""

    most = 4
    allows = True
    serial = held = 0
    asked_s: list[float]

    def grant(self, idle_s: float = 0.0) -> e.GrantReceived:
        """Return the next grant."""
        self.serial += 1
        grant = PoolGrant(
            pool="lab",
            serial=self.serial,
            vms=(("simulated/box", self.most),),
            until_s=self.now_s + 1000 * HOUR_S,
            max_microusd=10**9,
            idle_s=idle_s,
        )
        return e.GrantReceived(at_s=self.now_s, grant=grant)

    def fold(self, event: e.Event) -> Any:
        before = self.state.fleet.idle_asked_s
        commands = super().fold(event)
        asked_s = self.state.fleet.idle_asked_s
        if asked_s != before:
            self.asked_s.append(asked_s)
            self.later(lambda: self.grant(asked_s * self.allows))
        held = sum(vm.ended_at_s is None for vm in self.cloud.vms.values())
        assert held <= max(self.most, self.held), "more are rented than the pool allows"
        self.held = held
        return commands


def granted(seed: int, vms: int, *, far: bool = True, **changes: Any) -> GrantedWorld:
    """A job of a pool in zone a; the VMs of zone b are of the same kind, and may be far."""
    market = Market(
        capacity={"a": 6, "b": 6},
        prices={"a": 1.0, "b": 1.2},
        clouds={"a": "simulated", "b": "simulated"},
        far=far,
    )
    spec = replace(SPEC, steps=changes.pop("steps", 300))
    own = {"max_vms": vms, "min_vms": 1, "objective": "examples_per_dollar", "facts": SMALL}
    made = GrantedWorld(seed, settings(spec=spec, **{**own, **changes}), market)
    made.most, made.asked_s = vms, []
    made.settings = replace(made.settings, grant=made.grant().grant)
    return made


def market_of(job: GrantedWorld) -> Market:
    assert isinstance(job.cloud, Market)
    return job.cloud


@pytest.mark.parametrize("far", first_always([True, False]))
@pytest.mark.parametrize("min_vms", first_always([1, 4]))
def test_a_job_of_a_pool_moves_without_ever_holding_more_than_it_is_granted(
    min_vms: int, far: bool
) -> None:
    job = granted(0, 4, far=far, min_vms=min_vms)
    job.run(until_s=100.0)
    assert zones(job) == {"a"}
    job.cloud.prices["b"] = 0.3
    trains = []
    for _ in range(240):
        job.run_on(until_s=5.0)
        trains.append(job.current_generation is not None)
    assert zones(job) == {"b"}
    assert sum(v.ended_at_s is None for v in job.cloud.vms.values()) == 4
    assert job.move is None
    assert job.asked_s[-1] == 0.0, "the pool may promise more again"
    assert READY_BOUND_S + RELOAD_S * far < job.asked_s[0] < READY_BOUND_S + 2 * RELOAD_S
    assert trains.count(False) < 30, "it trains but for minutes"
    job.run_on(until_s=200_000.0)
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert job.minibatches_lost == 0
    assert job.minibatches_recomputed == 0


def test_half_of_a_fleet_trains_on_where_both_halves_can() -> None:
    job = granted(0, 4)
    job.run(until_s=100.0)
    job.cloud.prices["b"] = 0.3
    seen = set()
    for _ in range(600):
        job.run_on(until_s=1.0)
        alive = Counter(v.offer.zone for v in job.cloud.vms.values() if v.ended_at_s is None)
        training = job.current_generation
        if job.move is not None and not job.move.is_cut_over and training is not None:
            seen.add((alive["a"], alive["b"], len(training.plan.slots)))
    assert (2, 2, 2) in seen
    assert zones(job) == {"b"}


def test_the_only_vm_of_a_job_makes_room_for_another() -> None:
    job = granted(0, 1, steps=200)
    job.run(until_s=200.0)
    step = job.step
    job.cloud.prices["b"] = 0.3
    job.run_on(until_s=600.0)
    assert zones(job) == {"b"}
    job.run_on(until_s=200_000.0)
    check_end(job)
    assert job.step == 200
    assert step > 0
    assert job.minibatches_recomputed == job.minibatches_lost == 0


@pytest.mark.parametrize("vms", first_always([1, 4]))
def test_it_goes_on_where_it_was_if_the_new_vms_are_refused(vms: int) -> None:
    job = granted(0, vms, steps=2_000)
    market_of(job).gives = 0
    job.run(until_s=200.0)
    job.cloud.prices["b"] = 0.3
    job.run_on(until_s=READY_BOUND_S + 300.0)
    assert zones(job) == {"a"}
    assert sum(v.ended_at_s is None for v in job.cloud.vms.values()) == vms
    assert job.move is None
    assert job.asked_s[-1] == 0.0
    assert job.minibatches_lost == 0
    market_of(job).gives = 1000
    job.run_on(until_s=PAUSE_S + 1200.0)
    assert zones(job) == {"b"}


def test_nothing_moves_that_the_pool_does_not_let_stand_still_or_to_another_kind() -> None:
    for allows, clouds in ((False, "simulated"), (True, "another")):
        job = granted(0, 4, steps=200)
        job.allows = allows
        market_of(job).clouds["b"] = clouds
        job.run(until_s=100.0)
        job.cloud.prices["b"] = 0.3
        job.run_on(until_s=200_000.0)
        check_end(job)
        assert {vm.offer.zone for vm in job.cloud.vms.values()} == {"a"}
        assert bool(job.asked_s) is not allows


@pytest.mark.parametrize("vms", [1, 4])
def test_a_pool_that_grants_less_meanwhile_does_not_leave_the_job_waiting(vms: int) -> None:
    job = granted(0, vms, steps=2_000)
    job.run(until_s=200.0)
    job.cloud.prices["b"] = 0.3
    while job.move is None:
        job.run_on(until_s=0.5)
    job.most = max(1, vms // 4)
    job.later(lambda: job.grant(job.asked_s[-1]))
    job.run_on(until_s=900.0)
    assert job.move is None
    assert job.current_generation is not None
    assert len([vm for vm in job.cloud.vms.values() if vm.ended_at_s is None]) == job.most


@pytest.mark.parametrize("vms", first_always([1, 4]))
def test_a_manager_may_die_after_any_event_of_a_move(vms: int) -> None:
    reference = granted(2, vms, steps=100)
    reference.run(until_s=200.0)
    reference.cloud.prices["b"] = 0.3
    first = len(reference.journal)
    while zones(reference) != {"b"} or reference.move is not None:
        reference.run_on(until_s=1.0)
    for crash_at in range(first, len(reference.journal), 11):
        job = granted(2, vms, steps=100)
        job.crash_at = crash_at
        job.run(until_s=200.0)
        job.cloud.prices["b"] = 0.3
        job.run_on(until_s=200_000.0)
        check_end(job)
        assert job.finished is not None
        assert job.finished.kind == "succeeded"


@pytest.mark.rotated
@pytest.mark.parametrize("vms", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_it_survives_a_volatile_market(seed: int, vms: int) -> None:
    job = granted(seed, vms, steps=100, far=bool(seed % 2))
    job.run(until_s=60.0)
    torment(job, mean_s=400.0)
    job.run_on(until_s=200_000.0)
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
    assert job.minibatches_lost == 0
