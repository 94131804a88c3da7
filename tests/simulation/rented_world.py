"""The manager's core and errands over real adapters and fake clouds, in virtual time.

A job whose VMs never come to train, so that renting is all there is: the core wishes for
VMs, gives those back that do not become ready, and fills up what the cloud takes. Around
it everything goes wrong by a script that is drawn from a seed. The clock is the fake
cloud's own, which can be put forward.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.journals import decided, decision
from tests.simulation.fake_clouds import FakeCloud, Row
from tests.simulation.test_simulation import settings
from tests.unit.varuna_manager.invariants import check_invariants
from tests.view import View

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import CloudProvider
from spottrain.pricing.billing.ledger import LedgerLine
from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.daemon.effects import EffectRunner
from spottrain.varuna_manager.daemon.sessions import AgentSessions
from spottrain.varuna_manager.jobs.identity import Identity
from spottrain.wire import messages

MAX_VMS = 12
CLOSE_S = 0.1
"""A fake may put a VM on its bill and report when it was made this far apart."""
LINGER_S = 60.0
"""How long a list may show a VM that is gone."""
_NOBODY = Identity(Path("nowhere"), "ca", b"secret")
_PAUSES_S = (0.5, 2.0, 10.0, 40.0, 100.0, 300.0)
_ROUNDS_TO_END = 200
"""Rounds that the end of a job may take once nothing goes wrong any more."""


@dataclass(frozen=True)
class Verdict:
    """How the ledger and the cloud's bill compare, in VM-seconds."""

    vms: int
    billed_s: float
    ledger_s: float
    apart_s: float
    """The most that they are apart for one VM."""
    unmade_s: float
    """What the ledger has beside that, for VMs for which there was no machine."""


