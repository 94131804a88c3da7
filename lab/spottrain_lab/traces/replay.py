"""Replays a trace in virtual time under a morph rule: useful training, losses, reasons.

The cost model is the same for every rule, and follows the runtime. A mini-batch counts
when it is done; one that loses a VM is dropped. A morph, planned or not, is a pause:
groups form again, and workers new to a stage fetch its state. Planned morphs happen
between mini-batches; so does leaving a VM with a notice, if it stays that long. While
every stage has a holder nothing is lost; otherwise training goes on from the newest
checkpoint. Where a shape is redundant (``Shape.covered_step_s``), the VM before a lost one
in its pipeline takes over its stage, and the mini-batch goes on.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Protocol

from spottrain.morphing.errors import PlanError
from spottrain.units import HOUR_S
from spottrain.wire.model import Profile
from spottrain_lab.traces.shapes import Shape, Shapes
from spottrain_lab.traces.traces import Trace


class TimeUse(StrEnum):
    """Use of a second of the trace."""

    TRAINING = "training"
    """Mini-batches that count."""
    DROPPED = "dropped"
    """Mini-batches that were cut short by a loss."""
    RECOMPUTED = "recomputed"
    """Mini-batches that were committed and then lost with the last copy of a stage, or
    to a restart."""
    PAUSED = "paused"
    """Morphing to another plan."""
    WAITING = "waiting"
    """No plan fits the available VMs."""
    UNFINISHED = "unfinished"
    """The mini-batch that the end of the trace cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The constants of a replay: stated assumptions, to be varied."""

    morph_s: float = 30.0
    """A pause in which no state moves. Parcae (NSDI 2024) measured 28 to 43 s for taking
    VMs in, of 32 with a V100 each."""
    join_s: float = 60.0
    """From a VM's start until it can be used: boot, agent, imports."""
    restart_s: float = 300.0
    """Restarting everything from a checkpoint. The artifact of Oobleck (SOSP 2023) has 76
    to 701 s for models of 0.3 to 6.7 billion parameters."""
    checkpoint_every_s: float = 600.0
    """Checkpoints are written in the background, after a mini-batch."""
    notice_s: float = 0.0
    """Lead time of a preemption notice; 0: there are none."""
    debounce_s: float = 2.0
    """See ``policy.FleetOutlook``."""

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            least = 1 if constant.name == "checkpoint_every_s" else 0
            if not (math.isfinite(value) and value >= least):
                raise PlanError(f"{constant.name} must be {least} or more seconds: got {value}")

    def pause_s(self, shape: Shape, profile: Profile, *, moves: bool) -> float:
        """Return the pause before ``shape``; ``moves`` if a worker fetches its state."""
        fetch_s = shape.move_bytes / profile.between_vms.bandwidth_bytes_per_s
        return self.morph_s + (fetch_s if moves else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The facts a rule may know: the past, and the VMs that are there."""

    now_s: float
    usable: int
    """VMs that a plan may use."""
    shape: Shape | None
    """The shape that runs, or ran until it broke."""
    changed_at_s: float
    """Time of the last change of the usable VMs."""
    losses_at_s: Sequence[float]
    """Times at which VMs were lost."""
    counts: Sequence[tuple[float, int]]
    """The usable VMs so far: since when, and how many."""
    covered: int
    """Stages of pipelines that a neighbour's VM does beside its own."""
    costs: CostModel


class MorphRule(Protocol):
    """A rule that decides on morphs; see ``rules``."""

    name: str
    restarts: bool
    """True if every change restarts everything from the newest checkpoint."""

    def recover(self, view: FleetView) -> Shape | None:
        """Return the shape to run when none runs; ``None``: none fits."""
        ...

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return the shape to morph to between two mini-batches; ``None``: go on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Outcome of one rule."""

    rule: str
    examples: int
    """Useful ones."""
    seconds: dict[TimeUse, float]
    """They add up to the trace's length."""
    morphs: int
    usd: float

    @property
    def examples_per_usd(self) -> float:
        """Examples for a dollar; infinite if VMs cost nothing."""
        return self.examples / self.usd if self.usd else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """VMs that join, get a notice, or are lost at one moment."""

    at_s: float
    comes: list[str] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    goes: list[str] = field(default_factory=list)


def replay(trace: Trace, shapes: Shapes, rule: MorphRule, costs: CostModel) -> ReplayResult:
    """Play ``trace`` from its first to its last row under ``rule``.

    The same arguments give the same outcome.
    """
    return _Replay(trace, shapes, rule, costs).run()


def _changes(trace: Trace, costs: CostModel) -> list[_Change]:
    """Return the changes in order; VMs lost before they can be used are left out."""
    changes: dict[float, _Change] = {}

    def at(at_s: float) -> _Change:
        return changes.setdefault(at_s, _Change(at_s=at_s))

    for number, vm in enumerate(trace.lives):
        name = f"{vm.vm_id}#{number}"  # a name may be used again
        come_s, go_s = vm.from_s + costs.join_s, vm.until_s
        if not come_s < go_s:
            continue
        at(come_s).comes.append(name)
        if go_s < math.inf:
            at(max(come_s, go_s - costs.notice_s)).leaves.append(name)
            at(go_s).goes.append(name)
    return [changes[at_s] for at_s in sorted(changes) if at_s < trace.end_s]


class _Replay:
    """One trace under one rule."""

    def __init__(self, trace: Trace, shapes: Shapes, rule: MorphRule, costs: CostModel) -> None:
        self.trace, self.shapes, self.rule, self.costs = trace, shapes, rule, costs
        self.seconds = dict.fromkeys(TimeUse, 0.0)
        self.now_s = self.since_s = 0.0
        """``since_s``: when the wait, pause or mini-batch of now began."""
        self.usable: dict[str, None] = {}
        """VMs that a plan may use, in the order in which they came."""
        self.leaving: set[str] = set()
        """VMs with a notice that are still there."""
        self.shape: Shape | None = None
        self.stages: list[list[str]] = []
        """VMs of the plan that runs or is morphed to, in the order of the pipelines; empty
        if there is none."""
        self.covered = 0
        self.holders: list[set[str]] = []
        """VMs that hold the newest state of each stage of the plan that ran last; empty
        if the newest state is the checkpoint."""
        self.paused = False
        self.until_s = math.inf
        """End of the pause or of the mini-batch."""
        self.steps_s: list[float] = []
        """Times of the mini-batches since the newest checkpoint."""
        self.saved = 0
        self.save_s = self.costs.checkpoint_every_s
        """Time of the next checkpoint: by the clock, so that rules differ by their
        merit and not by when their checkpoints happened to be."""
        self.losses_at_s: list[float] = []
        self.morphs = 0
        self.changed_at_s = 0.0
        self.counts: list[tuple[float, int]] = []

    def run(self) -> ReplayResult:
        """Play all of it."""
        for change in _changes(self.trace, self.costs):
            self._play_until(change.at_s)
            self._apply(change)
        self._play_until(self.trace.end_s)
        self.now_s = self.trace.end_s
        self._spend(TimeUse.UNFINISHED)
        workload = self.shapes.workload
        return ReplayResult(
            rule=self.rule.name,
            examples=(self.saved + len(self.steps_s)) * workload.minibatch_size,
            seconds=self.seconds,
            morphs=self.morphs,
            usd=self.trace.vm_s() / HOUR_S * workload.usd_per_hour,
        )

    def _play_until(self, end_s: float) -> None:
        while self.until_s <= end_s:
            self.now_s = self.until_s
            if self.paused:
                self._begin()
            else:
                self._finish()
        self.now_s = end_s

    def _members(self) -> Iterator[str]:
        """Return the VMs of the plan."""
        return itertools.chain.from_iterable(self.stages)

    def _spend(self, running: TimeUse) -> None:
        """Book the time since the last booking; ``running`` if a mini-batch ran."""
        spent = TimeUse.PAUSED if self.paused else running
        use = spent if self.stages else TimeUse.WAITING
        self.seconds[use] += self.now_s - self.since_s
        self.since_s = self.now_s

    # --- Mini-batches and pauses ------------------------------------------------------

    def _begin(self) -> None:
        """End a pause: begin to train."""
        self._spend(TimeUse.PAUSED)
        self.paused = False
        self.holders = [set(stage) for stage in self.stages]
        self._step()

    def _step(self) -> None:
        self.until_s = self.now_s + self._step_s()

    def _step_s(self) -> float:
        assert self.shape is not None
        return self.shape.covered_step_s if self.covered else self.shape.step_s

    def _finish(self) -> None:
        """Commit a mini-batch."""
        self.steps_s.append(self.now_s - self.since_s)
        self._spend(TimeUse.TRAINING)
        if self.now_s >= self.save_s:
            self.saved += len(self.steps_s)
            self.steps_s = []
            every_s = self.costs.checkpoint_every_s
            self.save_s = (1 + self.now_s // every_s) * every_s
        if not self.leaving.isdisjoint(self._members()):
            self._recover()
        elif (shape := self.rule.leave_for(self._view())) is not None:
            self._open(shape)
        else:
            self._step()

    # --- Changes of the fleet ---------------------------------------------------------

    def _apply(self, change: _Change) -> None:
        self.usable |= dict.fromkeys(change.comes)
        for vm in change.leaves:
            del self.usable[vm]
        self.leaving |= set(change.leaves)
        self.leaving -= set(change.goes)
        for holders in self.holders:
            holders -= set(change.goes)
        if change.goes:
            self.losses_at_s.append(self.now_s)
        if change.comes or change.leaves:
            self.changed_at_s = self.now_s
            self.counts.append((self.now_s, len(self.usable)))
        gone = change.goes
        if self.paused:  # a plan that forms now does without those that leave
            gone = [*change.goes, *change.leaves]
        broken = not set(gone).isdisjoint(self._members())
        if broken and not self.paused and self._covers(set(gone)):
            return
        restart = self.rule.restarts and self.changed_at_s == self.now_s
        if restart or not self._has_every_stage():
            self._roll_back()
            broken = True
        if broken or not self.stages:
            self._recover()

    def _has_every_stage(self) -> bool:
        """Return whether somebody holds the newest state of each stage, if anybody does."""
        if self.shape is None or self.shape.covered_step_s == math.inf:
            return all(self.holders)
        return all(
            holders or self.holders[number - 1] for number, holders in enumerate(self.holders)
        )

    def _covers(self, gone: set[str]) -> bool:
        """Let the VMs before those that are gone do their stages, too, if all can.

        A VM can do one more stage. The running mini-batch goes on at the new speed.
        """
        if self.shape is None or self.shape.covered_step_s == math.inf:
            return False
        stages = [list(stage) for stage in self.stages]
        for number, stage in enumerate(self.stages):
            for pipeline, vm in enumerate(stage):
                if vm in gone:
                    stages[number][pipeline] = self.stages[number - 1][pipeline]
        taken = Counter(itertools.chain.from_iterable(stages))
        if not gone.isdisjoint(taken) or max(taken.values()) > 2:
            return False
        left = (self.until_s - self.now_s) / self._step_s()
        self.stages = stages
        self.covered = sum(count - 1 for count in taken.values())
        for holders, stage in zip(self.holders, stages, strict=True):
            holders |= set(stage)
        self.until_s = self.now_s + left * self._step_s()
        return True

    def _roll_back(self) -> None:
        """Go back to the checkpoint, as nobody holds the newest state."""
        lost_s = sum(self.steps_s)
        self.seconds[TimeUse.TRAINING] -= lost_s
        self.seconds[TimeUse.RECOMPUTED] += lost_s
        self.steps_s = []
        self.holders = []

    def _recover(self) -> None:
        """Start again on the VMs that are left; a running mini-batch is dropped."""
        shape = self.rule.recover(self._view())
        if shape is not None:
            self._open(shape)
            return
        self._spend(TimeUse.DROPPED)
        self.stages = []
        self.paused = False
        self.until_s = math.inf

    def _open(self, shape: Shape) -> None:
        """Morph to ``shape``: holders of a stage keep it, others fill the gaps."""
        self._spend(TimeUse.DROPPED)
        free = dict(self.usable)
        stages: list[list[str]] = [[] for _ in range(shape.depth)]
        if len(self.holders) == shape.depth:
            for stage, holders in zip(stages, self.holders, strict=True):
                stage += [vm for vm in free if vm in holders][: shape.width]
                for vm in stage:
                    del free[vm]
        rest = iter(free)
        moves = any(len(stage) < shape.width for stage in stages)
        for stage in stages:
            stage += itertools.islice(rest, shape.width - len(stage))
        pause_s = self.costs.restart_s
        if not self.rule.restarts:
            profile = self.shapes.workload.profile
            pause_s = self.costs.pause_s(shape, profile, moves=moves)
        self.shape, self.stages, self.paused = shape, stages, True
        self.covered = 0
        self.until_s = self.now_s + pause_s
        self.morphs += 1

    def _view(self) -> FleetView:
        return FleetView(
            now_s=self.now_s,
            usable=len(self.usable),
            shape=self.shape,
            changed_at_s=self.changed_at_s,
            losses_at_s=self.losses_at_s,
            counts=self.counts,
            covered=self.covered,
            costs=self.costs,
        )
