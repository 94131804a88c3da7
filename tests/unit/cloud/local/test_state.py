from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from tests.builders import a_launch

from spottrain.cloud.local.market import EventKind, MarketEvent, MarketSpec, ZoneSpec
from spottrain.cloud.local.state import LocalCloud, LocalSettings
from spottrain.cloud.port.errors import CloudError, NoCapacityError, VmNotFoundError
from spottrain.cloud.port.provider import LaunchResult, VmState

ZONE = ZoneSpec(
    name="a",
    capacity=3,
    slot_memory_bytes=10**9,
    spot_usd_per_hour=1.0,
    on_demand_usd_per_hour=3.0,
)
SETTINGS = LocalSettings(
    job="job",
    market=MarketSpec(zones=(ZONE, replace(ZONE, name="b", boot_s=5.0))),
    idle_s=10,
)


class Driver:
    """A cloud whose VM ids count up."""

    def __init__(self) -> None:
        self.cloud = LocalCloud(SETTINGS)
        self.ids = (f"vm-{i}" for i in itertools.count())

    def launch(
        self, count: int = 1, *, token: str = "t", zone: str = "a", spot: bool = True
    ) -> LaunchResult:
        offer = next(o for o in self.cloud.offers(0) if (o.zone, o.spot) == (zone, spot))
        request = a_launch(offer, count, token=token, intent="i", lease_s=9)
        return self.cloud.launch(request, 100.0, lambda: next(self.ids))

    def available(self, zone: str = "a") -> int | None:
        return next(o.available for o in self.cloud.offers(0) if o.zone == zone)

    def apply(self, kind: EventKind, **fields: Any) -> tuple[str, ...]:
        return self.cloud.apply(MarketEvent(at_s=0, kind=kind, **fields), 200.0)


def test_a_token_that_met_no_capacity_can_be_used_again() -> None:
    driver = Driver()
    driver.launch(3, token="first")
    with pytest.raises(NoCapacityError, match="zone a"):
        driver.launch(1, token="second")
    driver.cloud.ended("vm-0", 150.0)
    assert len(driver.launch(1, token="second").vms) == 1


def test_a_request_for_an_unknown_offer_is_refused() -> None:
    driver = Driver()
    offer = replace(driver.cloud.offers(0)[0], zone="moon")
    request = a_launch(offer, token="t", intent="i", lease_s=9)
    for wrong in (
        request,
        replace(request, offer=driver.cloud.offers(0)[0], count=0),
        replace(request, offer=driver.cloud.offers(0)[0], job="other"),
    ):
        with pytest.raises(CloudError):
            driver.cloud.launch(wrong, 0, lambda: "vm")


def test_a_machine_is_rented_at_the_current_price_and_keeps_it() -> None:
    driver = Driver()
    driver.apply("price", zone="a", usd_per_hour=2.0)
    (vm,) = driver.launch().vms
    driver.apply("price", zone="a", usd_per_hour=0.5)
    assert driver.cloud.vms[vm.vm_id].offer.usd_per_hour == 2.0
    assert driver.cloud.offers(0)[0].usd_per_hour == 0.5
    assert driver.cloud.offers(0)[1].usd_per_hour == 3.0


@pytest.mark.parametrize("kind", ["notice", "kill", "silence"])
def test_taking_a_vm_back_lowers_the_capacity(kind: EventKind) -> None:
    driver = Driver()
    driver.launch(2)
    (victim,) = driver.apply(kind, zone="a")
    assert driver.available() == 1
    driver.cloud.ended(victim, 300.0)
    assert driver.available() == 1
    driver.cloud.restore_capacity(victim)
    assert driver.available() == 2
    driver.apply("capacity", zone="a", count=6)
    assert driver.available() == 5


def test_capacity_below_the_rented_vms_ends_no_vm() -> None:
    driver = Driver()
    driver.launch(3)
    driver.apply("capacity", zone="a", count=1)
    assert driver.available() == 0
    assert len(driver.cloud.alive) == 3


def test_a_slow_vm_keeps_its_capacity_and_is_not_slowed_down_twice() -> None:
    driver = Driver()
    driver.launch(2)
    (first,) = driver.apply("slow", factor=2.0, machine=0)
    assert first == "vm-0"
    assert driver.apply("slow", factor=3.0, count=2) == ("vm-1",)
    assert driver.available() == 1
    assert sorted(driver.apply("kill", count=2)) == ["vm-0", "vm-1"]


def test_on_demand_vms_are_never_taken_away() -> None:
    driver = Driver()
    driver.launch(2, spot=False)
    (spot,) = driver.launch(1, token="spot").vms
    assert driver.apply("kill", count=3) == (spot.vm_id,)


def test_no_vm_is_hit_twice_or_while_booting() -> None:
    driver = Driver()
    driver.launch(2)
    (booting,) = driver.launch(1, token="b", zone="b").vms
    hit = driver.apply("notice", lead_s=5) + driver.apply("kill", count=9)
    assert sorted(hit) == ["vm-0", "vm-1"]
    driver.cloud.booted(booting.vm_id)
    assert driver.apply("kill", count=9) == (booting.vm_id,)


def test_a_hazard_hits_its_machine_or_none() -> None:
    driver = Driver()
    driver.launch(2)
    assert driver.apply("kill", zone="a", machine=2) == ()
    assert driver.available() == 1
    assert driver.apply("kill", zone="a", machine=1) == ("vm-1",)


def test_the_seed_chooses_the_victims() -> None:
    def victims(seed: int) -> list[tuple[str, ...]]:
        driver = Driver()
        market = replace(SETTINGS.market, seed=seed)
        driver.cloud = LocalCloud(replace(SETTINGS, market=market))
        driver.launch(3)
        return [driver.apply("notice", zone="a") for _ in range(3)]

    assert victims(1) == victims(1)
    assert len({tuple(victims(seed)) for seed in range(20)}) > 1


