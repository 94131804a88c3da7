"""A pool's core and the cores of its jobs together, in virtual time.

``python -m tests.simulation.pool_jobs --seeds 100`` plays so many stories of each policy.
Both cores, and what lies between them in the pool's process (``JobManagers``), are the
product's; clouds, workers and processes are simulated. In each story pool and managers crash
between an event and what follows from it, messages are lost with them, VMs are lost, silent,
slow or never come up, launches are not answered, people stop jobs, prices move, and the pool's measurements of jobs
change. Then nothing fails any more, further jobs arrive, and every one has to end.

Whenever a cloud gives a VM, what is *held* there is compared with the caps of pool, team and
job; so is what it bills.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.simulation.long_run import FAULT_OF, SHOWN_S, LongWorld
from tests.simulation.market import GIB, Cloud, SimulatedVm, offer
from tests.simulation.pool_world import BELOW_S, FAIR, ROUND_S, below
from tests.simulation.test_simulation import FACTS, SPEC
from tests.simulation.workers import profile_of
from tests.view import settings_with

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import RECEIVE_S, Offer, Vm
from spottrain.cloud.port.tags import ordered
from spottrain.morphing.plan.choose import Choice, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.pricing.sharing.policies import POLICIES
from spottrain.units import HOUR_S
from spottrain.varuna_manager.config.pool import parse_pool
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.errors import InternalError
from spottrain.varuna_manager.core.model.settings import JobSettings, PoolGrant, VmOrder
from spottrain.varuna_manager.core.model.state import State, kind_of
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.offers.fleets import JobThroughputs, growing
from spottrain.varuna_manager.pool.core.model import (
    Grant,
    JobRequest,
    JobRequested,
    Limits,
    PoolEvent,
    PoolJobPaused,
    PoolJobPhase,
    PoolStarted,
    PoolState,
    PoolTimerFired,
    Refuse,
    ReturnVms,
    SuppliesChanged,
    Supply,
    Throughputs,
)
from spottrain.varuna_manager.pool.core.step import step
from spottrain.varuna_manager.pool.daemon.managers import JobManagers, WatchedJob
from spottrain.varuna_manager.pool.store.settings import settings_of
from spottrain.wire.model import ModelFacts
from spottrain.wire.plan import Slot

TICK_S = 2.0
"""Time between two looks of the pool at its jobs."""
POLL_S = 30.0
"""Time between two looks of managers at offers."""
FAULTY_S = 2700.0
FAULT_S = 60.0
"""Mean time between two faults, of all jobs and the pool."""
CALM_S = 12 * HOUR_S
"""Every job has to end by then."""
ZONES = {"a": ("box", 6, 1.0), "b": ("crate", 4, 1.5)}
"""Instance type, VMs and USD per hour."""
MAX_VMS = 8
TEAM_VMS = 5
SHORT_S = BELOW_S + ROUND_S
"""Of a job below its share at most, with nothing failing and money for all: a round until it
is due, the silence of a dead manager, and a round for which others keep what they have got."""
POOL_USD = 1000.0
SHORT_USD = 12.0
"""Of pools whose money is used up before their jobs end."""
TEAM_SHARE = 0.6

SMALL = replace(
    FACTS,
    fingerprint="small",
    num_parameters=1_000_000,
    sections=tuple(
        replace(section, param_bytes=1 << 26, optimizer_bytes=1 << 27) for section in FACTS.sections
    ),
)
"""Fits one VM; ``FACTS`` needs four."""


@functools.cache
def chosen(inputs: PlanInputs) -> Choice:
    """Return the plan for a fleet whose VMs are ``0``, ``1``, …"""
    return choose_plan(inputs)


@functools.cache
def rates(facts: ModelFacts, max_vms: int) -> tuple[tuple[int, float], ...]:
    """Return what a job trains on fleets of one kind, as planned for."""
    found = [0.0]
    for n in range(1, max_vms + 1):
        plan = chosen(
            PlanInputs(
                facts=facts,
                profile=profile_of(facts),
                slots=tuple(map(device, range(n))),
                minibatch_size=SPEC.minibatch_size,
                microbatch_size=1,
                reduction=SPEC.reduction,
            )
        ).plan
        found.append(SPEC.minibatch_size / plan.predicted_step_s if plan else 0.0)
    return growing(found, 1)


def device(number: int) -> Device:
    """Return the only slot of a VM."""
    slot = Slot(vm_id=f"{number:03}", index=0)
    return Device(slot=slot, memory_bytes=4 * GIB, speed=1.0, usd_per_hour=1.0)


class JobCloud(Cloud):
    """What one job has rented of the pool's clouds.

    Args:
        lab: Whose clouds they are.
    """

    def __init__(self, lab: Lab, job: str) -> None:
        super().__init__(lab.capacity, lab.prices, prefix=f"{job}.")
        self.lab = lab

    def free(self, zone: str) -> int:
        held = sum(vm.offer.zone == zone for vm in self.lab.rented())
        return max(0, self.capacity[zone] - held)

    def offers(self) -> tuple[Offer, ...]:
        return tuple(
            replace(
                offer(zone, self.prices[zone]),
                instance_type=ZONES[zone][0],
                available=self.free(zone),
            )
            for zone in self.capacity
        )

    def launch(self, token: str, intent: str, wanted: Offer, count: int, at_s: float) -> list[Vm]:
        given = super().launch(token, intent, wanted, count, at_s)
        self.lab.check_held()
        return given


class PooledJob(LongWorld):
    """A job of a pool, which starts its manager.

    Args:
        lab: The pool.
        seed: Of all that happens to it.
        request: As the pool was asked to take it.
        settings: Of its own core.
    """

    def __init__(self, lab: Lab, seed: int, request: JobRequest, settings: JobSettings) -> None:
        super().__init__(seed, settings.resources.max_vms, hours=1.0, fault_h=1.0)
        self.lab, self.request, self.settings = lab, request, settings
        self.cloud: Cloud = JobCloud(lab, request.name)
        self.agenda, self.numbers, self.now_s = lab.agenda, lab.numbers, lab.now_s
        self.seen: set[str] = set()
        """VMs of which a cloud has told this job that they have ended."""
        self.forgotten: set[str] = set()
        """Those of which none has, as no manager ran: their entries end when they are missed."""
        self.feed(e.JobSubmitted(at_s=self.now_s, settings=settings))

    def fold(self, event: e.Event) -> tuple[c.Command, ...]:
        if isinstance(event, (e.VmsListed, e.VmsReturned)):
            self.seen |= {vm.vm_id for vm in event.vms if vm.ended_at_s is not None}
        return super().fold(event)

    def end_vm(self, vm_id: str) -> None:
        is_first = self.cloud.vms[vm_id].ended_at_s is None
        super().end_vm(vm_id)
        if is_first:
            self.after(SHOWN_S, lambda: self.forget(vm_id))

    def forget(self, vm_id: str) -> None:
        """A list shows a VM no longer that has ended."""
        if vm_id not in self.seen:
            assert not self.manager_alive, f"{vm_id} is gone, and nobody has looked"
            self.forgotten.add(vm_id)

    def check_bill(self) -> None:
        """Nothing is rented, and what was is in the ledger as it was billed."""
        for vm_id, vm in self.cloud.vms.items():
            assert vm.ended_at_s is not None, f"{vm_id} is left"
            hours = (vm.ended_at_s - vm.launched_at_s) / HOUR_S
            line = self.ledger.closed[vm_id]
            more = line.cost(0).microusd - 1e6 * hours * vm.offer.usd_per_hour
            assert more >= -1.0, f"{vm_id} is billed more than the ledger says"
            # To the micro-dollar, which is rounded up, as are moments.
            assert more <= 2.0 or vm_id in self.forgotten, f"{vm_id}: {more}"

    def keep(self, vm_id: str) -> None:
        """Remove all of the job from a VM; a cloud that cannot do that returns it."""
        vm = self.cloud.vms[vm_id]
        if vm.ended_at_s is not None:
            self.later(lambda: e.VmLost(at_s=self.now_s, vm_id=vm_id, reason="gone"))
        elif vm.frozen or self.random.random() < 0.1:
            self.later(
                lambda: e.CommandFailed(
                    at_s=self.now_s, command="reserve_vm", vm_ids=(vm_id,), reason="no"
                )
            )
        elif self.random.random() < 0.05:
            self.terminate((vm_id,))
        else:
            self.workers.catch_up()
            vm.kept = True
            vm.memory.clear()
            self.workers.vm_gone(vm)
            self.later(lambda: e.VmReserved(at_s=self.now_s, vm_id=vm_id))

    def take(self, order: VmOrder) -> None:
        """The cloud gives a VM once, and in time; some answers are lost."""
        fate = self.random.random()
        vm = self.lab.handed_over(self, order) if fate > 0.05 else None
        if fate < 0.15:
            failed = e.CommandFailed(
                at_s=self.now_s, command="take_vm", vm_ids=(order.name,), reason="no"
            )
            self.later(lambda: replace(failed, at_s=self.now_s))
            return
        listed = None if vm is None else vm.listed()
        answer = e.OrderAnswered(at_s=0.0, order=order.name, vm=listed)
        self.later(lambda: replace(answer, at_s=self.now_s))

    def feed_queue(self) -> None:
        """Journal at least: no manager may be there."""
        if self.manager_alive:
            super().feed_queue()
            return
        while self.queue:
            self.fold(self.queue.popleft())

    def kill_manager(self, down_s: float) -> None:
        """The pool finds that out, and starts another one."""
        self.manager_alive = False
        self.epoch += 1
        self.crash_at = None

    def choose(self, command: c.ComputePlan) -> Choice:
        """Fleets of one size get the same plan, each on its own slots."""
        inputs = command.inputs
        mine = [each.slot for each in inputs.slots]
        known = chosen(
            replace(
                inputs,
                slots=tuple(map(device, range(len(mine)))),
                previous=None,
                lag_share=0.0,
            )
        )
        if known.plan is None:
            return known
        slots = tuple(mine[int(slot.vm_id)] for slot in known.plan.slots)
        return replace(known, plan=replace(known.plan, slots=slots))

    def most_events(self) -> int:
        return super().most_events() + self.lab.serials() * 20 * self.settings.resources.max_vms

    def calm_down(self) -> None:
        """Nothing happens any more but what this world's clouds always do."""
        self.fault_h, self.workers.unsaved, self.crash_at = 0.0, 0.0, None
        for vm in self.cloud.vms.values():
            vm.slowness = 1.0


