"""Simulated workers: they hold sections, train, stop, break and hang; no mathematics."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.builders import (
    a_profile,
    generation_started,
    microbatch_profile,
    minibatch_committed,
    section_profile,
)
from tests.simulation.market import SimulatedVm

from spottrain.manifest import CheckpointEntry
from spottrain.morphing.adapt.checkpointing import CheckpointInterval
from spottrain.morphing.adapt.stragglers import expected_busy_s
from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.wire import messages
from spottrain.wire.model import ModelFacts, Profile
from spottrain.wire.plan import Slot

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(frozen=True)
class Stretch:
    """Mini-batches that a generation is at, without anything happening in between."""

    since_s: float
    step_s: float
    count: int
    busy: list[tuple[float, int]]
    """Time and micro-batches of every rank in each of them."""


@dataclass
class Group:
    """The workers of one generation."""

    order: messages.RunGeneration
    arrived: set[Slot] = field(default_factory=set)
    training: set[Slot] = field(default_factory=set)
    step: int | None = None
    stop: messages.StopGeneration | None = None
    broken: bool = False
    known: dict[str, messages.ShareMinibatch] = field(default_factory=dict)
    """The newest share that each VM knows."""
    share: messages.ShareMinibatch | None = None
    """What all ranks follow, if not the plan's."""
    stretch: Stretch | None = None
    expected_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By stage and micro-batches: what the profile predicts."""
    full: Slot | None = None
    """The first slot whose device is smaller than its worker really needs."""

    interval: CheckpointInterval = field(init=False)
    saving: bool = False
    saved: int = 0
    """Step of the newest checkpoint."""

    def __post_init__(self) -> None:
        order = self.order
        self.interval = CheckpointInterval(
            order.checkpoint_losses_per_s,
            order.plan.predicted_step_s,
            order.checkpoint_cost_s,
        )
        self.saved = int(order.checkpoint.split("-")[1])

    def steps_to_save(self, every_steps: int) -> int:
        """Return after how many mini-batches the next checkpoint begins."""
        assert self.step is not None
        if every_steps:
            return every_steps - self.step % every_steps
        return self.interval.every_steps - (self.step - self.saved)

    def is_save_due(self, every_steps: int) -> bool:
        """Return whether a checkpoint begins, as the first rank finds."""
        left = self.steps_to_save(every_steps)
        return left == every_steps if every_steps else left <= 0

    @property
    def bounds(self) -> tuple[int, ...]:
        return (self.share or self.order.plan).replica_bounds

    def change_over(self) -> None:
        """Follow the newest share if every VM knows the same."""
        vms = {slot.vm_id for slot in self.order.plan.slots}
        shares = {self.known.get(vm_id) for vm_id in vms}
        if len(shares) == 1:
            self.share = shares.pop()

    @property
    def number(self) -> int:
        return self.order.generation


class Workers:
    """All workers of the job, wherever they run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups: dict[int, Group] = {}
        self.checkpoints: list[CheckpointEntry] = []
        self.committed = 0
        self.noise = random.Random(0)
        self.shared = 0
        self.fails_to_measure = False
        self.load = self.measured_load = 1.0
        """How many times longer everything takes on busy machines: now, and when the model was
        measured."""
        """Commands to share a mini-batch anew."""
        self.save_s = 0.0
        """By how much a checkpoint prolongs the mini-batch after it."""
        self.memory_factor = 1.0
        """Real memory of workers over what the planner predicts."""
        self.stride = 1
        """Mini-batches that may pass at once while nothing happens."""
        self.unsaved = 0.0
        """Share of checkpoints that cannot be written."""

    def vm(self, slot: Slot) -> SimulatedVm:
        return self.world.cloud.vms[slot.vm_id]

    # --- Commands ---------------------------------------------------------------------

    def obey(self, vm_id: str, order: messages.Command) -> None:
        vm = self.world.cloud.vms[vm_id]
        if not vm.alive:
            return
        self.catch_up()
        report, soon = self.world.report, self.world.soon
        match order:
            case messages.Initialise(participants=participants):
                if vm_id == participants[0].vm_id:
                    soon(lambda: self.save(vm, 0, 0), 3.0)
            case messages.Calibrate(generation=number, participants=participants):
                self.measured_load = self.load
                profile = profile_of(self.world.settings.facts, self.load)
                calibrated = messages.Calibrated(profile=profile, generation=number)
                if vm_id == participants[0].vm_id:
                    soon(lambda: self.measure(vm, participants, calibrated), 3.0)
            case messages.OpenStore(generation=number):
                opened = messages.StoreOpened(generation=number, host="h", port=1)
                soon(lambda: report(vm, opened))
            case messages.RunGeneration():
                self.join(vm, order)
            case messages.StopGeneration(generation=number) if number in self.groups:
                self.groups[number].stop = order
            case messages.ShareMinibatch(generation=number) if number in self.groups:
                self.shared += 1
                known = self.groups[number].known
                if vm_id not in known or known[vm_id].number < order.number:
                    known[vm_id] = order
            case messages.AbandonGeneration(generation=number) if number in self.groups:
                self.abandon(vm, self.groups[number])
            case _:
                pass

    def measure(
        self, vm: SimulatedVm, slots: tuple[Slot, ...], calibrated: messages.Calibrated
    ) -> None:
        """A round comes to its end only if all its participants still live."""
        if all(self.vm(slot).alive for slot in slots) and not self.fails_to_measure:
            self.world.report(vm, calibrated)
        elif vm.alive:
            broken = messages.GenerationBroken(
                generation=calibrated.generation,
                slot=slots[0].index,
                reason="a peer is gone",
            )
            self.world.report(vm, broken)

    def join(self, vm: SimulatedVm, order: messages.RunGeneration) -> None:
        """All participants must come before training begins; doubles are ignored."""
        group = self.groups.setdefault(order.generation, Group(order))
        mine = {slot for slot in order.participants if slot.vm_id == vm.vm_id}
        if mine <= group.arrived:
            return
        group.arrived |= mine
        if group.arrived == set(order.participants):
            self.world.soon(lambda: self.hand_over(group), 2.0)

    def hand_over(self, group: Group) -> None:
        """Agree on a version that every section is held at, else load a checkpoint."""
        if group.broken or not all(self.vm(s).alive for s in group.order.participants):
            return  # it hangs until it is broken from outside
        # One with a frozen rank commits nothing any more.
        rivals = [g for g in self.groups.values() if g.training and self.trains(g)]
        assert not rivals, "never two generations at once"
        step = self.newest_version(group)
        loaded = step is None
        if step is None:
            self.check_restore()
            names = {c.name: c.step for c in self.checkpoints}
            step = names[group.order.checkpoint]
            assert step == max(names.values()), "the newest checkpoint is restored"
        else:
            assert step == self.committed, "no committed mini-batch is lost"
        self.committed = group.step = step
        plan = group.order.plan
        group.training = set(plan.slots)
        group.full = self.full_slot(group)
        for rank, slot in enumerate(plan.slots):
            sections = plan.held_by(rank)
            self.vm(slot).memory[slot.index] = (step, frozenset(sections))
            started = generation_started(
                step,
                generation=group.number,
                slot=slot.index,
                restored=bool(loaded),
            )
            self.report(slot, started)
        if plan.data_parallel_width == 1 and group.saved < step < self.world.settings.spec.steps:
            self.start_saving(group)
        self.begin(group)

    def newest_version(self, group: Group) -> int | None:
        return self.newest_of(
            self.vm(slot).memory[slot.index]
            for slot in group.order.participants
            if slot.index in self.vm(slot).memory
        )

    def newest_in(self, vms: Iterable[SimulatedVm]) -> int | None:
        return self.newest_of(each for vm in vms for each in vm.memory.values())

    def newest_of(self, held: Iterable[tuple[int, frozenset[int]]]) -> int | None:
        """The newest version if every section is held at it."""
        held = tuple(held)
        newest = max((version for version, _ in held), default=None)
        covered = {s for version, own in held if version == newest for s in own}
        full = len(self.world.settings.facts.sections)
        return newest if len(covered) == full else None

    def check_restore(self) -> None:
        """A checkpoint is loaded only if VMs that are there and heard hold no state.

        VMs in a region that the job leaves are out of reach, and have saved theirs.
        """
        move = self.world.move
        is_far = move is not None and move.is_far
        near, far = list[SimulatedVm](), list[SimulatedVm]()
        for vm_id, record in self.world.vms.items():
            vm = self.world.cloud.vms[vm_id]
            heard = record.phase is VmPhase.READY and record.silent_since_s is None
            if heard and vm.alive:
                (far if is_far and record.successor else near).append(vm)
        held = self.newest_in(near)
        assert held is None or held < self.committed, "memory is forgotten"
        held, saved = self.newest_in(far), max(c.step for c in self.checkpoints)
        assert held is None or held <= saved, "what is left behind was saved"

    # --- Training ---------------------------------------------------------------------

    def begin(self, group: Group) -> None:
        """Begin mini-batches: in each all wait for the slowest replica."""
        plan, spec = group.order.plan, self.world.settings.spec
        if group.full is not None:
            self.run_out(group, group.full)
            return
        busy = self.busy(group)
        expected_s = max(
            self.expected_s(group, stage, len(plan.virtual_nodes_of(replica)))
            for stage in range(plan.pipeline_depth)
            for replica in range(plan.data_parallel_width)
        )
        step_s = plan.predicted_step_s * max(s for s, _ in busy) / expected_s
        step_s *= self.load / self.measured_load
        assert group.step is not None
        step_s += self.save_s * group.saving
        to_save = group.steps_to_save(spec.checkpoint_every_steps)
        stride = 1 if group.saving else self.stride
        count = max(1, min(stride, to_save, spec.steps - group.step))
        self.train_on(group, Stretch(self.world.now_s, step_s, count, busy))

    def train_on(self, group: Group, stretch: Stretch) -> None:
        group.stretch = stretch
        end_s = stretch.since_s + stretch.count * stretch.step_s
        self.world.after(end_s - self.world.now_s, lambda: self.train(group, stretch))

    def catch_up(self) -> None:
        """Something happens: commit the mini-batches that have passed, finish the one
        that has begun, and look again."""
        for group in self.groups.values():
            stretch = group.stretch
            if stretch is None or stretch.count == 1 or not self.trains(group):
                continue
            passed = int((self.world.now_s - stretch.since_s) / stretch.step_s)
            passed = min(passed, stretch.count - 1)
            if passed:
                self.commit(group, stretch, passed)
            since_s = stretch.since_s + passed * stretch.step_s
            self.train_on(group, replace(stretch, since_s=since_s, count=1))

    def trains(self, group: Group) -> bool:
        """Return whether no rank is frozen or gone."""
        return not group.broken and all(self.vm(s).alive for s in group.training)

    def expected_s(self, group: Group, stage: int, count: int) -> float:
        if (stage, count) not in group.expected_s:
            plan, profile = group.order.plan, profile_of(self.world.settings.facts)
            expected_s = expected_busy_s(plan, profile, stage, count, count)
            group.expected_s[stage, count] = expected_s
        return group.expected_s[stage, count]

    def busy(self, group: Group) -> list[tuple[float, int]]:
        """Time and micro-batches of every rank in one mini-batch."""
        plan = group.order.plan
        rows = []
        for rank, slot in enumerate(plan.slots):
            replica, stage = divmod(rank, plan.pipeline_depth)
            count = group.bounds[replica + 1] - group.bounds[replica]
            busy_s = self.expected_s(group, stage, count)
            noise = self.noise.uniform(0.95, 1.05)
            rows.append((busy_s * self.vm(slot).slowness * noise, count))
        return rows

    def train(self, group: Group, stretch: Stretch) -> None:
        """The end of a stretch; nothing moves while a rank is frozen or gone."""
        if group.stretch is not stretch or not self.trains(group):
            return
        assert group.step is not None
        spec = self.world.settings.spec
        if group.step < spec.steps:
            self.commit(group, stretch, stretch.count)
            group.interval.observe(stretch.step_s, saving=False)
            group.saving = False
        group.stretch = None
        done = group.step >= spec.steps
        wished = group.stop is not None and group.stop.checkpoint
        if done or wished or group.is_save_due(spec.checkpoint_every_steps):
            self.start_saving(group)
        if done or group.stop is not None:
            self.stopped(group, done=done)
        else:
            group.change_over()
            self.begin(group)

    def commit(self, group: Group, stretch: Stretch, count: int) -> None:
        """Commit mini-batches; ranks report the last of them."""
        plan = group.order.plan
        chosen = not self.world.settings.spec.checkpoint_every_steps
        assert group.step is not None
        group.step += count
        self.committed = step = group.step
        for rank, slot in enumerate(plan.slots):
            sections = plan.held_by(rank)
            self.vm(slot).memory[slot.index] = (step, frozenset(sections))
            busy_s, microbatches = stretch.busy[rank]
            self.report(
                slot,
                replace(
                    minibatch_committed(
                        step,
                        generation=group.number,
                        slot=slot.index,
                        sections=sections,
                        loss=10.0 / step,
                        step_s=stretch.step_s,
                        busy_s=busy_s,
                        microbatches=microbatches,
                    ),
                    recomputes=microbatches,
                    checkpoint_every_steps=(
                        group.interval.every_steps if chosen and not rank else 0
                    ),
                    checkpoint_cost_s=(group.interval.cost_s if chosen and not rank else 0.0),
                ),
            )

    def stopped(self, group: Group, *, done: bool) -> None:
        slots, group.training = group.order.plan.slots, set()
        assert group.step is not None
        for slot in slots:
            self.report(
                slot,
                messages.GenerationStopped(
                    generation=group.number,
                    slot=slot.index,
                    step=group.step,
                    done=done,
                ),
            )

    def start_saving(self, group: Group) -> None:
        assert group.step is not None
        group.saving, group.saved = True, group.step
        group.interval.begin(0.0)
        order = group.order
        self.save(self.vm(order.plan.slots[0]), group.step, order.generation)

    def save(self, vm: SimulatedVm, step: int, generation: int) -> None:
        if not vm.alive:
            return
        may_fail = self.unsaved and self.checkpoints
        if may_fail and self.world.random.random() < self.unsaved:
            failed = messages.CheckpointFailed(step=step, reason="no space left")
            self.world.report(vm, failed)
            return
        name = f"step-{step}-g{generation}-{len(self.checkpoints):08x}"
        self.checkpoints.insert(0, CheckpointEntry(name=name, step=step))
        self.world.report(vm, messages.CheckpointSaved(name=name, step=step))

    # --- What goes wrong ----------------------------------------------------------------

    def vm_gone(self, vm: SimulatedVm) -> None:
        for group in self.groups.values():
            # A donor that has handed over is not needed any more.
            needed = group.arrived if group.step is None else group.training
            if any(s.vm_id == vm.vm_id for s in needed):
                group.training = {s for s in group.training if s.vm_id != vm.vm_id}
                self.break_up(group)

    def worker_dies(self, slot: Slot) -> None:
        self.catch_up()
        for group in self.groups.values():
            if slot in group.training and self.vm(slot).alive:
                group.training.discard(slot)
                self.report(slot, self.death(group, slot))
                self.break_up(group)

    def full_slot(self, group: Group) -> Slot | None:
        plan, job = group.order.plan, self.world.settings
        ranks = rank_bytes(job.facts, profile_of(job.facts), plan, job.spec.reduction)
        for slot, memory in zip(plan.slots, ranks, strict=True):
            needed = self.memory_factor * memory.total_bytes
            if needed > self.vm(slot).offer.gpu_memory_bytes:
                return slot
        return None

    def run_out(self, group: Group, slot: Slot) -> None:
        """A worker's device has no memory left."""
        group.training.discard(slot)
        self.report(
            slot,
            messages.OutOfMemory(
                generation=group.number,
                slot=slot.index,
                section=0,
                microbatch_size=group.order.plan.microbatch_size,
                requested_bytes=1 << 20,
                device_bytes=self.vm(slot).offer.gpu_memory_bytes,
                during="forward",
            ),
        )
        self.leave(group, slot)
        self.break_up(group)

    def break_up(self, group: Group) -> None:
        """Survivors notice at once, late, or hang until they are told to give up."""
        group.broken = True
        for slot in sorted(group.training):
            if self.world.random.random() < 0.7:
                self.world.soon(lambda slot=slot: self.leave(group, slot), 2.0)  # type: ignore[misc]
        if not group.training:  # it broke while sections were moved
            group.training = set()
            for slot in sorted(group.arrived & set(group.order.plan.slots)):
                self.world.soon(lambda slot=slot: self.leave(group, slot), 2.0)  # type: ignore[misc]

    def leave(self, group: Group, slot: Slot) -> None:
        group.training.discard(slot)
        broken = messages.GenerationBroken(
            generation=group.number, slot=slot.index, reason="a peer is gone"
        )
        self.report(slot, broken)

    def abandon(self, vm: SimulatedVm, group: Group) -> None:
        group.broken = True
        for slot in sorted(group.order.plan.slots):
            if slot.vm_id == vm.vm_id:
                group.training.discard(slot)
                self.report(slot, self.death(group, slot))

    def death(self, group: Group, slot: Slot) -> messages.WorkerDied:
        return messages.WorkerDied(generation=group.number, slot=slot.index, reason="killed")

    def report(self, slot: Slot, report: messages.Report) -> None:
        """Every slot's reports leave in the order in which they were made."""
        self.world.report(self.vm(slot), report)


@functools.cache
def profile_of(facts: ModelFacts, load: float = 1.0) -> Profile:
    """Every section takes the same time, on a busy machine ``load`` times as long."""
    sections = (
        section_profile(
            section.index, forward_s=0.5 * load, saved_bytes=1 << 20, output_bytes=1 << 10
        )
        for section in facts.sections
    )
    return a_profile(
        microbatch_profile(replace(s, forward_spread=load - 1) for s in sections),
        fingerprint=facts.fingerprint,
        device="simulated",
    )
