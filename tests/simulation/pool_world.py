"""A pool's core, and managers that lose messages, die and are slow, in virtual time.

``python -m tests.simulation.pool_world [SEEDS [FIRST]]`` runs so many stories under each policy.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spottrain.pricing.sharing.policies import POLICIES
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    HoldingsListed,
    HoldingsReported,
    JobRequest,
    JobRequested,
    Limits,
    Order,
    PoolEvent,
    PoolJob,
    PoolJobEnded,
    PoolJobPaused,
    PoolSettings,
    PoolStarted,
    PoolState,
    PoolTimerFired,
    Refuse,
    ReservedVm,
    ReturnVms,
    SuppliesChanged,
    Supply,
    Team,
    Throughputs,
    Vms,
)
from spottrain.varuna_manager.pool.core.step import step

IDLE_S = 600.0
"""For how long a job trains nothing that moves elsewhere."""
TICK_S = 20.0
FAIR = frozenset({"fair", "hierarchical"})
"""Policies whose shares are promised; those of others are aims, of queues before caps."""
ROUND_S = 360.0
BELOW_S = ROUND_S + 300.0
"""Of a job at most, with nothing failing: a round, and the silence after which a manager is dead."""
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
    is_ending: bool = False
    allowance: int = 0
    """Of the last grant with VMs; what is left of them costs a little more."""
    kept: dict[str, ReservedVm] = field(default_factory=dict)
    """Of ``held``: what it keeps for others."""
    kept_s: dict[str, float] = field(default_factory=dict)
    """Since when."""
    named: int = 0
    """VMs that it has kept."""
    unseen: set[str] = field(default_factory=set)
    """Of ``kept``: what others have taken, unknown to it."""
    asked: dict[str, Order] = field(default_factory=dict)
    """Orders that it has asked for, and no answer is known."""
    arrived: dict[str, Order] = field(default_factory=dict)
    """Of these: what the cloud has given to it, unknown to it."""
    taken: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    idle_asked_s: float = 0.0
    """For how long it would train nothing, to move elsewhere."""
    idles_until_s: float = 0.0
    moves: int = 0

    def move(self, now_s: float, chance: random.Random) -> None:
        """Ask now and then to train nothing for a while, and do so if the pool lets it."""
        if now_s < self.idles_until_s:
            return
        if self.idles_until_s:
            self.idles_until_s = self.idle_asked_s = 0.0
        elif not self.idle_asked_s:
            self.idle_asked_s = IDLE_S * (chance.random() < 0.05)
        elif self.grant is not None and self.grant.idle_s >= self.idle_asked_s:
            self.idles_until_s = now_s + self.idle_asked_s
            self.moves += 1

    def obey(self, grant: Grant, now_s: float) -> None:
        """Follow a grant, unless it is an old one."""
        if self.grant is None or grant.serial >= self.grant.serial:
            self.grant, self.is_alive = grant, True
            if any(grant.vms):
                self.allowance = grant.allowance
            for k, n in enumerate(grant.vms):
                self.leave(k, self.own(k) - n, now_s)

    def own(self, supply: int) -> int:
        """Return the VMs that it does not keep for others."""
        return self.held[supply] - sum(vm.supply == supply for vm in self.kept.values())

    def leave(self, supply: int, number: int, now_s: float) -> None:
        """Return VMs, or keep them for others."""
        assert self.grant is not None
        for _ in range(number):
            if not self.grant.reservation_s:
                self.held[supply] -= 1
                continue
            self.named += 1
            vm = ReservedVm(vm_id=f"{self.request.name}/{self.named}", supply=supply)
            self.kept[vm.vm_id], self.kept_s[vm.vm_id] = vm, now_s

    def drop(self, vm_id: str) -> None:
        """One that it kept is gone."""
        self.held[self.kept.pop(vm_id).supply] -= 1
        self.unseen.discard(vm_id)

    def end_all(self) -> None:
        """All its VMs are gone."""
        self.held = [0] * len(self.held)
        self.kept.clear()
        self.unseen.clear()
        for name in self.arrived:
            del self.asked[name]
            self.taken.add(name)
        self.arrived.clear()

    def physical(self) -> list[int]:
        """Return what clouds bill, whatever it knows."""
        held = list(self.held)
        for vm_id in self.unseen:
            held[self.kept[vm_id].supply] -= 1
        for order in self.arrived.values():
            held[order.supply] += 1
        return held

    def undecided(self, now_s: float) -> list[Order]:
        """Return the orders that it may take, or may have taken."""
        orders = () if self.grant is None else self.grant.orders
        known = self.taken | self.failed
        return [
            order
            for order in orders
            if order.name in self.asked or (order.name not in known and now_s <= order.until_s)
        ]

    def look(self, now_s: float, chance: random.Random) -> None:
        """Learn what the cloud has done, return what nobody takes, and ask for orders."""
        if not self.is_alive or self.grant is None:
            return
        for vm_id in tuple(self.kept):
            is_late = now_s >= self.kept_s[vm_id] + self.grant.reservation_s
            if is_late or (vm_id in self.unseen and chance.random() < 0.7):
                self.drop(vm_id)
        for name, order in tuple(self.arrived.items()):
            if chance.random() < 0.7:
                del self.arrived[name], self.asked[name]
                self.held[order.supply] += 1
                self.taken.add(name)
        if self.is_ending:
            for k in range(len(self.held)):
                self.leave(k, self.own(k), now_s)
            return
        for order in self.undecided(now_s):
            if chance.random() < 0.8:
                self.asked.setdefault(order.name, order)
        for k, n in enumerate(self.grant.vms):
            self.leave(k, self.own(k) - n, now_s)

    def rents_one(self, chance: random.Random) -> None:
        """Rent one VM more, as clouds have them."""
        if self.grant is None or not self.is_alive or self.is_over or self.is_ending:
            return
        for k, n in enumerate(self.grant.vms):
            places = sum(
                order.supply == k and order.name not in self.taken for order in self.grant.orders
            )
            if self.held[k] + places < n and chance.random() < 0.8:
                self.held[k] += 1

    def train(self, now_s: float, prices: list[int]) -> None:
        """Spend and train for a tick; VMs end by themselves with the grant."""
        cost = sum(p * n for p, n in zip(prices, self.physical(), strict=True)) * TICK_S / 3600
        grant = self.grant
        keeps = grant is not None and not any(grant.vms) and self.is_alive
        if (
            grant is None
            or (now_s >= grant.until_s and not keeps)
            or self.spent + cost > self.allowance
        ):
            self.end_all()
            return
        self.spent += cost
        if self.is_alive and not self.is_ending and now_s >= self.idles_until_s:
            rate = 0.0
            for m, table in enumerate(self.request.throughputs):
                n = self.own(m)
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
        self.moved = 0
        """VMs that went from one job to another."""

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
                    manager.end_all()
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
        if manager.grant is None:
            return
        if not manager.is_alive:
            if any(manager.held) or not manager.is_ending or manager.is_over:
                return
            manager.is_ending = False  # its journal says so
        self.tell(
            HoldingsReported(
                at_s=self.now_s,
                job=manager.request.name,
                serial=manager.grant.serial,
                held=tuple(manager.held),
                spent=round(manager.spent),
                examples_done=manager.done,
                kept=tuple(manager.kept.values()),
                taken=frozenset(manager.taken),
                open=frozenset(o.name for o in manager.undecided(self.now_s)),
                is_ending=manager.is_ending and not manager.is_over,
                idle_asked_s=manager.idle_asked_s,
            )
        )
        is_done = manager.done >= manager.request.examples and manager.is_alive
        if is_done and not manager.is_over:
            manager.is_ending = True
            if not any(manager.held) and not manager.asked:
                manager.is_over = self.is_up
                self.tell(PoolJobEnded(at_s=self.now_s, job=manager.request.name))

    def answer(self) -> None:
        """The cloud gives VMs to who asks for them in time, at once or later, and once."""
        for manager in self.managers.values():
            for name, order in tuple(manager.asked.items()):
                if name in manager.arrived or self.chance.random() < 0.2:
                    continue
                keeper = self.managers[order.by]
                is_there = order.vm_id in keeper.kept.keys() - keeper.unseen
                if is_there and self.now_s <= order.until_s:
                    keeper.unseen.add(order.vm_id)
                    manager.arrived[name] = order
                    self.moved += 1
                elif manager.is_alive:
                    del manager.asked[name]
                    manager.failed.add(name)
                self.check()

    def tick(self) -> None:
        """Let a tick pass."""
        self.now_s += TICK_S
        grants, self.under_way = self.under_way, []
        for grant in grants:
            manager = self.managers[grant.job]
            if grant.vms == (0,) * len(grant.vms) and not manager.is_alive:
                continue  # nobody is started to do nothing
            manager.obey(grant, self.now_s)
        prices = [supply.microusd_per_hour for supply in self.state.supplies]
        for manager in self.managers.values():
            manager.train(self.now_s, prices)
            manager.look(self.now_s, self.chance)
            manager.rents_one(self.chance)
            self.check()
            if self.chance.random() >= self.lost:
                self.report(manager)
        self.answer()
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
            for k, n in enumerate(manager.held):
                kept = [vm for vm in manager.kept.values() if vm.supply == k]
                if kept and len(kept) == n:
                    manager.drop(kept[0].vm_id)
                else:
                    manager.held[k] = max(0, n - 1)
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
        if manager.is_over or manager.is_ending:
            return  # what has succeeded is not resumed
        name = manager.request.name
        self.tell(PoolJobPaused(at_s=self.now_s, job=name, is_paused=is_paused))

    def start(self) -> None:
        self.is_up = True
        self.tell(PoolStarted(at_s=self.now_s))

    def check(self) -> None:
        """What is held and spent is within every cap, whatever the pool believes."""
        settings = self.state.settings
        held = {name: manager.physical() for name, manager in self.managers.items()}
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
            machine=chance.choice(["m", "m", "m", "n"]),
        )
        for m in range(count)
    ]


def settings(policy: str) -> PoolSettings:
    teams = {"a": Team(weight=1), "b": Team(weight=2, limits=Limits(max_vms=5))}
    return PoolSettings(
        policy=policy,
        teams=teams,
        limits=Limits(max_vms=8, max_microusd=60_000_000_000),
        grant_s=1200.0,
        reservation_s=5 * TICK_S,
        take_s=3 * TICK_S,
    )


def story(policy: str, seed: int) -> tuple[float, int]:
    """Let jobs arrive, let everything fail, and see every job end.

    Returns:
        For how long a job was below its share at most once nothing failed any more, seconds;
        VMs that went from one job to another.

    Raises:
        AssertionError: a cap is broken, a job does not end, or one is below a fair share for
            longer than ``BELOW_S``.
    """
    chance = random.Random(seed)
    world = World(seed, settings(policy), (6, 4))
    *early, a, b, c, d = jobs(chance, 9, 2)
    for request in early:
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
    for request in (a, b, c, d):
        world.submit(request)
    since_s = dict.fromkeys(world.managers, world.now_s)
    most_s = 0.0
    for _ in range(LEAD_TICKS):
        if world.is_done():
            return most_s, world.moved
        world.tick()
        active = {
            name: job for name, job in world.state.jobs.items() if not world.managers[name].is_over
        }
        are_below = below(active)
        for name in world.state.jobs:
            if name not in are_below:
                since_s[name] = world.now_s
            most_s = max(most_s, world.now_s - since_s[name])
            assert most_s <= BELOW_S or policy not in FAIR, f"{policy}, seed {seed}: {name}"
    left = [n for n, m in world.managers.items() if not m.is_over]
    raise AssertionError(f"{policy}, seed {seed}: {left} did not end: {world.state}")


def below(jobs: Mapping[str, PoolJob]) -> list[str]:
    """Return which jobs have less than their shares by more than a whole VM, now and so far.

    A job whose share is less than its smallest size takes turns with others of that sort: it
    waits rightly until its share has come to a whole turn, and while another one that had less
    than its share has its turn, or is further behind.

    Args:
        jobs: Those that take part.
    """
    have_less = [name for name, job in jobs.items() if _has_less(job)]
    if not have_less:
        return []
    turns = {name: _behind(job) for name, job in jobs.items() if _takes_turns(job)}
    furthest = max(turns.values(), default=0.0)
    is_turn = any(any(jobs[name].granted) and turns[name] > 1 for name in turns)
    return [
        name
        for name in have_less
        if name not in turns or (turns[name] >= furthest and _is_owed(jobs[name]) and not is_turn)
    ]


def _has_less(job: PoolJob) -> bool:
    if job.received_s >= job.entitled_s:
        return False
    a_vm = max(table[0][1] / table[0][0] for table in job.request.throughputs)
    return job.rate(job.granted) < job.target_rate - a_vm


def _takes_turns(job: PoolJob) -> bool:
    smallest = min(table[0][1] for table in job.request.throughputs)
    return job.target_rate < smallest


def _is_owed(job: PoolJob) -> bool:
    smallest = min(table[0][1] for table in job.request.throughputs)
    return job.entitled_s - job.received_s >= ROUND_S * smallest / job.best


def _behind(job: PoolJob) -> float:
    return job.entitled_s / job.received_s if job.received_s else math.inf


def main(arguments: Sequence[str]) -> None:
    seeds = int(arguments[0]) if arguments else 1000
    first = int(arguments[1]) if len(arguments) > 1 else 0
    for policy in POLICIES:
        begun_s = time.process_time()
        played = [story(policy, seed) for seed in range(first, first + seeds)]
        most_s = max(below_s for below_s, _ in played)
        moved = sum(number for _, number in played)
        print(
            f"{policy:<22} {seeds} stories: caps held, every job ended, {moved} VMs given "
            f"on, at most {most_s:4.0f} s below its share, {time.process_time() - begun_s:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