@dataclass
class SimulatedJob(WatchedJob):
    """A job as the pool's process reaches it."""

    job: PooledJob | None = None

    @property
    def world(self) -> PooledJob:
        assert self.job is not None
        return self.job

    def state(self) -> State:
        return self.world.state

    def is_managed(self) -> bool:
        return self.world.manager_alive

    def is_down(self) -> bool:
        return False

    def start(self) -> None:
        self.world.finished = None
        self.world.start_manager()

    def tell(self, grant: PoolGrant) -> None:
        # Managers know of progress sooner than stretches of mini-batches end.
        self.world.workers.catch_up()
        self.world.feed(e.GrantReceived(at_s=self.world.now_s, grant=grant))

    def returned(self) -> State:
        world = self.world
        assert not world.manager_alive
        if world.random.random() < 0.2:
            raise CloudError("the cloud does not answer")
        for vm in tuple(world.cloud.vms.values()):
            if vm.ended_at_s is None:
                world.end_vm(vm.vm_id)
        at_s, vms = world.now_s, world.listing()
        world.feed(e.VmsListed(at_s=at_s, asked_at_s=at_s, vms=vms))
        return world.state


class Measured(JobThroughputs):
    """What a job measures: now and then something else than was planned.

    Args:
        lab: The pool.
        planned: Of the job.
    """

    def __init__(self, lab: Lab, planned: Throughputs) -> None:
        super().__init__(())
        self._lab, self._planned = lab, planned

    def of(self, state: State, offers: object) -> Throughputs | None:
        if not self._lab.is_faulty:
            return self._planned
        if self._lab.random.random() > 0.02:
            return None
        factor = self._lab.random.uniform(0.6, 1.4)
        return tuple(tuple((n, rate * factor) for n, rate in table) for table in self._planned)


