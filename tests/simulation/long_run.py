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
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.market import Cloud, SimulatedVm
from tests.simulation.test_simulation import SPEC, check_end, settings
from tests.simulation.world import World

from spottrain.morphing.plan.choose import Choice, choose_plan
from spottrain.units import HOUR_S
from spottrain.cloud.port.provider import Vm
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.errors import InternalError
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.wire import messages
from spottrain.wire.model import Slot

MAX_VMS = 32
STEP_EVERY_S = 20.0
"""About how long a mini-batch takes at the full fleet."""
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
            SPEC, steps=steps, minibatch_size=2 * max_vms, checkpoint_every_steps=540
        )
        super().__init__(
            seed, settings(spec=spec, max_vms=max_vms, hang_s=1e9), cloud
        )
        self.workers.stride = 1_000_000
        self.looking = False
        self.faults: Counter[str] = Counter()
        self.fault_h = fault_h
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
            vm
            for vm in self.shown
            if vm.ended_at_s is None or vm.ended_at_s > self.now_s - SHOWN_S
        ]
        return tuple(vm.listed() for vm in self.shown)

    def launch(self, command: c.LaunchVms) -> None:
        before = len(self.cloud.vms)
        super().launch(command)
        self.shown += list(self.cloud.vms.values())[before:]
        self.changed()

    def end_vm(self, vm_id: str) -> None:
        super().end_vm(vm_id)
        self.changed()

    def choose(self, command: c.ComputePlan) -> Choice:
        """Fleets of one size get the same plan, each on its own slots."""
        inputs = command.inputs
        mine = tuple(device.slot for device in inputs.slots)
        size = len(mine), inputs.microbatch_size
        if size not in self.chosen:
            self.chosen[size] = mine, choose_plan(inputs)
        first, choice = self.chosen[size]
        if choice.plan is None:
            return choice
        names = dict(zip(first, mine, strict=True))
        slots = tuple(names[slot] for slot in choice.plan.slots)
        return replace(choice, plan=replace(choice.plan, slots=slots))

    # --- What goes wrong --------------------------------------------------------------

    def live(self) -> None:
        """Play until the job is over, through stops and resumes; check what is left."""
        if self.fault_h:
            self.next_fault()
        self.run(math.inf)
        while self.finished is not None and self.finished.kind == "stopped":
            check_end(self)
            self.finished = None
            self.start_manager()
            self.run_on(math.inf)
        check_end(self)
        assert self.finished is not None
        assert self.finished.kind == "succeeded", self.finished
        assert self.state.progress.step == self.settings.spec.steps

    def next_fault(self) -> None:
        draw = self.random

        def strike() -> None:
            kind = draw.choice(FAULTS)
            vms = [v for v in self.cloud.vms.values() if v.alive and not v.doomed]
            if vms and FAULT_OF[kind](self, draw.choice(vms)):
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
        self.feed(e.VmSilent(at_s=self.now_s, vm_id=vm.vm_id))

        def heard() -> None:
            if self.heard(vm):
                self.feed(e.VmHeard(at_s=self.now_s, vm_id=vm.vm_id))

        self.soon(heard, 2.0)
        return True

    def heard(self, vm: SimulatedVm) -> bool:
        known = self.state.vms.get(vm.vm_id)
        registered = known is not None and known.phase is VmPhase.READY
        return vm.alive and self.manager_alive and registered

    def storm(self, vm: SimulatedVm) -> bool:
        """A zone takes several VMs at once."""
        self.kill(vm)
        others = [v for v in self.cloud.vms.values() if v.alive and not v.doomed]
        for other in self.random.sample(others, len(others) // 4):
            self.after(self.random.uniform(0.0, 5.0), functools.partial(self.kill, other))
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
        self.report(vm, messages.GpuSick(reason="Xid 79"))
        return True

    def market(self, vm: SimulatedVm) -> bool:
        """A zone's price and capacity change."""
        zone = vm.offer.zone
        self.cloud.capacity[zone] = self.random.randint(0, self.settings.max_vms)
        self.cloud.prices[zone] = self.random.uniform(0.5, 2.0)
        self.changed()
        return True

    def manager(self, _: SimulatedVm) -> bool:
        self.kill_manager(down_s=self.random.uniform(0.1, 300.0))
        return True

    def crash(self, _: SimulatedVm) -> bool:
        """The manager dies between an event and what follows from it."""
        self.crash_at = len(self.journal) + self.random.randint(1, 100)
        return True

    def stop(self, _: SimulatedVm) -> bool:
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
    "market": LongWorld.market,
    "manager": LongWorld.manager,
    "crash": LongWorld.crash,
    "stop": LongWorld.stop,
}
FAULTS = tuple(FAULT_OF)


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
    while hours < args.hours:
        job = LongWorld(seed, args.vms, args.job_hours, args.fault_hours)
        start_s, began_s = job.now_s, time.process_time()
        try:
            job.live()
        except (AssertionError, InternalError) as error:
            print(f"seed {seed} fails after {len(job.journal)} events: {error}")
            sys.exit(1)
        hours += (job.now_s - start_s) / HOUR_S
        events += len(job.journal)
        cpu_s += time.process_time() - began_s
        faults += job.faults
        print(
            f"seed {seed}: {(job.now_s - start_s) / HOUR_S:.1f} h, "
            f"{len(job.journal)} events, {job.faults.total()} faults, "
            f"{len(job.cloud.vms)} VMs, {job.epoch} managers"
        )
        seed += 1
    print(
        f"{hours:.0f} h of {args.vms} VMs, {events / hours:.0f} events/h, "
        f"{hours / cpu_s:.0f} h/s, {cpu_s / events * 1e6:.0f} us/event; faults: "
        + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items()))
    )


if __name__ == "__main__":
    main()
