"""Weeks of a job of 32 VMs in seconds: ``python -m tests.simulation.long_run``.

The core is driven by changes: VMs report what happens to them rather than each heartbeat,
the provider is asked once something has changed, and mini-batches pass many at once. The
journal is kept in memory; a manager that starts builds its state from it. After every
event the invariants are checked, and after every job that its VMs are returned and that
the ledger is the cloud's bill. docs/simulation-faults.md keeps what was run and found.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.market import Cloud, SimulatedVm
from tests.simulation.test_simulation import SPEC, check_end, settings
from tests.simulation.world import World

from spottrain.cloud.port.provider import Vm
from spottrain.morphing.plan.choose import Choice, choose_plan
from spottrain.units import HOUR_S
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.errors import InternalError
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.wire import messages
from spottrain.wire.plan import Slot

MAX_VMS = 32
STEP_EVERY_S = 20.0
"""About how long a mini-batch takes at the full fleet."""
CHECKPOINTS = 50
"""Of a job."""
MAX_STRETCH = 30.0
"""Times as long as a calm job may take."""
STOPPED_EARLY = 0.1
"""Share of first launches that are not answered before somebody stops the job."""
DEAD_ON_ARRIVAL = 0.03
UNSAVED = 0.05
"""Share of checkpoints that cannot be written."""
EVENTS = 20
"""Of each VM that one fault may cause at most, on average."""
LATE_S = 1800.0
"""A VM that is not known, not ready or not gone by then never will be."""
_CAN_WAIT = ("drained", "slow", "its replacement", "not in the cost-optimal plan")
SHOWN_S = 600.0
"""How long a list shows a VM that is gone."""


class LongWorld(World):
    """A job of many hours.

    Args:
        seed: Of all that happens.
        max_vms: The size of the fleet.
        hours: How long the job trains at the full fleet's speed.
        fault_h: Mean time between two faults, in hours; 0: none.
    """

    def __init__(self, seed: int, max_vms: int, hours: float, fault_h: float) -> None:
        zones = {"a": max_vms * 5 // 8, "b": max_vms * 3 // 4}
        cloud = Cloud(capacity=zones, prices={"a": 1.0, "b": 1.2})
        steps = max(20, round(hours * HOUR_S / STEP_EVERY_S))
        spec = replace(
            SPEC,
            steps=steps,
            minibatch_size=2 * max_vms,
            checkpoint_every_steps=max(5, steps // CHECKPOINTS),
        )
        # Some jobs cannot be paid for to the end.
        max_usd = max_vms * hours if seed % 5 == 4 else None
        super().__init__(
            seed,
            settings(spec=spec, max_vms=max_vms, hang_s=1e9, max_usd=max_usd),
            cloud,
        )
        self.workers.stride = 1_000_000
        self.workers.unsaved = UNSAVED if fault_h else 0.0
        self.looking = False
        self.faults: Counter[str] = Counter()
        self.fault_h = fault_h
        self.began_s = self.now_s
        self.person = random.Random(f"{seed} person")
        self.unheard: set[str] = set()
        """VMs whose heartbeats were missed once."""
        self.asked_for: set[str] = set()
        """VMs that answered a launch."""
        self.returned: dict[str, float] = {}
        """When VMs were to be returned for the first time."""
        """VMs whose return was commanded; managers that start command it again."""
        self.shown: list[SimulatedVm] = []
        self.chosen: dict[tuple[int, int | None], tuple[tuple[Slot, ...], Choice]] = {}

    # --- What is asked only when it has changed ---------------------------------------

    def changed(self) -> None:
        """The provider's answers have changed: a poll comes in time."""
        if not self.looking:
            self.looking = True
            self.soon(self.look, 20.0)

    def look(self) -> None:
        self.looking = False
        self.poll()

    def poll_again(self) -> None:
        """Not before something has changed."""

    def listing(self) -> tuple[Vm, ...]:
        self.shown = [
            vm for vm in self.shown if vm.ended_at_s is None or vm.ended_at_s > self.now_s - SHOWN_S
        ]
        return tuple(vm.listed() for vm in self.shown)

    def launch(self, command: c.LaunchVms) -> None:
        before = len(self.cloud.vms)
        super().launch(command)
        self.shown += list(self.cloud.vms.values())[before:]
        self.changed()
        # A person thinks better of it while nothing but this launch is there.
        early = not self.vms and self.fault_h
        if early and self.person.random() < STOPPED_EARLY and self.stop(None):
            self.faults["stop"] += 1

    def end_vm(self, vm_id: str) -> None:
        super().end_vm(vm_id)
        self.changed()

    def boot(self, vm_id: str) -> None:
        """Some VMs never come up."""
        if self.fault_h and self.random.random() < DEAD_ON_ARRIVAL:
            self.cloud.vms[vm_id].doomed = True
        else:
            super().boot(vm_id)

    def poll(self, *, force: bool = False) -> None:
        """A list may be older than launches that were answered since."""
        if force or self.random.random() < 0.5:
            super().poll(force=force)
            return
        asked_at_s, vms = self.now_s, self.listing()

        def answer() -> e.Event | None:
            if not self.is_news(vms) and vms == self.listing():
                return None  # as new as any, and known
            self.listed = vms
            return e.VmsListed(at_s=self.now_s, asked_at_s=asked_at_s, vms=vms)

        self.later(answer, 10.0)
        self.changed()

    # --- What must hold, seen from outside --------------------------------------------

    def fold(self, event: e.Event) -> tuple[c.Command, ...]:
        commands = super().fold(event)
        assert len(self.journal) <= self.most_events(), "it goes round in circles"
        if isinstance(event, e.VmsLaunched):
            self.asked_for |= {vm.vm_id for vm in event.vms}
        for command in commands:
            if isinstance(command, c.TerminateVms):
                for vm_id in command.vm_ids:
                    self.check_return(vm_id)
        return commands

    def most_events(self) -> int:
        """Return how many events there may be by now."""
        return EVENTS * self.settings.resources.max_vms * (10 + self.faults.total())

    def check_return(self, vm_id: str) -> None:
        """A VM that is well is not fenced; one that can wait is not returned with the
        only copy of a section."""
        vm, record = self.cloud.vms[vm_id], self.vm(vm_id)
        reason = record.return_reason
        if vm_id in self.returned:
            return
        self.returned[vm_id] = self.now_s
        if not vm.doomed and vm_id not in self.unheard:
            assert not reason.startswith("silent"), f"{vm_id} is well: {reason}"
        if self.state.phase is not JobPhase.ACTIVE:
            return
        if reason == "not requested by this job" and vm.alive:  # no list is old
            assert vm_id not in self.asked_for, f"{vm_id} was asked for"
        if not reason.startswith(_CAN_WAIT):
            return
        vms = [v for v in self.cloud.vms.values() if v.alive]
        without = [v for v in vms if v is not vm]
        kept = self.workers.newest_in(without) == self.workers.newest_in(vms)
        saved = max((c.step for c in self.workers.checkpoints), default=0)
        assert kept or saved >= self.workers.committed, f"{vm_id} is the last: {reason}"

    def check_fleet(self) -> None:
        """Nothing is rented that the manager does not know, or that never comes up."""
        if not self.manager_alive or self.now_s - self.began_s < LATE_S:
            return
        for vm in self.cloud.vms.values():
            late = self.now_s - vm.launched_at_s > LATE_S
            if vm.ended_at_s is None and late:
                record = self.vms.get(vm.vm_id)
                assert record is not None, f"{vm.vm_id} is billed and not known"
                since_s = self.returned.get(vm.vm_id, vm.launched_at_s)
                goes = record.phase is VmPhase.RETURNING
                late = record.is_coming or (goes and self.now_s - since_s > LATE_S)
                assert not late, f"{vm.vm_id} is billed and {record.phase}"

    def start_manager(self) -> None:
        self.began_s = self.now_s
        super().start_manager()

    def choose(self, command: c.ComputePlan) -> Choice:
        """Fleets of one size get the same plan, each on its own slots."""
        inputs = command.inputs
        mine = tuple(device.slot for device in inputs.slots)
        size = len(mine), inputs.microbatch_size
        if size not in self.chosen:
            choice = choose_plan(inputs)
            if choice.plan is None:  # it may fit once other VMs hold other sections
                return choice
            self.chosen[size] = mine, choice
        first, choice = self.chosen[size]
        assert choice.plan is not None
        names = dict(zip(first, mine, strict=True))
        slots = tuple(names[slot] for slot in choice.plan.slots)
        return replace(choice, plan=replace(choice.plan, slots=slots))

    # --- What goes wrong --------------------------------------------------------------

    def live(self) -> None:
        """Play until the job is over, through stops and resumes; check what is left."""
        if self.fault_h:
            self.next_fault()
        bound_s = self.now_s + MAX_STRETCH * self.settings.spec.steps * STEP_EVERY_S
        self.run(bound_s - self.now_s)
        while self.finished is not None and self.may_resume(self.finished):
            check_end(self)
            self.finished = None
            self.start_manager()
            self.run_on(bound_s - self.now_s)
        check_end(self)
        assert self.finished is not None
        max_usd = self.settings.budget.max_usd
        if max_usd is not None:
            assert self.cloud.bill_usd(self.now_s) <= max_usd, "over budget"
        if max_usd is None or self.finished.kind != "budget":
            assert self.finished.kind == "succeeded", self.finished
            steps = self.settings.spec.steps
            assert self.step == steps
            assert any(c.step == steps for c in self.workers.checkpoints)

    def may_resume(self, outcome: c.Outcome) -> bool:
        """Return whether a person would resume the job."""
        return outcome.kind == "stopped" or "fix that, then resume" in outcome.reason

    def next_fault(self) -> None:
        draw = self.random

        def strike() -> None:
            self.check_fleet()
            vms = [v for v in self.cloud.vms.values() if v.alive and not v.doomed]
            kind = draw.choice(FAULTS)
            if kind == MARKET or not vms:
                self.market()
                self.faults[MARKET] += 1
            elif FAULT_OF[kind](self, draw.choice(vms)):
                self.faults[kind] += 1
            self.next_fault()

        self.after(draw.expovariate(1 / (self.fault_h * HOUR_S)), strike)

    def kill(self, vm: SimulatedVm) -> bool:
        vm.doomed = True
        self.end_vm(vm.vm_id)
        return True

    def silence(self, vm: SimulatedVm) -> bool:
        vm.doomed = True
        self.freeze_vm(vm.vm_id)
        return True

    def hiccup(self, vm: SimulatedVm) -> bool:
        """Heartbeats are missed for a while; the VM is well."""
        if not self.heard(vm):
            return False
        self.unheard.add(vm.vm_id)
        self.feed(e.VmSilent(at_s=self.now_s, vm_id=vm.vm_id))

        def heard() -> None:
            if self.heard(vm):
                self.feed(e.VmHeard(at_s=self.now_s, vm_id=vm.vm_id))

        self.soon(heard, 2.0)
        return True

    def heard(self, vm: SimulatedVm) -> bool:
        known = self.vms.get(vm.vm_id)
        registered = known is not None and known.phase is VmPhase.READY
        return vm.alive and self.manager_alive and registered

    def storm(self, vm: SimulatedVm) -> bool:
        """A zone takes several VMs at once."""
        self.kill(vm)
        others = [v for v in self.cloud.vms.values() if v.alive and not v.doomed]
        for other in self.random.sample(others, len(others) // 4):
            other.doomed = True
            self.soon(functools.partial(self.end_vm, other.vm_id), 5.0)
        return True

    def notice(self, vm: SimulatedVm) -> bool:
        """An interruption notice that comes true, or is taken back."""
        lead_s = self.random.choice([0.5, 5.0, 30.0, 120.0])
        self.report(vm, messages.InterruptionNoticed(lead_s=lead_s))
        if self.random.random() < 0.3:
            taken_back = messages.InterruptionCancelled()
            self.soon(lambda: self.report(vm, taken_back), lead_s)
        else:
            vm.doomed = True
            self.after(lead_s, lambda: self.end_vm(vm.vm_id))
        return True

    def worker(self, vm: SimulatedVm) -> bool:
        self.workers.worker_dies(Slot(vm_id=vm.vm_id, index=0))
        return True

    def slow(self, vm: SimulatedVm) -> bool:
        """Slow until it is replaced."""
        self.workers.catch_up()
        vm.slowness = self.random.uniform(1.1, 4.0)
        return True

    def sick(self, vm: SimulatedVm) -> bool:
        vm.doomed = True
        self.report(vm, messages.GpuSick(reason="Xid 79"))
        return True

    def market(self) -> None:
        """A zone's price and capacity change."""
        zone = self.random.choice(tuple(self.cloud.capacity))
        self.cloud.capacity[zone] = self.random.randint(0, self.settings.resources.max_vms)
        self.cloud.prices[zone] = self.random.uniform(0.5, 2.0)
        self.changed()

    def manager(self, _: SimulatedVm) -> bool:
        self.kill_manager(down_s=self.random.uniform(0.1, 300.0))
        return True

    def crash(self, _: SimulatedVm) -> bool:
        """The manager dies between an event and what follows from it."""
        self.crash_at = len(self.journal) + self.random.randint(1, 100)
        return True

    def stop(self, _: SimulatedVm | None) -> bool:
        """A person stops the job, and resumes it."""
        if self.manager_alive:
            self.feed(e.StopRequested(at_s=self.now_s, by="a person"))
        return self.manager_alive


FAULT_OF: dict[str, Callable[[LongWorld, SimulatedVm], bool]] = {
    "kill": LongWorld.kill,
    "silence": LongWorld.silence,
    "hiccup": LongWorld.hiccup,
    "storm": LongWorld.storm,
    "notice": LongWorld.notice,
    "worker": LongWorld.worker,
    "slow": LongWorld.slow,
    "sick": LongWorld.sick,
    "manager": LongWorld.manager,
    "crash": LongWorld.crash,
    "stop": LongWorld.stop,
}
MARKET = "market"
FAULTS = (*FAULT_OF, MARKET)


def main() -> None:
    """Play jobs until as many hours are simulated; print what each was, then the sum."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--hours", type=float, default=1000.0, help="simulated, of all")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--vms", type=int, default=32)
    parser.add_argument("--job-hours", type=float, default=100.0, help="of a calm job")
    parser.add_argument("--fault-hours", type=float, default=2.0, help="between faults")
    args = parser.parse_args()
    hours, events, cpu_s, seed = 0.0, 0, 0.0, args.seed
    faults: Counter[str] = Counter()
    failed = 0
    while hours < args.hours:
        job = LongWorld(seed, args.vms, args.job_hours, args.fault_hours)
        start_s, began_s = job.now_s, time.process_time()
        try:
            job.live()
        except (AssertionError, InternalError) as error:
            print(f"seed {seed} fails after {len(job.journal)} events: {error}")
            failed += 1
        hours += (job.now_s - start_s) / HOUR_S
        events += len(job.journal)
        cpu_s += time.process_time() - began_s
        faults += job.faults
        print(
            f"seed {seed}: {(job.now_s - start_s) / HOUR_S:.1f} h, "
            f"{len(job.journal)} events, {job.faults.total()} faults, "
            f"{len(job.cloud.vms)} VMs, {job.epoch} managers",
            flush=True,
        )
        seed += 1
    print(
        f"{hours:.0f} h of {args.vms} VMs, {events / hours:.0f} events/h, "
        f"{hours / cpu_s:.0f} h/s, {cpu_s / events * 1e6:.0f} us/event; faults: "
        + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items()))
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
