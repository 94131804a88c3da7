"""Moving for money in virtual time: beside the old fleet, and into another region."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.simulation.market import Cloud
from tests.simulation.ranked_world import RankedWorld
from tests.simulation.test_accounts import past_of
from tests.simulation.test_simulation import SPEC, check_end, settings, torment
from tests.simulation.two_clouds import Sky
from tests.simulation.world import World
from tests.tiers import first_always

from spottrain.cloud.port.provider import Offer, Vm
from spottrain.varuna_manager.core.moves import PAUSE_S, READY_BOUND_S
from spottrain.varuna_manager.reporting.documents import report

"""Of one VM, wherever it is."""


@dataclass
class Market(Sky):
    """Zones that may be regions, and may give less than they offer."""

    far: bool = False
    gives: int = 1000
    """VMs that zone b has yet to give."""

    def offers(self) -> tuple[Offer, ...]:
        return super().offers() if self.far else Cloud.offers(self)

    def launch(self, token: str, intent: str, wanted: Offer, count: int, at_s: float) -> list[Vm]:
        if wanted.zone == "b" and token not in self.by_token:
            count = min(count, self.gives)
            self.gives -= count
        return super().launch(token, intent, wanted, count, at_s)


def market_of(job: World) -> Market:
    assert isinstance(job.cloud, Market)
    return job.cloud


def moving(seed: int, *, far: bool = False, steps: int = 300, **changes: Any) -> RankedWorld:
    """Four VMs at 1.0 $/h; as many are to be had in zone b, which may be a region."""
    market = Market(
        capacity={"a": 6, "b": 6},
        prices={"a": 1.0, "b": 1.2},
        clouds={"a": "east", "b": "west"},
        far=far,
    )
    own = {"max_vms": 4, "min_vms": 2, "objective": "examples_per_dollar"}
    spec = replace(SPEC, steps=steps)
    return RankedWorld(seed, settings(spec=spec, **{**own, **changes}), market)


def zones(job: World) -> set[str]:
    return {
        vm.offer.zone for vm in job.cloud.vms.values() if vm.ended_at_s is None and not vm.frozen
    }


@pytest.mark.parametrize("far", first_always([False, True]))
@pytest.mark.parametrize("seed", first_always(range(2)))
def test_a_fleet_moves_to_what_has_become_much_cheaper(seed: int, far: bool) -> None:
    job = moving(seed, far=far)
    job.run(until_s=100.0)
    assert zones(job) == {"a"}
    job.cloud.prices["b"] = 0.3
    alive = []
    for _ in range(120):
        job.run_on(until_s=10.0)
        alive.append(sum(v.ended_at_s is None for v in job.cloud.vms.values()))
    assert zones(job) == {"b"}
    assert max(alive) == 8, "the new ones are rented beside the old ones"
    assert alive[-1] == 4
    assert job.move is None
    assert job.generation.reason == "moving to box in b"
    (told,) = report(job.state, past_of(job), True, job.now_s)["moves"]
    assert (told["from"], told["to"]) == ("box in a", "box in b")
    assert (told["vms"], told["by_checkpoint"], told["given_up"]) == (4, far, "")
    assert told["saves_usd"] > 0
    assert told["took_s"] > 0
    job.run_on()
    check_end(job)
    assert len(job.cloud.vms) == 8
    assert job.minibatches_recomputed == 0
    assert job.minibatches_lost == 0


def test_nothing_moves_where_it_does_not_pay() -> None:
    # 3 % cheaper; or much cheaper, but with no capacity for the fleet.
    for price, capacity in ((0.97, 6), (0.3, 3)):
        job = moving(0, steps=200)
        job.run(until_s=100.0)
        job.cloud.capacity["b"] = capacity
        job.cloud.prices["b"] = price
        job.run_on()
        check_end(job)
        assert {vm.offer.zone for vm in job.cloud.vms.values()} == {"a"}


def test_nothing_moves_shortly_before_the_end_or_for_speed_or_over_the_hourly_cap() -> None:
    for changes in ({"objective": "throughput"}, {"max_usd_per_hour": 5.0}, {}):
        job = moving(0, steps=100, **changes)
        job.run(until_s=100.0)
        while not changes and job.step < 99:
            job.run_on(until_s=1.0)
        job.cloud.prices["b"] = 0.7
        job.run_on()
        check_end(job)
        assert {vm.offer.zone for vm in job.cloud.vms.values()} == {"a"}, changes


@pytest.mark.parametrize("far", first_always([False, True]))
def test_a_move_is_given_up_if_the_new_vms_do_not_come(far: bool) -> None:
    job = moving(0, far=far, steps=2_000)
    market_of(job).gives = 2
    job.run(until_s=100.0)
    job.cloud.prices["b"] = 0.3
    job.run_on(until_s=READY_BOUND_S + 120.0)
    assert job.move is None
    assert zones(job) == {"a"}
    assert sum(v.ended_at_s is None for v in job.cloud.vms.values()) == 4
    assert job.generation.number == 1, "nobody who trains was disturbed"
    (told,) = report(job.state, past_of(job), True, job.now_s)["moves"]
    assert told["given_up"] == "not moving to box in b: 2 of 4 new VMs ready"
    market_of(job).gives = 1000
    job.run_on(until_s=PAUSE_S - 240.0)
    assert zones(job) == {"a"}
    job.run_on(until_s=900.0)
    assert zones(job) == {"b"}


@pytest.mark.parametrize("far", first_always([False, True]))
def test_an_old_vm_that_is_lost_meanwhile_does_not_end_training(far: bool) -> None:
    job = moving(1, far=far)
    job.run(until_s=100.0)
    job.cloud.prices["b"] = 0.3
    while job.move is None:
        job.run_on(until_s=0.5)
    job.end_vm(job.move.vm_ids[0])
    job.run_on(until_s=600.0)
    # Far away the three that are left cannot save: the job stays, and moves an hour later.
    assert zones(job) == ({"a"} if far else {"b"})
    job.run_on()
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert job.minibatches_lost == 0


@pytest.mark.rotated
@pytest.mark.parametrize(("seed", "far"), [(0, False), (1, True)])
def test_a_job_that_moves_for_money_survives_a_volatile_market(seed: int, far: bool) -> None:
    job = moving(seed, far=far, steps=150)
    job.run(until_s=60.0)
    torment(job)
    job.run_on(until_s=100_000.0)
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
    assert job.minibatches_lost == 0


@pytest.mark.parametrize("far", first_always([False, True]))
def test_a_manager_may_die_after_any_event_of_a_move(far: bool) -> None:
    reference = moving(2, far=far, steps=300)
    reference.run(until_s=300.0)
    reference.cloud.prices["b"] = 0.3
    first = len(reference.journal)
    reference.run_on(until_s=120.0)
    last = len(reference.journal)
    assert zones(reference) == {"b"}
    for crash_at in range(first, last, 29):
        job = moving(2, far=far, steps=300)
        job.crash_at = crash_at
        job.run(until_s=300.0)
        job.cloud.prices["b"] = 0.3
        job.run_on()
        check_end(job)
        assert job.finished is not None
        assert job.finished.kind == "succeeded"


def test_a_place_is_not_moved_to_a_third_time_in_a_day() -> None:
    job = moving(0, far=True, steps=2_000)
    job.run(until_s=100.0)
    came: list[str] = []
    for turn in range(7):
        job.cloud.prices["ba"[turn % 2]] = 0.6 * 0.7**turn
        job.run_on(until_s=300.0)
        came += sorted(zones(job))
    assert came[:4] == ["b", "a", "b", "a"]
    assert came[4:] == ["a"] * 3