def test_an_ended_vm_is_not_found() -> None:
    driver = Driver()
    driver.launch()
    driver.cloud.ended("vm-0", 300.0)
    for vm_id in ("vm-0", "vm-9"):
        with pytest.raises(VmNotFoundError, match=vm_id):
            driver.cloud.vm(vm_id)


def test_an_event_for_an_unknown_zone_is_refused() -> None:
    with pytest.raises(CloudError, match="moon"):
        Driver().apply("kill", zone="moon")


class Market(RuleBasedStateMachine):
    """Any history of launches, ends and market events."""

    tokens = Bundle("tokens")

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.results: dict[str, tuple[str, ...]] = {}
        self.taken: set[str] = set()

    @rule(
        target=tokens,
        token=st.uuids().map(str),
        count=st.integers(1, 4),
        zone=st.sampled_from("ab"),
        spot=st.booleans(),
    )
    def launch(self, token: str, count: int, zone: str, spot: bool) -> str:
        free = (self.driver.available(zone) or 0) if spot else count
        try:
            result = self.driver.launch(count, token=token, zone=zone, spot=spot)
        except NoCapacityError:
            assert free == 0
            return token
        assert len(result.vms) == min(count, free)
        self.results[token] = tuple(vm.vm_id for vm in result.vms)
        return token

    @rule(token=tokens)
    def launch_again(self, token: str) -> None:
        if token in self.results:
            before = set(self.driver.cloud.vms)
            again = self.driver.launch(4, token=token)
            assert tuple(vm.vm_id for vm in again.vms) == self.results[token]
            assert set(self.driver.cloud.vms) == before

    @rule(number=st.integers(0, 20))
    def boot(self, number: int) -> None:
        for vm_id in list(self.driver.cloud.vms)[number : number + 1]:
            self.driver.cloud.booted(vm_id)

    @rule(number=st.integers(0, 20))
    def end(self, number: int) -> None:
        for vm_id in self.driver.cloud.alive[number : number + 1]:
            self.driver.cloud.ended(vm_id, 300.0)

    @rule(zone=st.sampled_from("ab"), count=st.integers(0, 6))
    def change_capacity(self, zone: str, count: int) -> None:
        assert self.driver.apply("capacity", zone=zone, count=count) == ()

    @rule(
        kind=st.sampled_from(sorted({*get_args(EventKind)} - {"capacity", "price", "slow"})),
        zone=st.sampled_from([None, "a", "b"]),
        count=st.integers(0, 4),
    )
    def strike(self, kind: EventKind, zone: str | None, count: int) -> None:
        candidates = {
            vm.vm_id
            for vm in self.driver.cloud.vms.values()
            if vm.offer.spot and vm.state == VmState.RUNNING and zone in (None, vm.offer.zone)
        } - self.taken
        victims = self.driver.apply(kind, zone=zone, count=count)
        assert len(set(victims)) == len(victims) == min(count, len(candidates))
        assert set(victims) <= candidates
        self.taken |= set(victims)

    @invariant()
    def nothing_is_rented_that_is_not_there(self) -> None:
        assert all((offer.available or 0) >= 0 for offer in self.driver.cloud.offers(0))


TestMarket = Market.TestCase


def test_a_cleared_vm_is_given_once_in_time_and_comes_once() -> None:
    giver, taker = Driver(), Driver()
    vm_id = giver.launch().vms[0].vm_id
    with pytest.raises(VmNotFoundError, match="not there for others"):
        giver.cloud.give(vm_id, "job 1", 200.0, 150.0)
    giver.cloud.cleared.add(vm_id)
    with pytest.raises(VmNotFoundError, match=vm_id):
        giver.cloud.give(vm_id, "job 1", 200.0, 200.5)
    given = giver.cloud.give(vm_id, "job 1", 200.0, 150.0)
    assert giver.cloud.give(vm_id, "job 1", 200.0, 999.0) == given, "asked again"
    with pytest.raises(VmNotFoundError):
        giver.cloud.give(vm_id, "other 1", 200.0, 150.0)
    assert (given.state, given.ended_at_s) == (VmState.TERMINATED, 150.0)

    ours = taker.cloud.receive(given, "1", 230.0, 220.0)
    assert taker.cloud.receive(given, "1", 230.0, 999.0) == ours
    assert (ours.vm_id, ours.launched_at_s) == (f"{vm_id}.1", 150.0)
    assert (ours.offer, ours.state) == (given.offer, VmState.RUNNING)
    assert taker.available() == 2
    back = replace(ours, state=VmState.TERMINATED, ended_at_s=300.0)
    assert giver.cloud.receive(back, "2", 350.0, 301.0).vm_id == f"{vm_id}.2"


def test_a_vm_that_comes_late_or_where_no_room_is_has_ended() -> None:
    giver, taker = Driver(), Driver()
    vm_id = giver.launch().vms[0].vm_id
    giver.cloud.cleared.add(vm_id)
    given = giver.cloud.give(vm_id, "job 1", 200.0, 150.0)
    with pytest.raises(VmNotFoundError, match="came too late"):
        taker.cloud.receive(given, "1", 230.0, 231.0)
    taker.launch(3)
    with pytest.raises(VmNotFoundError, match="no room"):
        taker.cloud.receive(given, "1", 230.0, 160.0)
    elsewhere = replace(given, offer=replace(given.offer, zone="z"))
    with pytest.raises(VmNotFoundError, match="no room"):
        taker.cloud.receive(elsewhere, "1", 230.0, 160.0)
