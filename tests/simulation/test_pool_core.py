"""The pool's core against managers that lose messages, die and are slow, in virtual time."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from spottrain.pricing.sharing.allotment import POLICIES
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    HoldingsListed,
    HoldingsReported,
    JobRequest,
    JobRequested,
    Limits,
    PoolClosed,
    PoolEvent,
    PoolJobEnded,
    PoolJobPaused,
    PoolSettings,
    PoolStarted,
    PoolState,
    PoolTimerFired,
    Refuse,
    ReturnVms,
    SuppliesChanged,
    Supply,
    Team,
    Throughputs,
    Vms,
)
from spottrain.varuna_manager.pool.core.step import step

TICK_S = 20.0
LEAD_TICKS = 600
"""Faults happen until then; every job has to end afterwards."""


@dataclass
class SimulatedManager:
    """A job's manager: rents within the last grant that reached it, and trains."""

    request: JobRequest
    grant: Grant | None = None
    held: list[int] = field(default_factory=list)
    spent: float = 0.0
    """Micro-dollars."""
    done: float = 0.0
    is_alive: bool = True
    is_over: bool = False

    def obey(self, grant: Grant) -> None:
        """Follow a grant, unless it is an old one."""
        if self.grant is None or grant.serial >= self.grant.serial:
            self.grant, self.is_alive = grant, True
            self.held = list(map(min, self.held, grant.vms))

    def rents_one(self, chance: random.Random) -> None:
        """Rent one VM more, as clouds have them."""
        if self.grant is None or not self.is_alive or self.is_over:
            return
        for k, n in enumerate(self.grant.vms):
            if self.held[k] < n and chance.random() < 0.8:
                self.held[k] += 1

    def train(self, now_s: float, prices: list[int]) -> None:
        """Spend and train for a tick; VMs end by themselves with the grant."""
        cost = (
            sum(p * n for p, n in zip(prices, self.held, strict=True)) * TICK_S / 3600
        )
        grant = self.grant
        if (
            grant is None
            or now_s >= grant.until_s
            or self.spent + cost > grant.allowance
        ):
            self.held = [0] * len(self.held)
            return
        self.spent += cost
        if self.is_alive:
            rate = 0.0
            for table, n in zip(self.request.throughputs, self.held, strict=True):
                rate = max(rate, max((r for k, r in table if k <= n), default=0.0))
            self.done += rate * TICK_S


class World:
    """A pool, its jobs' managers and clouds."""

    def __init__(self, seed: int, settings: PoolSettings, vms: Vms) -> None:
        self.chance = random.Random(seed)
        self.supplies = tuple(
            Supply(name=f"k{k}", vms=n, microusd_per_hour=(k + 1) * 1_000_000)
            for k, n in enumerate(vms)
        )
        self.state = PoolState(settings=settings, supplies=self.supplies)
        self.managers: dict[str, SimulatedManager] = {}
        self.refused: list[str] = []
        self.lost = 0.0
        self.is_up = True
        self.now_s = 0.0
        self.under_way: list[Grant] = []

    def tell(self, event: PoolEvent) -> None:
        """Give the pool an event; what it commands happens now, late, or never."""
        if not self.is_up:
            return
        self.state, commands = step(self.state, event)
        for command in commands:
            match command:
                case Grant() if self.chance.random() >= self.lost:
                    self.under_way.append(command)
                case ReturnVms(job=name):
                    manager = self.managers[name]
                    manager.held = [0] * len(self.supplies)
                    manager.is_alive = False
                    listed = HoldingsListed(
                        at_s=self.now_s,
                        job=name,
                        held=tuple(manager.held),
                        spent=round(manager.spent),
                    )
                    self.tell(listed)
                case Refuse(job=name):
                    self.refused.append(name)
        self.check()

    def submit(self, request: JobRequest) -> None:
        self.managers.setdefault(
            request.name, SimulatedManager(request, held=[0] * len(self.supplies))
        )
        self.tell(JobRequested(at_s=self.now_s, request=request))

    def report(self, manager: SimulatedManager) -> None:
        if not manager.is_alive or manager.grant is None:
            return
        self.tell(
            HoldingsReported(
                at_s=self.now_s,
                job=manager.request.name,
                serial=manager.grant.serial,
                held=tuple(manager.held),
                spent=round(manager.spent),
                examples_done=manager.done,
            )
        )
        if manager.done >= manager.request.examples and not manager.is_over:
            manager.is_over = self.is_up
            manager.held = [0] * len(self.supplies)
            self.tell(PoolJobEnded(at_s=self.now_s, job=manager.request.name))

    def tick(self) -> None:
        """Let a tick pass."""
        self.now_s += TICK_S
        grants, self.under_way = self.under_way, []
        for grant in grants:
            manager = self.managers[grant.job]
            if grant.vms == (0,) * len(grant.vms) and not manager.is_alive:
                continue  # nobody is started to do nothing
            manager.obey(grant)
        prices = [supply.microusd_per_hour for supply in self.state.supplies]
        for manager in self.managers.values():
            manager.train(self.now_s, prices)
            manager.rents_one(self.chance)
            self.check()
            if self.chance.random() >= self.lost:
                self.report(manager)
        if self.state.timer_s <= self.now_s:
            self.tell(PoolTimerFired(at_s=self.now_s))

    def fault(self) -> None:
        """Let something go wrong, or change, now and then."""
        draw = self.chance.random()
        manager = self.chance.choice(list(self.managers.values()))
        if draw < 0.01:
            manager.is_alive = False
        elif draw < 0.03:
            self.is_up = False
        elif draw < 0.05:
            manager.held = [max(0, n - 1) for n in manager.held]
        elif draw < 0.07:
            dearer = tuple(
                replace(s, microusd_per_hour=self.chance.randint(500_000, 4_000_000))
                for s in self.state.supplies
            )
            self.tell(SuppliesChanged(at_s=self.now_s, supplies=dearer))
        elif draw < 0.08:
            self.pause(manager, self.chance.random() < 0.3)
        if not self.is_up and self.chance.random() < 0.1:
            self.start()

    def pause(self, manager: SimulatedManager, is_paused: bool) -> None:
        name = manager.request.name
        self.tell(PoolJobPaused(at_s=self.now_s, job=name, is_paused=is_paused))

    def start(self) -> None:
        self.is_up = True
        self.tell(PoolStarted(at_s=self.now_s))

    def check(self) -> None:
        """What is held and spent is within every cap, whatever the pool believes."""
        settings = self.state.settings
        held = {name: manager.held for name, manager in self.managers.items()}
        for k, supply in enumerate(self.supplies):
            assert sum(vms[k] for vms in held.values()) <= supply.vms
        groups = [(settings.limits, list(held))]
        for team, given in settings.teams.items():
            members = [n for n in held if self.managers[n].request.team == team]
            groups.append((given.limits, members))
        groups += [(self.managers[n].request.limits, [n]) for n in held]
        for limits, names in groups:
            assert sum(sum(held[n]) for n in names) <= limits.max_vms
            spent = sum(self.managers[n].spent for n in names)
            if settings.budget_per == "life":
                assert spent <= limits.max_microusd

    def is_done(self) -> bool:
        return all(manager.is_over for manager in self.managers.values())


