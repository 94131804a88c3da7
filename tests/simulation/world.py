"""A driver of the core in virtual time, with a simulated cloud.

Everything happens at a moment of one virtual clock and is drawn from one seed, so days
pass in seconds and every run can be repeated.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import assert_never

from tests.journals import decided, decision
from tests.simulation.market import Cloud, SimulatedVm
from tests.simulation.workers import Workers
from tests.unit.varuna_manager.invariants import check_invariants
from tests.view import View

from spottrain.cloud.port.provider import Vm, VmState
from spottrain.morphing.plan.choose import Choice, choose_plan
from spottrain.morphing.plan.inputs import question_of
from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.settings import JobSettings, VmOrder
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.watch.watches import Watches
from spottrain.wire.messages import (
    Measurement,
    MinibatchCommitted,
    Report,
    SupervisorReady,
)

SUSPECT_S = 5.0


class World(View):
    """One job, its manager, its cloud and its workers."""

    def __init__(self, seed: int, settings: JobSettings, cloud: Cloud) -> None:
        super().__init__(State())
        self.random = random.Random(seed)
        self.cloud = cloud
        self.settings = settings
        self.now_s = 1_000_000.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.journal: list[e.Event] = []
        self.epoch = 0
        self.manager_alive = False
        self.timer = 0
        self.finished: c.Outcome | None = None
        self.pending: list[tuple[str, int, Report]] = []
        self.workers = Workers(self)
        self.listed: tuple[object, ...] = ()
        self.offered: tuple[object, ...] = ()
        self.queue: deque[e.Event] = deque()
        self.is_feeding = False
        self.watches = Watches()
        self.crash_at: int | None = None
        """The manager dies once this many events are journalled."""
        self.decisions: list[str] = []
        """Of events that no replay has read yet."""
        self.replayed = State()

    # --- Virtual time -----------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.now_s + delay_s, next(self.numbers), action))

    def soon(self, action: Callable[[], None], upto_s: float = 1.0) -> None:
        self.after(self.random.uniform(0.01, upto_s), action)

    def run(self, until_s: float = 20_000.0) -> None:
        """Play until the job is over, or ``until_s`` have passed."""
        self.feed(e.JobSubmitted(at_s=self.now_s, settings=self.settings))
        self.start_manager()
        self.run_on(until_s)

    def run_on(self, until_s: float = 20_000.0) -> None:
        """Play on."""
        end_s = self.now_s + until_s
        while self.agenda and self.now_s < end_s and self.finished is None:
            self.play_one()

    def play_one(self) -> None:
        """Play what comes next."""
        self.now_s, _, action = heapq.heappop(self.agenda)
        action()

    # --- The manager's process ----------------------------------------------------------

    def feed(self, event: e.Event) -> None:
        """Journal an event, step, check, perform; events that follow wait for it."""
        self.queue += self.watches.pending(self.state, self.now_s)
        self.queue.append(event)
        if self.is_feeding:
            return
        self.is_feeding = True
        try:
            self.feed_queue()
        finally:
            self.is_feeding = False

    def feed_queue(self) -> None:
        while self.queue:
            commands = self.fold(self.queue[0])
            if len(self.journal) == self.crash_at:
                self.kill_manager(down_s=1.0)
                self.queue.clear()
                return
            for command in commands:
                self.perform(command)
            self.queue.popleft()

    def fold(self, event: e.Event) -> tuple[c.Command, ...]:
        self.journal.append(event)
        old = self.state
        self.state, commands = step.step(old, event)
        check_invariants(self.state)
        self.decisions.append(decision(old, self.state))
        before, after = View(old).current_generation, self.current_generation
        assert before is None or after is None or before.number <= after.number
        return commands

    def later(self, event: Callable[[], e.Event | None], upto_s: float = 1.0) -> None:
        """Feed an outcome after a while, unless there is none, or the manager has died by then."""
        epoch = self.epoch

        def feed() -> None:
            if epoch != self.epoch or not self.manager_alive:
                return
            if (outcome := event()) is not None:
                self.feed(outcome)

        self.soon(feed, upto_s)

    def check_journal(self) -> None:
        """Check that what was decided leads where the manager is, without its code."""
        for one in self.decisions:
            self.replayed = decided(self.replayed, one)
        self.decisions.clear()
        assert self.replayed == self.state, "the journal is the memory"

    def start_manager(self) -> None:
        """Replay what was decided, then reconcile."""
        self.check_journal()
        self.state = self.replayed
        self.epoch += 1
        self.manager_alive = True
        self.watches = Watches()
        self.feed(e.ManagerStarted(at_s=self.now_s, software_version="1", pid=self.epoch))
        self.feed(e.CheckpointsListed(at_s=self.now_s, checkpoints=tuple(self.workers.checkpoints)))
        self.listed = self.offered = ()
        self.poll(force=True)
        pending, self.pending = self.pending, []
        for vm_id, number, report in pending:
            self.receive(vm_id, number, report)

    def kill_manager(self, down_s: float) -> None:
        """kill -9: what was in flight is lost; somebody resumes it later."""
        if not self.manager_alive:
            return
        self.manager_alive = False
        self.epoch += 1
        self.after(down_s, self.start_manager)

    def poll(self, *, force: bool = False) -> None:
        """Ask the provider; feed what differs."""
        if not self.manager_alive:
            return
        offers, vms = self.cloud.offers(), self.listing()
        if offers != self.offered:
            self.offered = offers
            self.feed(e.OffersSeen(at_s=self.now_s, offers=offers))
        if self.is_news(vms) or force:
            self.listed = vms
            self.feed(e.VmsListed(at_s=self.now_s, asked_at_s=self.now_s, vms=vms))
        self.poll_again()

    def is_news(self, vms: tuple[Vm, ...]) -> bool:
        """Return whether a list differs from the last, or lacks VMs of ours."""
        return vms != self.listed or bool(self.vms.keys() - {vm.vm_id for vm in vms})

    def poll_again(self) -> None:
        """Have the provider asked again."""
        epoch = self.epoch

        def again() -> None:
            if epoch == self.epoch:
                self.poll()

        self.after(2.0, again)

    def listing(self) -> tuple[Vm, ...]:
        return tuple(vm.listed() for vm in self.cloud.vms.values())

    # --- Commands -------------------------------------------------------------------------

    def perform(self, command: c.Command) -> None:
        match command:
            case c.LaunchVms():
                self.soon(lambda: self.launch(command))
            case c.StartAgent(vm_id=vm_id):
                self.soon(lambda: self.boot(vm_id))
            case c.TerminateVms(vm_ids=vm_ids):
                self.soon(lambda: self.terminate(vm_ids))
            case c.ReserveVm(vm_id=vm_id):
                self.soon(lambda: self.keep(vm_id))
            case c.AcquireVm(order=order):
                self.soon(lambda: self.take(order))
            case c.ReleaseJob():
                self.later(lambda: e.JobReleased(at_s=self.now_s))
            case c.AskProvider(vm_id=vm_id):
                self.later(lambda: self.answer(vm_id))
            case c.ComputePlan():
                self.plan(command)
            case c.ListCheckpoints():
                self.later(self.list_store)
            case c.KeepProfile():
                pass
            case c.Send():
                self.deliver(command)
            case c.SetTimer(at_s=at_s):
                self.set_timer(at_s)
            case c.Finish(outcome=outcome):
                self.finished = outcome
                self.manager_alive = False
            case _:
                assert_never(command)

    def list_store(self) -> e.Event:
        found, now_s = tuple(self.workers.checkpoints), self.now_s
        return e.CheckpointsListed(at_s=now_s, checkpoints=found, asked_at_s=now_s)

    def keep(self, vm_id: str) -> None:
        """There is no other job: VMs are returned."""
        self.terminate((vm_id,))

    def take(self, order: VmOrder) -> None:
        """There is no other job: no VM comes."""
        self.later(lambda: e.OrderAnswered(at_s=self.now_s, order=order.name))

    def plan(self, command: c.ComputePlan) -> None:
        choice = self.choose(command)
        self.later(
            lambda: e.PlanComputed(
                at_s=self.now_s,
                inputs_hash=command.inputs_hash,
                plan=choice.plan,
                candidates=choice.decisive,
                why_not=choice.why_not,
                question=question_of(command.inputs),
            )
        )

    def choose(self, command: c.ComputePlan) -> Choice:
        return choose_plan(command.inputs)

    def deliver(self, command: c.Send) -> None:
        """An outbox dies with its manager."""
        epoch = self.epoch

        def deliver() -> None:
            if epoch == self.epoch:
                self.workers.obey(command.vm_id, command.command)

        self.soon(deliver, 0.3)

    def set_timer(self, at_s: float | None) -> None:
        self.timer += 1
        timer, epoch = self.timer, self.epoch
        if at_s is None:
            return

        def fire() -> None:
            if timer == self.timer and epoch == self.epoch and self.manager_alive:
                self.feed(e.TimerFired(at_s=self.now_s))

        self.after(max(0.0, at_s - self.now_s), fire)

    def launch(self, command: c.LaunchVms) -> None:
        """The cloud acts even if its answer is lost."""
        fate = self.random.random()
        refusal: e.RefusalKind = "unknown"
        if fate > 0.05:
            vms = self.cloud.launch(
                command.token, command.intent, command.offer, command.count, self.now_s
            )
            refusal = "no_capacity"
        if fate > 0.1 and vms:
            self.later(
                lambda: e.VmsLaunched(at_s=self.now_s, intent=command.intent, vms=tuple(vms))
            )
            return
        if fate <= 0.1:  # whether it launched is not known
            refusal = "unknown"
        self.later(
            lambda: e.LaunchRefused(
                at_s=self.now_s,
                intent=command.intent,
                reason="no",
                refusal=refusal,
            )
        )

    def terminate(self, vm_ids: tuple[str, ...]) -> None:
        if self.random.random() < 0.1:
            self.later(
                lambda: e.CommandFailed(
                    at_s=self.now_s,
                    command="terminate_vms",
                    vm_ids=vm_ids,
                    reason="throttled",
                )
            )
            return
        for vm_id in vm_ids:
            self.end_vm(vm_id)

        def returned() -> e.Event:
            wanted = {*vm_ids, *self.ledger.unconfirmed}
            vms = tuple(vm for vm in self.listing() if vm.vm_id in wanted)
            return e.VmsReturned(at_s=self.now_s, vm_ids=vm_ids, vms=vms)

        self.later(returned)

    def answer(self, vm_id: str) -> e.Event:
        vm = self.cloud.vms[vm_id]
        return e.ProviderAnswered(
            at_s=self.now_s,
            vm_id=vm_id,
            state=VmState.TERMINATED if vm.ended_at_s else VmState.RUNNING,
        )

    # --- VMs and their agents -----------------------------------------------------------------

    def boot(self, vm_id: str) -> None:
        vm = self.cloud.vms[vm_id]
        if vm.agent or not vm.alive:
            return
        vm.agent = True
        self.soon(lambda: self.register(vm), 3.0)

    def register(self, vm: SimulatedVm) -> None:
        if not self.manager_alive and vm.alive:
            self.after(1.0, lambda: self.register(vm))  # it keeps trying
        elif vm.alive:
            self.feed(
                e.AgentRegistered(
                    at_s=self.now_s,
                    vm_id=vm.vm_id,
                    num_slots=vm.offer.gpus,
                    private_address="10.0.0.1",
                )
            )
            ready = SupervisorReady(num_slots=vm.offer.gpus, torch_version="2")
            self.soon(lambda: self.report(vm, ready), 5.0)

    def report(self, vm: SimulatedVm, report: Report) -> None:
        """An agent reports; it keeps what the manager has not acknowledged."""
        if not vm.alive:
            return
        number = vm.reports
        vm.reports += not isinstance(report, Measurement)
        if self.manager_alive:
            self.receive(vm.vm_id, number, report)
            if self.random.random() < 0.1:  # an acknowledgement got lost
                self.receive(vm.vm_id, number, report)
        else:
            self.pending.append((vm.vm_id, number, report))

    def receive(self, vm_id: str, number: int, report: Report) -> None:
        if not self.manager_alive:
            return
        if isinstance(report, MinibatchCommitted):
            for event in self.watches.observe(self.state, vm_id, report, self.now_s):
                self.feed(event)
        else:
            self.feed(e.ReportReceived(at_s=self.now_s, vm_id=vm_id, number=number, report=report))

    def end_vm(self, vm_id: str) -> None:
        """Gone, memory and all."""
        vm = self.cloud.vms[vm_id]
        self.workers.catch_up()
        if vm.ended_at_s is None:
            vm.ended_at_s = self.now_s
            vm.memory.clear()
            self.workers.vm_gone(vm)

    def freeze_vm(self, vm_id: str) -> None:
        """SIGSTOP to all of it; heartbeats end, and that is noticed in time."""
        self.workers.catch_up()
        self.cloud.vms[vm_id].frozen = True

        def notice() -> None:
            record = self.vms.get(vm_id)
            heard = (VmPhase.REGISTERED, VmPhase.READY)
            if record is None or record.phase not in heard:
                return
            if self.manager_alive and record.silent_since_s is None:
                self.feed(e.VmSilent(at_s=self.now_s, vm_id=vm_id))
            self.after(SUSPECT_S, notice)

        self.after(SUSPECT_S, notice)
