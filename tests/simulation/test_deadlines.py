"""Deadlines in virtual time: the whole core against a spot market that comes and goes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.simulation.market import Cloud, offer
from tests.simulation.test_simulation import SPEC, check_end, settings, strike_vm
from tests.simulation.workers import profile_of
from tests.simulation.world import World
from tests.tiers import first_always
from tests.view import changed

from spottrain.cloud.port.provider import Offer, Vm
from spottrain.pricing.billing.budget import reserve_s
from spottrain.pricing.deadline.model import Fleet
from spottrain.pricing.prices.hazard import Hazards
from spottrain.units import HOUR_S
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.offers.ranker import OfferRanker

ON_DEMAND_USD_PER_HOUR = 3.0
CALM = Hazards((), {})
LONG = replace(SPEC, steps=300, checkpoint_every_steps=50)
MOST = 6


@dataclass
class OpenCloud(Cloud):
    """On-demand VMs are always to be had, beside the zones' spot VMs."""

    def free(self, zone: str) -> int:
        used = sum(
            vm.ended_at_s is None and vm.offer.zone == zone and vm.offer.spot
            for vm in self.vms.values()
        )
        return max(0, self.capacity[zone] - used)

    def offers(self) -> tuple[Offer, ...]:
        *spot, expensive, _ = super().offers()
        price = ON_DEMAND_USD_PER_HOUR
        on_demand = replace(expensive, usd_per_hour=price, available=None)
        return (*spot, on_demand)

    def launch(self, token: str, intent: str, wanted: Offer, count: int, at_s: float) -> list[Vm]:
        if wanted.spot:
            return super().launch(token, intent, wanted, count, at_s)
        room, self.capacity = self.capacity, dict.fromkeys(self.capacity, 10**6)
        try:
            return super().launch(token, intent, wanted, count, at_s)
        finally:
            self.capacity = room


class DeadlineWorld(World):
    """Tells the core what fleets do, as the manager's market watch does."""

    rated: tuple[FleetTerms, FleetTerms | None] | None = None

    def __init__(self, seed: int, settings: JobSettings, cloud: Cloud) -> None:
        super().__init__(seed, settings, cloud)
        self.appraiser = OfferRanker()

    def poll(self, *, force: bool = False) -> None:
        super().poll(force=force)
        if not self.manager_alive or self.profile is None:
            return
        state, offers = self.state, self.cloud.offers()
        terms = terms_for(self.appraiser, state, offers)
        other = self.appraiser.fleet_terms(state, offers, CALM, elsewhere=True)
        if (terms, other) != self.rated or force:
            self.rated = terms, other
            self.feed(e.FleetRated(at_s=self.now_s, terms=terms, elsewhere=other))


def terms_for(appraiser: OfferRanker, state: State, offers: Sequence[Offer]) -> FleetTerms:
    appraiser.rank(state, offers, CALM)
    terms = appraiser.fleet_terms(state, offers, CALM)
    assert terms is not None
    return terms


@functools.cache
def fleet() -> Fleet:
    """What fleets do, before any was seen."""
    job = settings(spec=LONG, max_vms=MOST)
    state = changed(State(settings=job), profile=profile_of(job.facts))
    return terms_for(OfferRanker(), state, (offer("a", 1.0),)).fleet


def train_s() -> float:
    """How long the largest fleet trains, undisturbed."""
    return LONG.steps * LONG.minibatch_size / fleet().rates[-1]


def world(seed: int, left: float, **changes: Any) -> DeadlineWorld:
    """A job with ``left`` times the time that the largest fleet needs."""
    cloud = OpenCloud(capacity={"a": 4, "b": 4}, prices={"a": 1.0, "b": 1.2})
    changes = {"spec": LONG, "max_vms": MOST, "allow_on_demand": True, **changes}
    made = DeadlineWorld(seed, settings(**changes), cloud)
    deadline_s = made.now_s + 300.0 + left * train_s()
    made.settings = replace(made.settings, deadline_s=deadline_s)
    return made