class Lab:
    """A pool, its jobs and their clouds.

    Args:
        policy: How the pool is divided.
        seed: Of the whole story.
    """

    def __init__(self, policy: str, seed: int) -> None:
        self.random = random.Random(f"{policy} {seed}")
        self.policy = policy
        self.is_short = seed % 5 == 4
        self.now_s = 1_000_000.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.capacity = {zone: vms for zone, (_, vms, _) in ZONES.items()}
        self.prices = {zone: usd for zone, (_, _, usd) in ZONES.items()}
        self.is_faulty = True
        self.faults: Counter[str] = Counter()
        self.jobs: dict[str, PooledJob] = {}
        self.max_usd = SHORT_USD if self.is_short else POOL_USD
        team_usd = TEAM_SHARE * self.max_usd
        teams = {
            "a": {"weight": 1},
            "b": {"weight": 2, "max_vms": TEAM_VMS, "max_usd": team_usd},
        }
        data = {
            "name": "lab",
            "max_vms": MAX_VMS,
            "policy": policy,
            "budget": {"max_usd": self.max_usd},
            "teams": teams,
            "lease_s": SPEC.lease_s,
        }
        supplies = tuple(
            Supply(name=f"simulated/{kind}", vms=vms, microusd_per_hour=round(usd * 1e6))
            for kind, vms, usd in ZONES.values()
        )
        settings = settings_of(parse_pool(data, "story"))
        self.state = PoolState(settings=settings, supplies=supplies)
        self.epoch = 0
        self.is_up = False
        self.refused: list[str] = []
        self.moved = 0
        """VMs that went from one job to another."""
        self.since_s: dict[str, float] = {}
        """Since when jobs are below their shares."""
        self.below_s = 0.0
        """For how long a job was granted less than its share, with nothing failing."""
        self.start()

    # --- The pool's process ---------------------------------------------------------------

    def start(self) -> None:
        if self.is_up:
            return
        self.epoch += 1
        self.is_up = True
        self.managers = JobManagers("lab", self.state.supplies, self.watch)
        self.grants: dict[str, Grant] = {}
        self.busy: set[str] = set()
        self.feed(PoolStarted(at_s=self.now_s))
        self.tick()

    def crash(self) -> None:
        """What was decided is in the journal; what was to be done is lost."""
        self.is_up = False
        self.epoch += 1
        self.faults["pool"] += 1
        self.after(self.random.choice([5.0, 60.0, 600.0, 2000.0]), self.start)

    def watch(self, name: str) -> WatchedJob:
        job = self.jobs[name]
        measured = Measured(self, job.request.throughputs)
        return SimulatedJob(folder=JobDir(Path(name)), throughputs=measured, job=job)

    def feed(self, event: PoolEvent) -> None:
        self.state, commands = step(self.state, event)
        if self.is_faulty and self.random.random() < 0.001:
            self.crash()
            return
        for command in commands:
            match command:
                case Grant(job=name):
                    self.grants[name] = command
                case ReturnVms(job=name) if name not in self.busy:
                    self.begin(name, lambda name=name: self.return_vms(name))  # type: ignore[misc]
                case Refuse(reason=reason):
                    self.refused.append(reason)
                case _:
                    pass

    def tick(self) -> None:
        epoch = self.epoch
        self.check_below()
        busy = frozenset(self.busy)
        for event in self.managers.look(self.state, self.now_s, busy):
            self.feed(replace(event, at_s=self.now_s))
            if epoch != self.epoch:
                return
        if self.state.timer_s <= self.now_s:
            self.feed(PoolTimerFired(at_s=self.now_s))
        priced = self.managers.priced(self.state.supplies)
        if priced != self.state.supplies and epoch == self.epoch:
            self.feed(SuppliesChanged(at_s=self.now_s, supplies=priced))
        for name in tuple(self.grants):
            if name not in self.busy and epoch == self.epoch:
                self.begin(name, lambda name=name: self.give(name))  # type: ignore[misc]
        if epoch == self.epoch:
            self.after(TICK_S, self.when(self.tick))

    def when(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return an action that happens unless the process has died by then."""
        epoch = self.epoch
        return lambda: action() if epoch == self.epoch else None

    def begin(self, name: str, action: Callable[[], None]) -> None:
        self.busy.add(name)

        def perform() -> None:
            self.busy.discard(name)
            action()

        self.after(self.random.uniform(0.01, 3.0), self.when(perform))

    def give(self, name: str) -> None:
        if name in self.grants:
            grant = self.grants.pop(name)
            unanswered = self.is_faulty and self.random.random() < 0.05
            if unanswered or not self.managers.give(grant):
                self.grants.setdefault(name, grant)

    def return_vms(self, name: str) -> None:
        listed = None if self.jobs[name].manager_alive else self.managers.return_vms(name)
        if listed is not None:
            self.feed(replace(listed, at_s=self.now_s))

    def serials(self) -> int:
        """Return how many grants were given."""
        return sum(job.serial for job in self.state.jobs.values())

    def handed_over(self, taker: PooledJob, order: VmOrder) -> SimulatedVm | None:
        """Return the VM of an order as the one that takes it has it; None if it is lost.

        It ends for the one and begins for the other at the same moment, though the taker's
        part of the cloud may know only later.
        """
        given = self.jobs[order.by].cloud.vms[order.vm_id]
        if given.given != f"{taker.request.name} {order.name}":
            if not given.kept or given.ended_at_s is not None:
                return None
            if self.now_s > order.until_s:
                return None
            given.given = f"{taker.request.name} {order.name}"
            self.jobs[order.by].end_vm(order.vm_id)
            self.moved += 1
            if self.is_faulty and self.random.random() < 0.1:
                return None if self.random.random() < 0.5 else given
        assert given.ended_at_s is not None
        vm_id = f"{order.vm_id.partition('/')[0]}/{order.name.partition('-')[0]}"
        vm_id = f"{vm_id}.{taker.request.name}"
        known = taker.cloud.vms.get(vm_id)
        if known is None:
            if self.now_s > order.until_s + RECEIVE_S:
                return None
            known = SimulatedVm(vm_id, ordered(order.name), given.offer, given.ended_at_s)
            taker.cloud.vms[vm_id] = known
            taker.shown.append(known)
            taker.changed()
            self.check_held()
        return known

    # --- People, and what goes wrong ------------------------------------------------------

    def submit(self) -> None:
        """Submit one job more; a person waits while the pool is dead."""
        if not self.is_up:
            self.after(60.0, self.submit)
            return
        draw, number = self.random, len(self.jobs)
        facts = draw.choice([SMALL, SMALL, FACTS])
        own = 6 if facts is FACTS else draw.choice([3, 6])
        base = JobSettings(
            uid=f"u{number}",
            spec=replace(
                SPEC,
                name=f"j{number}",
                steps=draw.randint(40, 250),
                checkpoint_every_steps=draw.choice([10, 25]),
            ),
            facts=facts,
            grant=PoolGrant(pool="lab", serial=0),
        )
        settings = settings_with(base, max_vms=own, hang_s=1e9)
        table = rates(facts, own)
        request = JobRequest(
            name=f"j{number}",
            throughputs=(table,) * len(ZONES),
            examples=float(settings.spec.steps * settings.spec.minibatch_size),
            team=draw.choice(["a", "b"]),
            weight=draw.choice([1.0, 5.0, 10.0]),
            limits=Limits(max_vms=own),
            machine="box",
        )
        job = PooledJob(self, draw.randrange(1 << 30), request, settings)
        self.jobs[request.name] = job
        self.feed(JobRequested(at_s=self.now_s, request=request))
        if request.name not in self.state.jobs:
            assert self.is_short, self.refused
            del self.jobs[request.name]

    def strike(self) -> None:
        """Let something go wrong."""
        if not self.is_faulty:
            return
        kind = self.random.choice([*FAULT_OF, "market", "pool", "person"])
        vms = [
            (job, vm)
            for job in self.jobs.values()
            for vm in job.cloud.vms.values()
            if (vm.alive or vm.kept) and vm.ended_at_s is None and not vm.doomed
        ]
        if kind == "pool" and self.is_up:
            self.crash()
        elif kind == "person" and self.is_up and self.state.jobs:
            self.pause(self.random.choice([*self.state.jobs]))
        elif kind == "market":
            self.market()
        elif kind in FAULT_OF and vms:
            job, vm = self.random.choice(vms)
            kind = "kill" if vm.kept else kind
            self.faults[kind] += FAULT_OF[kind](job, vm)
        self.after(self.random.expovariate(1 / FAULT_S), self.strike)

    def market(self) -> None:
        zone = self.random.choice([*ZONES])
        self.capacity[zone] = self.random.randint(0, ZONES[zone][1])
        self.prices[zone] = self.random.uniform(0.5, 2.0)
        self.faults["market"] += 1

    def pause(self, name: str) -> None:
        self.faults["person"] += 1
        self.feed(PoolJobPaused(at_s=self.now_s, job=name, is_paused=True))
        self.after(self.random.uniform(1.0, 900.0), self.resume)

    def resume(self) -> None:
        """A person lets all jobs go on that were paused or have failed."""
        for name, job in self.state.jobs.items():
            if self.is_up and (job.phase is PoolJobPhase.PAUSED or self.has_failed(name)):
                self.managers.of(name).starts = 0
                self.feed(PoolJobPaused(at_s=self.now_s, job=name, is_paused=False))

    def has_failed(self, name: str) -> bool:
        """Return whether a job has ended, but not for good: its measurement lost its VMs."""
        if self.is_short or self.state.jobs[name].phase is not PoolJobPhase.ENDED:
            return False
        outcome = self.jobs[name].state.outcome
        return outcome is not None and outcome.kind == "failed"

    def calm_down(self) -> None:
        self.is_faulty = False
        self.capacity.update({zone: vms for zone, (_, vms, _) in ZONES.items()})
        for job in self.jobs.values():
            job.calm_down()
        self.start()
        for _ in range(4):
            self.submit()
            [*self.jobs.values()][-1].calm_down()

    def look_after(self) -> None:
        """People resume what was paused, by them or by the pool."""
        self.resume()
        self.after(300.0, self.look_after)

    def look(self) -> None:
        """Managers look at the clouds, which others have taken VMs from or given them back."""
        for job in self.jobs.values():
            job.changed()
        self.after(POLL_S, self.look)

    # --- Virtual time ---------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.now_s + delay_s, next(self.numbers), action))

    def live(self) -> None:
        """Play the story to its end.

        Raises:
            AssertionError, InternalError: Something does not hold.
        """
        for _ in range(5):
            self.after(self.random.uniform(0.0, FAULTY_S / 2), self.submit)
        self.after(self.random.expovariate(1 / FAULT_S), self.strike)
        self.after(600.0, self.look_after)
        self.after(POLL_S, self.look)
        self.play(FAULTY_S)
        self.calm_down()
        self.play(CALM_S if not self.is_short else 3 * HOUR_S)
        self.check_end()

    def play(self, for_s: float) -> None:
        end_s = self.now_s + for_s
        while self.now_s < end_s and (self.is_faulty or not self.has_ended()):
            self.now_s, _, action = heapq.heappop(self.agenda)
            for job in self.jobs.values():
                job.now_s = self.now_s
            action()

    # --- What must hold -------------------------------------------------------------------

    def rented(self, team: str | None = None) -> list[SimulatedVm]:
        """Return what the clouds bill now for the pool, or for a team."""
        return [
            vm
            for job in self.jobs.values()
            if team is None or job.request.team == team
            for vm in job.cloud.vms.values()
            if vm.ended_at_s is None
        ]

    def check_held(self) -> None:
        """What clouds bill is within all caps."""
        held = self.rented()
        assert len(held) <= MAX_VMS, "of the pool"
        kinds = Counter(kind_of(vm.offer) for vm in held)
        for supply in self.state.supplies:
            assert kinds[supply.name] <= supply.vms, supply.name
        assert len(self.rented("b")) <= TEAM_VMS, "of a team"
        for job in self.jobs.values():
            own = sum(vm.ended_at_s is None for vm in job.cloud.vms.values())
            assert own <= job.settings.resources.max_vms, "of a job"
        self.check_billed()

    def check_billed(self) -> None:
        billed = {n: j.cloud.bill_usd(self.now_s) for n, j in self.jobs.items()}
        assert sum(billed.values()) <= self.max_usd, "dollars of the pool"
        of_b = [usd for n, usd in billed.items() if self.jobs[n].request.team == "b"]
        assert sum(of_b) <= TEAM_SHARE * self.max_usd, "dollars of a team"

    def check_below(self) -> None:
        """Keep for how long somebody was below its share, with nothing failing."""
        active = {
            name: job
            for name, job in self.state.jobs.items()
            if job.phase is PoolJobPhase.ACTIVE and not self.is_faulty
        }
        self.since_s = {name: self.since_s.get(name, self.now_s) for name in below(active)}
        for since_s in self.since_s.values():
            self.below_s = max(self.below_s, self.now_s - since_s)

    def has_ended(self) -> bool:
        jobs = self.state.jobs.values()
        return all(j.phase is PoolJobPhase.ENDED and not j.runs for j in jobs) and not any(
            map(self.has_failed, self.state.jobs)
        )

    def check_end(self) -> None:
        self.check_billed()
        if self.is_short:
            return
        for name, job in self.jobs.items():
            assert self.state.jobs[name].phase is PoolJobPhase.ENDED, f"{name} waits"
            # A manager may have died between the last event and its farewell.
            outcome = job.state.outcome
            assert outcome is not None, f"{name} has not ended"
            assert outcome.kind == "succeeded", (name, outcome)
            job.check_bill()
            job.check_journal()
        assert self.below_s <= SHORT_S or self.policy not in FAIR, self.below_s


def main() -> None:
    """Play stories; print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--policy", choices=[*POLICIES], action="append")
    args = parser.parse_args()
    failed = 0
    for policy in args.policy or POLICIES:
        begun_s, below_s, short_s, hours = time.process_time(), 0.0, 0.0, 0.0
        faults: Counter[str] = Counter()
        events = vms = moved = 0
        for seed in range(args.first, args.first + args.seeds):
            lab = Lab(policy, seed)
            since_s = lab.now_s
            try:
                lab.live()
            except (AssertionError, InternalError) as error:
                print(f"{policy}, seed {seed} fails: {error!r}", flush=True)
                failed += 1
            hours += (lab.now_s - since_s) / HOUR_S
            below_s = max(below_s, 0.0 if lab.is_short else lab.below_s)
            short_s = max(short_s, lab.below_s if lab.is_short else 0.0)
            faults += lab.faults
            events += sum(len(job.journal) for job in lab.jobs.values())
            vms += sum(len(job.cloud.vms) for job in lab.jobs.values())
            moved += lab.moved
        print(
            f"{policy:<22} {args.seeds} stories, {hours:.0f} h, {events} events of jobs, "
            f"{vms} VMs, {moved} of them given on, {faults.total()} faults; at most {below_s:.0f} s below a share, "
            f"{short_s:.0f} s where money is short; "
            f"{time.process_time() - begun_s:.0f} s",
            flush=True,
        )
        print("  " + ", ".join(f"{k} {n}" for k, n in sorted(faults.items())))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
