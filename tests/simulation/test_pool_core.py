"""The pool's core against managers that lose messages, die and are slow, in virtual time."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.pool_world import IDLE_S, TICK_S, World, story
from tests.tiers import first_always

from spottrain.cloud.port import provider as port
from spottrain.pricing.sharing.policies import POLICIES
from spottrain.varuna_manager.pool.core.model import (
    RECEIVE_S,
    Grant,
    HoldingsReported,
    JobRequest,
    JobRequested,
    Limits,
    PoolClosed,
    PoolEvent,
    PoolJobPaused,
    PoolSettings,
    PoolState,
    Refuse,
    ReservedVm,
    Supply,
    Team,
)
from spottrain.varuna_manager.pool.core.step import step


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", first_always(range(2)))
def test_caps_hold_and_every_job_ends_whatever_fails(policy: str, seed: int) -> None:
    story(policy, seed)


def request(name: str, weight: float = 1.0, **given: Any) -> JobRequest:
    table = tuple((n, float(n)) for n in range(1, 5))
    defaults: dict[str, Any] = {"examples": 2000.0, **given}
    return JobRequest(name=name, throughputs=(table,), weight=weight, **defaults)


def test_others_grow_only_once_shrinking_is_acknowledged() -> None:
    world = World(0, PoolSettings(policy="priority"), (4,))
    world.submit(request("first"))
    for _ in range(12):
        world.tick()
    assert world.state.jobs["first"].held == (4,)
    world.submit(request("urgent", weight=3.0))
    assert world.state.jobs["first"].granted == (1,)
    assert world.state.jobs["urgent"].granted == (0,)
    world.tick()
    assert world.state.jobs["urgent"].granted == (3,)


def test_jobs_that_do_not_fit_together_take_turns() -> None:
    world = World(1, PoolSettings(), (2,))
    for m in range(4):
        world.submit(request(f"j{m}", examples=1e6))
    waited = dict.fromkeys(world.managers, 0.0)
    for _ in range(400):
        world.tick()
        for name, manager in world.managers.items():
            waited[name] = 0.0 if any(manager.held) else waited[name] + TICK_S
        assert max(waited.values()) <= 360.0 + 6 * TICK_S  # a round, and clouds and messages
    trained = [manager.done for manager in world.managers.values()]
    assert min(trained) > 0.8 * max(trained)


@pytest.mark.parametrize("seed", first_always(range(2)))
def test_a_pool_without_money_stops_at_its_cap(seed: int) -> None:
    capped = PoolSettings(limits=Limits(max_microusd=9_000_000), grant_s=3600.0)
    world = World(seed, capped, (4,))
    for m in range(3):
        world.submit(request(f"j{m}", examples=25_000.0))
        for _ in range(world.chance.randint(1, 90)):
            world.tick()
    world.lost = 0.3
    for _ in range(600):
        world.tick()
    spent = sum(manager.spent for manager in world.managers.values())
    assert 8_000_000 < spent <= 9_000_000


def test_a_monthly_budget_begins_anew_with_the_month() -> None:
    february_s = 31 * 24 * 3600.0  # of 1970
    monthly = PoolSettings(
        limits=Limits(max_microusd=4_000_000), budget_per="month", grant_s=1200.0
    )
    world = World(1, monthly, (4,))
    world.now_s = february_s - 7200
    world.submit(request("j", examples=1e9))
    spent = []
    for _ in range(3):
        for _ in range(360):  # two hours, of which the money lasts for one
            world.tick()
        spent.append(world.managers["j"].spent)
    assert 3_900_000 < spent[0] <= 4_000_000
    assert 7_800_000 < spent[1] <= 8_000_000
    assert spent[2] == spent[1]


def test_a_report_from_before_a_grant_frees_nothing() -> None:
    world = World(5, PoolSettings(policy="priority"), (4,))
    world.submit(request("first"))
    world.tick()  # it is told of four VMs, and has rented none or one
    world.submit(request("urgent", weight=3.0))
    [first] = [m for n, m in world.managers.items() if n == "first"]
    world.report(first)  # of the first grant
    assert world.state.jobs["first"].held_upper_bound == (4,)
    assert world.state.jobs["urgent"].granted == (0,)


def test_what_cannot_be_promised_is_refused() -> None:
    world = World(3, PoolSettings(teams={"a": Team()}), (4,))
    world.submit(request("kept", examples=4 * 3000.0, deadline_s=3600.0))
    world.submit(request("late", examples=4 * 1000.0, deadline_s=3600.0))
    _, commands = step(
        world.state,
        JobRequested(at_s=0.0, request=request("late", examples=4000.0, deadline_s=3600.0)),
    )
    [refusal] = [command for command in commands if isinstance(command, Refuse)]
    assert "deadline: got 1 h 00 min from now" in refusal.reason
    assert (found := re.search(r"the pool needs 1 h (\S+) min;", refusal.reason))
    # All work takes 4,000 s; 2 % and three changes of size are kept in reserve.
    assert 4000.0 < 3600.0 + 60.0 * int(found[1]) < 4000.0 * 1.06
    world.submit(request("kept"))
    world.submit(replace(request("stranger"), team="z"))
    world.submit(replace(request("large"), throughputs=(((9, 9.0),),)))
    assert world.refused == ["late", "kept", "stranger", "large"]


@pytest.mark.parametrize("seed", first_always(range(6)))
@pytest.mark.parametrize("policy", first_always(["fair", "cheapest"]))
def test_promised_deadlines_are_kept_whoever_asks_to_move(policy: str, seed: int) -> None:
    world = World(seed, PoolSettings(policy=policy), (4,))
    draw = world.chance
    deadlines_s = {f"j{n}": draw.choice([2000.0, 4000.0, 6000.0, 9000.0]) for n in range(6)}
    for name, deadline_s in deadlines_s.items():
        examples = draw.choice([1000.0, 2000.0, 4000.0])
        # A message, a VM returned and one rented: so much does a change of size take here.
        asked = request(name, examples=examples, deadline_s=deadline_s, morph_s=3 * TICK_S)
        world.submit(asked)
    world.submit(request("free", examples=8000.0))
    ended_s: dict[str, float] = {}
    while len(ended_s) < len(world.state.jobs):
        world.tick()
        for name, manager in world.managers.items():
            if manager.is_over:
                ended_s.setdefault(name, world.now_s)
            else:
                manager.move(world.now_s, world.chance)
    promised = world.state.jobs.keys() & deadlines_s.keys()
    assert {name for name in promised if ended_s[name] > deadlines_s[name]} == set()
    assert world.managers["free"].moves > 0, "its time is its own"


@pytest.mark.parametrize(("work_s", "may"), [(2400.0, True), (3300.0, False)])
def test_a_job_may_stand_still_for_what_its_deadline_leaves(work_s: float, may: bool) -> None:
    world = World(0, PoolSettings(), (4,))
    world.submit(request("j", examples=4 * work_s, deadline_s=3600.0))
    for _ in range(3):
        world.tick()
    world.managers["j"].idle_asked_s = IDLE_S
    world.report(world.managers["j"])
    assert world.state.jobs["j"].idle_s == IDLE_S * may
    assert any(grant.idle_s for grant in world.under_way) is may
    world.managers["j"].idle_asked_s = 0.0
    world.report(world.managers["j"])
    assert world.state.jobs["j"].idle_s == 0.0


def test_a_closed_pool_returns_everything() -> None:
    world = World(4, PoolSettings(), (4,))
    world.submit(request("j", examples=1e6))
    for _ in range(6):
        world.tick()
    assert any(world.managers["j"].held)
    world.tell(PoolClosed(at_s=world.now_s))
    world.tick()
    assert not any(world.managers["j"].held)
    assert world.state.jobs["j"].held_upper_bound == (0,)


class Desk:
    """A pool of four VMs: ``first`` has them all, and ``other`` is to have three."""

    def __init__(self, machine: str = "m") -> None:
        supply = Supply(name="k", vms=4, microusd_per_hour=1_000_000)
        self.state = PoolState(settings=PoolSettings(policy="priority"), supplies=(supply,))
        self.granted: dict[str, Grant] = {}
        self.submit(request("first", examples=1e9, machine="m"))
        self.report("first", 4)
        self.submit(request("other", weight=3.0, examples=1e9, machine=machine))
        assert self.granted["first"].vms == (1,)
        assert "other" not in self.granted

    def submit(self, wanted: JobRequest) -> None:
        self.follow(JobRequested(at_s=self.state.now_s, request=wanted))

    def follow(self, event: PoolEvent) -> None:
        self.state, commands = step(self.state, event)
        self.granted |= {one.job: one for one in commands if isinstance(one, Grant)}

    def report(self, job: str, held: int, *kept: str, **fields: Any) -> None:
        """A job follows its last grant, unless it says otherwise."""
        self.follow(
            HoldingsReported(
                at_s=self.state.now_s + 1.0,
                job=job,
                held=(held,),
                spent=0,
                examples_done=0.0,
                kept=tuple(ReservedVm(vm_id=vm_id, supply=0) for vm_id in kept),
                **{"serial": self.granted[job].serial, **fields},
            )
        )


def test_a_vm_that_is_kept_goes_to_who_has_use_for_it_and_is_counted_once() -> None:
    desk = Desk()
    assert desk.granted["first"].reservation_s > 0
    desk.report("first", 4, "a")
    told = desk.granted["other"]
    (order,) = told.orders
    assert (order.vm_id, order.by, told.vms) == ("a", "first", (1,))
    asks_for_s = order.until_s - desk.state.now_s
    assert desk.granted["first"].reservation_s >= asks_for_s, "the other's manager has yet to start"
    # Two VMs more are the giver's yet, and this one is until it is taken.
    desk.report("other", 0, open=frozenset({order.name}))
    assert desk.granted["other"] == told
    desk.report("other", 1, taken=frozenset({order.name}))
    assert desk.state.jobs["first"].held == (3,), "it need not have heard"
    assert desk.granted["other"] == told
    desk.report("first", 4, "a", "b")
    assert desk.state.jobs["first"].held == (3,), "as long as it names that VM"
    (order,) = desk.granted["other"].orders
    assert (order.vm_id, desk.granted["other"].vms) == ("b", (2,))


def test_the_place_of_an_order_that_fails_is_nobodys() -> None:
    desk = Desk()
    desk.report("first", 4, "a")
    desk.report("other", 0)
    other = desk.state.jobs["other"]
    assert not other.orders
    assert other.granted == (0,)
    assert other.refused == {"a"}
    desk.report("first", 4, "a")
    assert desk.state.jobs["other"].granted == (0,), "it is kept, and returned yet"
    desk.report("first", 3)
    assert desk.state.jobs["other"].granted == (1,)


def test_a_job_that_may_have_grown_again_gives_nothing() -> None:
    desk = Desk()
    shrunk = desk.granted["first"].serial
    for is_paused, vms in ((True, (4,)), (False, (1,))):
        paused = PoolJobPaused(at_s=100.0, job="other", is_paused=is_paused)
        desk.follow(paused)
        assert desk.granted["first"].vms == vms
    desk.report("first", 4, "a", serial=shrunk)
    assert "other" not in desk.granted, "it may rent one again once this one is gone"
    desk.report("first", 4, "a")
    assert len(desk.granted["other"].orders) == 1


def test_vms_of_another_sort_are_not_given() -> None:
    desk = Desk(machine="n")
    assert desk.granted["first"].reservation_s == 0.0
    desk.report("first", 4, "a")
    assert "other" not in desk.granted
    desk.report("first", 3)
    assert desk.granted["other"].vms == (1,)


def test_clouds_and_the_pool_agree_how_late_a_vm_may_come() -> None:
    assert RECEIVE_S == port.RECEIVE_S