class Manager:
    """One process of the manager: what it was doing dies with it.

    Args:
        world: Where it lives.
        provider: Its own client of the cloud.
    """

    def __init__(self, world: RentedWorld, provider: CloudProvider) -> None:
        self.alive = True
        self.provider = provider
        self._world = world
        sessions = AgentSessions(time.monotonic, lambda _: None)
        self.effects = EffectRunner(self, provider, sessions, _NOBODY, "https://manager")

    @property
    def state(self) -> State:
        return self._world.state

    def now_s(self) -> float:
        return self._world.now_s()

    def feed(self, event: e.Event) -> asyncio.Future[None]:
        if self.alive:
            self._world.feed(event)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class RentedWorld(View):
    """One job on one fake cloud.

    Args:
        seed: Of all that goes wrong.
        cloud: Where it rents.
    """

    def __init__(self, seed: int, cloud: FakeCloud) -> None:
        super().__init__(State())
        self.random = random.Random(seed)
        self.cloud = cloud
        self.counts: Counter[str] = Counter()
        self.calm = False
        self._passed_s = 0.0
        self._queue: deque[e.Event] = deque()
        self._decisions: list[str] = []
        self._replayed = State()
        self._tasks: set[asyncio.Task[None]] = set()
        self._managers: list[Manager] = []
        self._doomed: dict[str, float] = {}
        self._finished = False

    def now_s(self) -> float:
        """The fake cloud's time."""
        return time.time() + self._passed_s

    def live(self, vms: int) -> None:
        """Rent until so many VMs have been there, then end the job."""
        asyncio.run(self._live(vms))

    async def _live(self, vms: int) -> None:
        self.feed(
            e.JobSubmitted(
                at_s=self.now_s(),
                settings=settings(max_vms=MAX_VMS, shares=True, span="any"),
            )
        )
        self._pass_time(1.0)  # clouds that report whole seconds round down
        self._restart()
        while self.tally.vms_launched < vms:
            self._strike()
            await self._round()
        await self._end()
        for manager in self._managers:
            manager.effects.close()

    async def _end(self) -> None:
        """Stop the job while things still go wrong, then let it come to its end."""
        for number in range(_ROUNDS_TO_END):
            self.calm = number > 5
            if self.calm:
                self.cloud.ask("recover")  # from faults of calls that are rarely made
            else:
                self._strike()
            self.cloud.ask("lag", hide_s=0.0, linger_s=0.0)  # else a release waits
            if self.state.phase is JobPhase.ACTIVE:  # also after a restart
                self.feed(e.StopRequested(at_s=self.now_s(), by="a person"))
            await self._round()
            if self._finished and self.calm:
                return
            if self._finished:
                self._restart()
        raise AssertionError(f"no end: {self.state.activity}, {self.cloud.ask('left')}")

    # --- what goes wrong --------------------------------------------------------------

    def _strike(self) -> None:
        """Draw what goes wrong in the next round."""
        draw, cloud = self.random, self.cloud
        if draw.random() < 0.3:
            cloud.restock(draw)
        if draw.random() < 0.2:
            hide_s, linger_s = draw.choice([0.0, 5.0]), draw.choice([0.0, LINGER_S])
            cloud.ask("lag", hide_s=hide_s, linger_s=linger_s)
        for _ in range(draw.choice([0, 0, 1, 2])):
            self._script_fault()
        alive = self._alive()
        if alive and draw.random() < 0.5:
            for vm_id in draw.sample(alive, draw.randint(1, min(3, len(alive)))):
                self._notice(vm_id)
        for vm_id, at_s in tuple(self._doomed.items()):
            if at_s <= self.now_s():
                del self._doomed[vm_id]
                if vm_id in self._alive():
                    self.cloud.evict(vm_id)
                    self.counts["preemptions"] += 1

    def _alive(self) -> list[str]:
        return [row.vm_id for row in self.cloud.bill() if row.until_s is None]

    def _script_fault(self) -> None:
        draw, cloud = self.random, self.cloud
        launch = draw.random() < 0.5
        operation = cloud.launch if launch else draw.choice(cloud.others)
        fault: dict[str, Any] = {"operation": operation, "times": draw.randint(1, 2)}
        fault["kind"] = draw.choice(["error", "error", "drop", "lost"])
        if fault["kind"] == "error":
            fault["code"], fault["status"] = draw.choice(cloud.hiccups)
        cloud.ask("fail", **fault)
        self.counts[f"fault: {fault['kind']}"] += 1

    def _notice(self, vm_id: str) -> None:
        """Let a VM be taken: at once, or after a notice that its agent reports."""
        record = self.vms.get(vm_id)
        self._doomed.setdefault(vm_id, self.now_s())
        if record is None or self.random.random() < 0.6:
            return
        lead_s = self.random.choice([0.0, 30.0, 120.0])
        self._doomed[vm_id] = self.now_s() + lead_s
        self.counts["notices"] += 1
        self.feed(
            e.ReportReceived(
                at_s=self.now_s(),
                vm_id=vm_id,
                number=record.reports_received,
                report=messages.InterruptionNoticed(lead_s=lead_s),
            )
        )

    def _dies(self, share: float) -> bool:
        return not self.calm and self.random.random() < share

    # --- the manager ------------------------------------------------------------------

    async def _round(self) -> None:
        """Let all that is under way finish, poll, let time pass."""
        self.counts["rounds"] += 1
        if self._dies(0.03):
            self._restart()
        manager = self._managers[-1]
        await asyncio.gather(self._look(manager), *self._tasks)
        while self._tasks:
            await asyncio.gather(*self._tasks)
        self._pass_time(self.random.choice(_PAUSES_S))
        due_s = self.state.timer_at_s
        if due_s is not None and due_s <= self.now_s():
            self.feed(e.TimerFired(at_s=self.now_s()))

    def _pass_time(self, seconds: float) -> None:
        self._passed_s += seconds
        self.cloud.ask("pass_time", seconds=seconds)

    async def _look(self, manager: Manager) -> None:
        try:
            await manager.effects.poller.poll_vms()
            if self.counts["rounds"] % 10 == 1 or not self.offers:
                offers = await asyncio.to_thread(manager.provider.offers)
                manager.feed(e.OffersSeen(at_s=self.now_s(), offers=tuple(offers)))
        except CloudError:
            self.counts["looks that failed"] += 1

    def _restart(self) -> None:
        """kill -9, and another manager: what is under way goes on, for nobody."""
        for manager in self._managers:
            manager.alive = False
        for one in self._decisions:
            self._replayed = decided(self._replayed, one)
        self._decisions.clear()
        assert self._replayed == self.state, "the journal is the memory"
        self.state = self._replayed
        self._queue.clear()
        self._finished = False
        self._managers.append(Manager(self, self.cloud.connect(self.now_s)))
        self.counts["managers"] += 1
        self.feed(
            e.ManagerStarted(at_s=self.now_s(), software_version="1", pid=1),
        )
        self.feed(e.CheckpointsListed(at_s=self.now_s(), checkpoints=()))

    def feed(self, event: e.Event) -> None:
        """Journal an event, step, check, perform; events that follow wait for it."""
        self._queue.append(event)
        if len(self._queue) > 1:
            return
        while self._queue:
            event = self._queue[0]
            before = self.state
            self.state, commands = step.step(before, event)
            self._decisions.append(decision(before, self.state))
            check_invariants(self.state)
            if self._dies(0.01):
                self._restart()
                return
            for command in commands:
                self._perform(command)
            self._queue.popleft()

    def _perform(self, command: c.Command) -> None:
        if isinstance(command, c.StartAgent | c.SetTimer):
            return  # VMs boot without end; every round checks the timer
        errands = self._managers[-1].effects
        match command:
            case c.LaunchVms():
                self.counts["launches asked for"] += 1
                self._start(errands.launch(command))
            case c.TerminateVms(vm_ids=vm_ids):
                self.counts["terminations asked for"] += len(vm_ids)
                self._start(errands.terminate(command))
            case c.AskProvider():
                self._start(errands.ask(command))
            case c.ReleaseJob():
                self._start(errands.release(command))
            case c.Finish():
                self._finished = True
            case _:
                raise AssertionError(command)

    def _start(self, effect: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(effect)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the end ----------------------------------------------------------------------

    def verdict(self) -> Verdict:
        """Compare the ledger with the cloud's bill, VM by VM."""
        ledger = self.ledger
        assert not ledger.open, sorted(ledger.open)
        billed: dict[str, list[Row]] = {}
        for row in self.cloud.bill():
            billed.setdefault(row.vm_id, []).append(row)
        unmade = ledger.closed.keys() - billed.keys()
        assert unmade <= self.cloud.unmade()
        apart_s = max(
            abs(off_s)
            for vm_id, rows in billed.items()
            for off_s in _off_s(ledger.closed[vm_id], rows)
        )
        return Verdict(
            vms=sum(map(len, billed.values())),
            billed_s=sum(_lasted_s(row) for rows in billed.values() for row in rows),
            ledger_s=sum(_lived_s(ledger.closed[vm_id]) for vm_id in billed),
            apart_s=apart_s,
            unmade_s=sum(_lived_s(ledger.closed[vm_id]) for vm_id in unmade),
        )


def _off_s(line: LedgerLine, rows: list[Row]) -> tuple[float, float]:
    """Return how much earlier a line begins than the bill, and ends later."""
    from_s = min(row.from_s for row in rows)
    until_s = max(row.until_s or 0.0 for row in rows)
    end_us = line.gone_us if line.ended_us is None else line.ended_us
    return from_s - line.from_us / 1e6, (end_us or 0) / 1e6 - until_s


def _lasted_s(row: Row) -> float:
    return 0.0 if row.until_s is None else row.until_s - row.from_s


def _lived_s(line: LedgerLine) -> float:
    until_us = line.gone_us if line.ended_us is None else line.ended_us
    return max(0, (until_us or 0) - line.from_us) / 1e6