def move_market(world: World, mean_s: float) -> None:
    """Let spot capacity and prices come and go, and VMs with them."""
    draw = world.random

    def strike() -> None:
        zone = draw.choice("ab")
        world.cloud.capacity[zone] = draw.choice([0, 0, 2, 4])
        world.cloud.prices[zone] = draw.uniform(0.6, 2.0)
        spot = [vm for vm in world.cloud.vms.values() if vm.alive and vm.offer.zone == zone]
        held = [vm for vm in spot if vm.offer.spot and not vm.doomed]
        for vm in held[world.cloud.capacity[zone] :]:
            strike_vm(world, draw.choice(["kill", "notice"]), vm.vm_id)
        world.after(draw.expovariate(1 / mean_s), strike)

    world.after(draw.expovariate(1 / mean_s), strike)


def usd(world: World, *, spot: bool) -> float:
    return sum(
        vm.offer.usd_per_hour * ((vm.ended_at_s or world.now_s) - vm.launched_at_s) / HOUR_S
        for vm in world.cloud.vms.values()
        if vm.offer.spot is spot
    )


@pytest.mark.parametrize("seed", first_always(range(4)))
def test_the_deadline_is_kept_whatever_the_spot_market_does(seed: int) -> None:
    job = world(seed, left=1.6)
    move_market(job, mean_s=0.1 * train_s())
    job.run(until_s=10 * train_s())
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
    assert job.now_s <= (job.settings.deadline_s or 0.0)
    assert job.minibatches_lost == 0


def test_while_spot_vms_are_there_none_is_rented_on_demand() -> None:
    job = world(0, left=2.0)
    job.run(until_s=10 * train_s())
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert usd(job, spot=False) == 0.0


@pytest.mark.rotated
def test_without_a_spot_market_it_waits_as_long_as_it_can_then_rents_on_demand() -> None:
    job = world(0, left=2.0)
    job.after(60.0, lambda: vanish(job))
    job.run(until_s=10 * train_s())
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert job.now_s <= (job.settings.deadline_s or 0.0)
    first_s = min(vm.launched_at_s for vm in job.cloud.vms.values() if not vm.offer.spot)
    assert first_s - 1_000_000.0 > 0.5 * train_s()


@pytest.mark.rotated
def test_where_spot_vms_cost_as_much_on_demand_vms_are_rented_at_once() -> None:
    job = world(0, left=2.0)
    job.cloud.prices = dict.fromkeys("ab", 1.1 * ON_DEMAND_USD_PER_HOUR)
    job.run(until_s=10 * train_s())
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert job.now_s <= 1_000_000.0 + 1.6 * train_s()


def vanish(job: World) -> None:
    job.cloud.capacity = {"a": 0, "b": 0}
    for vm in list(job.cloud.vms.values()):
        if vm.alive:
            job.end_vm(vm.vm_id)


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_a_cost_optimal_job_is_in_time_for_less_than_on_demand(seed: int) -> None:
    job = world(seed, left=2.0, objective="examples_per_dollar")
    move_market(job, mean_s=0.1 * train_s())
    job.run(until_s=10 * train_s())
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert job.now_s <= (job.settings.deadline_s or 0.0)
    alone = min(
        n * train_s() * fleet().rates[-1] / fleet().rates[n]
        for n in range(1, MOST + 1)
        if fleet().rates[n] > 0
    )
    assert usd(job, spot=True) + usd(job, spot=False) < (alone * ON_DEMAND_USD_PER_HOUR / HOUR_S)


@pytest.mark.rotated
@pytest.mark.parametrize("seed", first_always(range(2)))
def test_deadline_and_budget_are_kept_together(seed: int) -> None:
    alone_s = train_s() + reserve_s(SPEC.lease_s) + 60.0
    max_usd = 1.1 * alone_s * MOST * ON_DEMAND_USD_PER_HOUR / HOUR_S
    job = world(seed, left=1.3, max_usd=max_usd)
    move_market(job, mean_s=0.1 * train_s())
    job.run(until_s=10 * train_s())
    check_end(job)
    assert job.finished is not None
    assert job.finished.kind == "succeeded"
    assert job.now_s <= (job.settings.deadline_s or 0.0)
    assert job.cloud.bill_usd(job.now_s) <= max_usd