def throughputs(chance: random.Random, kinds: int) -> Throughputs:
    smallest, largest = chance.choice([1, 1, 2]), chance.randint(2, 6)
    power = chance.choice([0.6, 0.9, 1.0])
    return tuple(
        tuple((n, (kinds - k) * n**power) for n in range(smallest, largest + 1))
        for k in range(kinds)
    )


def jobs(chance: random.Random, count: int, kinds: int) -> list[JobRequest]:
    return [
        JobRequest(
            name=f"j{m}",
            throughputs=throughputs(chance, kinds),
            examples=chance.uniform(500, 6000),
            team=chance.choice(["a", "b"]),
            weight=chance.choice([1.0, 5.0, 10.0]),
            limits=Limits(max_vms=chance.choice([3, 100])),
        )
        for m in range(count)
    ]


def settings(policy: str, **given: float) -> PoolSettings:
    teams = {"a": Team(weight=1), "b": Team(weight=2, limits=Limits(max_vms=5))}
    return PoolSettings(
        policy=policy,
        teams=teams,
        limits=Limits(max_vms=8, max_microusd=60_000_000_000),
        grant_s=1200.0,
        **given,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_caps_hold_and_every_job_ends_whatever_fails(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    world = World(seed, settings(policy), (6, 4))
    for request in jobs(chance, 5, 2):
        world.submit(request)
        for _ in range(chance.randint(0, 6)):
            world.tick()
    world.lost = 0.1
    for _ in range(150):
        world.fault()
        world.tick()
    world.lost = 0.0
    world.start()
    for manager in world.managers.values():
        world.pause(manager, False)
    for _ in range(LEAD_TICKS):
        if world.is_done():
            return
        world.tick()
    left = [n for n, m in world.managers.items() if not m.is_over]
    pytest.fail(f"{left} did not end: {world.state}")


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
        assert (
            max(waited.values()) <= 360.0 + 6 * TICK_S
        )  # a round, and clouds and messages
    trained = [manager.done for manager in world.managers.values()]
    assert min(trained) > 0.8 * max(trained)


@pytest.mark.parametrize("seed", range(2))
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
    assert world.state.jobs["first"].may_hold == (4,)
    assert world.state.jobs["urgent"].granted == (0,)


def test_what_cannot_be_promised_is_refused() -> None:
    world = World(3, PoolSettings(teams={"a": Team()}), (4,))
    world.submit(request("kept", examples=4 * 3000.0, deadline_s=3600.0))
    world.submit(request("late", examples=4 * 1000.0, deadline_s=3600.0))
    _, commands = step(
        world.state,
        JobRequested(
            at_s=0.0, request=request("late", examples=4000.0, deadline_s=3600.0)
        ),
    )
    [refusal] = [command for command in commands if isinstance(command, Refuse)]
    assert "deadline: got 1 h from now" in refusal.reason
    assert (found := re.search(r"the pool needs (\S+) h", refusal.reason))
    # All work takes 1.11 h; 2 % and three changes of size are kept in reserve.
    assert 4 / 3.6 < float(found[1]) < 4 / 3.6 * 1.05
    world.submit(request("kept"))
    world.submit(replace(request("stranger"), team="z"))
    world.submit(replace(request("large"), throughputs=(((9, 9.0),),)))
    assert world.refused == ["late", "kept", "stranger", "large"]


def test_a_closed_pool_returns_everything() -> None:
    world = World(4, PoolSettings(), (4,))
    world.submit(request("j", examples=1e6))
    for _ in range(6):
        world.tick()
    assert any(world.managers["j"].held)
    world.tell(PoolClosed(at_s=world.now_s))
    world.tick()
    assert not any(world.managers["j"].held)
    assert world.state.jobs["j"].may_hold == (0,)
