"""A trace played in virtual time under a rule: what gets trained, what is lost, and why.

The machine room is the same for every rule, and is what the runtime does. A mini-batch
counts when it is done; one that loses a VM is dropped. Going over to another plan, planned
or not, is a pause: groups form again, and workers new to a stage fetch its state. Planned
morphs come between mini-batches; so does leaving a VM that was said to go, if it stays
that long. While a stage has a holder nothing done is lost; otherwise training goes on
from the newest checkpoint.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Protocol

from spottrain.morphing.errors import PlanError
from spottrain.morphing.replay.shapes import Shape, Shapes
from spottrain.morphing.replay.traces import Trace
from spottrain.wire import Profile


class TimeUse(StrEnum):
    """What a second of the trace went into."""

    TRAINING = "training"
    """Mini-batches that count."""
    DROPPED = "dropped"
    """Mini-batches that were cut short by a loss."""
    RECOMPUTED = "recomputed"
    """Mini-batches that were done and then lost with the last copy of a stage, or to a
    restart."""
    PAUSED = "paused"
    """Going over to another plan."""
    WAITING = "waiting"
    """No plan fits the VMs there are."""
    UNFINISHED = "unfinished"
    """The mini-batch that the end of the trace cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The constants of the machine room: stated guesses, to be varied."""

    morph_s: float = 30.0
    """A pause in which no state moves. Parcae (NSDI 2024) measured 28 to 43 s for taking
    VMs in, of 32 with a V100 each."""
    join_s: float = 60.0
    """From a VM's coming until it can be used: boot, agent, imports."""
    restart_s: float = 300.0
    """Restarting everything from a checkpoint. The artifact of Oobleck (SOSP 2023) has 76
    to 701 s for models of 0.3 to 6.7 billion parameters."""
    checkpoint_every_s: float = 600.0
    """Checkpoints are written in the background, after a mini-batch."""
    notice_s: float = 0.0
    """How long before its loss a VM is said to go; 0: never."""
    debounce_s: float = 2.0
    """See ``policy.Outlook``."""

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            least = 1 if constant.name == "checkpoint_every_s" else 0
            if not (math.isfinite(value) and value >= least):
                raise PlanError(
                    f"{constant.name} must be {least} or more seconds: got {value}"
                )

    def pause_s(self, shape: Shape, profile: Profile, *, moves: bool) -> float:
        """Return the pause before ``shape``; ``moves`` if a worker fetches its state."""
        fetch_s = shape.move_bytes / profile.between_vms.bandwidth_bytes_per_s
        return self.morph_s + (fetch_s if moves else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """What a rule may know: the past, and the VMs that are there."""

    now_s: float
    usable: int
    """VMs that a plan may use."""
    shape: Shape | None
    """What runs, or ran until it broke."""
    changed_at_s: float
    """When usable VMs last came or went."""
    losses_at_s: Sequence[float]
    """When VMs were lost."""
    room: CostModel


class MorphRule(Protocol):
    """Decides; see ``rules``."""

    name: str
    restarts: bool
    """Whether every change throws everything back to the newest checkpoint."""

    def mend(self, view: FleetView) -> Shape | None:
        """Return what to run when nothing does; ``None``: nothing fits."""
        ...

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return what to go over to between two mini-batches; ``None``: go on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What came of one rule."""

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
    """VMs that come, are said to go, and go at one moment."""

    at_s: float
    comes: list[str] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    goes: list[str] = field(default_factory=list)


def replay(
    trace: Trace, shapes: Shapes, rule: MorphRule, room: CostModel
) -> ReplayResult:
    """Play ``trace`` from its first to its last row under ``rule``.

    The same arguments give the same outcome.
    """
    return _Replay(trace, shapes, rule, room).run()


def _changes(trace: Trace, room: CostModel) -> list[_Change]:
    """Return the changes in order; VMs that go before they can be used never come."""
    changes: dict[float, _Change] = {}

    def at(at_s: float) -> _Change:
        return changes.setdefault(at_s, _Change(at_s=at_s))

    for number, vm in enumerate(trace.lives):
        name = f"{vm.vm_id}#{number}"  # a name may come back after it went
        come_s, go_s = vm.from_s + room.join_s, vm.until_s
        if not come_s < go_s:
            continue
        at(come_s).comes.append(name)
        if go_s < math.inf:
            at(max(come_s, go_s - room.notice_s)).leaves.append(name)
            at(go_s).goes.append(name)
    return [changes[at_s] for at_s in sorted(changes) if at_s < trace.end_s]


class _Replay:
    """One trace under one rule."""

    def __init__(
        self, trace: Trace, shapes: Shapes, rule: MorphRule, room: CostModel
    ) -> None:
        self.trace, self.shapes, self.rule, self.room = trace, shapes, rule, room
        self.seconds = dict.fromkeys(TimeUse, 0.0)
        self.now_s = self.since_s = 0.0
        """``since_s``: when the wait, pause or mini-batch of now began."""
        self.usable: dict[str, None] = {}
        """VMs that a plan may use, in the order in which they came."""
        self.leaving: set[str] = set()
        """VMs that were said to go and are still there."""
        self.shape: Shape | None = None
        self.stages: list[list[str]] = []
        """VMs of the plan that runs or is gone over to; empty if none is."""
        self.holders: list[set[str]] = []
        """VMs that hold the newest state of each stage of the plan that ran last; empty
        if the newest state is the checkpoint."""
        self.paused = False
        self.until_s = math.inf
        """When the pause or the mini-batch is over."""
        self.steps_s: list[float] = []
        """Times of the mini-batches since the newest checkpoint."""
        self.saved = 0
        self.save_s = self.room.checkpoint_every_s
        """When the next checkpoint is due: by the clock, so that rules differ by their
        merit and not by when theirs happened to be."""
        self.losses_at_s: list[float] = []
        self.morphs = 0
        self.changed_at_s = 0.0

    def run(self) -> ReplayResult:
        """Play all of it."""
        for change in _changes(self.trace, self.room):
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
            usd=self.trace.vm_s() / 3600 * workload.usd_per_hour,
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
        self.seconds[spent if self.stages else TimeUse.WAITING] += (
            self.now_s - self.since_s
        )
        self.since_s = self.now_s

    # --- What happens by itself -----------------------------------------------------------

    def _begin(self) -> None:
        """The pause is over."""
        self._spend(TimeUse.PAUSED)
        self.paused = False
        self.holders = [set(stage) for stage in self.stages]
        self._step()

    def _step(self) -> None:
        assert self.shape is not None
        self.until_s = self.now_s + self.shape.step_s

    def _finish(self) -> None:
        """A mini-batch is done."""
        assert self.shape is not None
        self._spend(TimeUse.TRAINING)
        self.steps_s.append(self.shape.step_s)
        if self.now_s >= self.save_s:
            self.saved += len(self.steps_s)
            self.steps_s = []
            every_s = self.room.checkpoint_every_s
            self.save_s = (1 + self.now_s // every_s) * every_s
        if not self.leaving.isdisjoint(self._members()):
            self._mend()
        elif (shape := self.rule.leave_for(self._view())) is not None:
            self._open(shape)
        else:
            self._step()

    # --- What is done to it ---------------------------------------------------------------

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
        gone = change.goes
        if self.paused:  # a plan that forms now forms without those that leave
            gone = [*change.goes, *change.leaves]
        broken = not set(gone).isdisjoint(self._members())
        restart = self.rule.restarts and self.changed_at_s == self.now_s
        if restart or not all(self.holders):
            self._roll_back()
            broken = True
        if broken or not self.stages:
            self._mend()

    def _roll_back(self) -> None:
        """Nobody holds the newest state: back to the checkpoint."""
        lost_s = sum(self.steps_s)
        self.seconds[TimeUse.TRAINING] -= lost_s
        self.seconds[TimeUse.RECOMPUTED] += lost_s
        self.steps_s = []
        self.holders = []

    def _mend(self) -> None:
        """Begin anew, with what is there; a mini-batch that runs is dropped."""
        shape = self.rule.mend(self._view())
        if shape is not None:
            self._open(shape)
            return
        self._spend(TimeUse.DROPPED)
        self.stages = []
        self.paused = False
        self.until_s = math.inf

    def _open(self, shape: Shape) -> None:
        """Go over to ``shape``: who holds a stage keeps it, others fill the gaps."""
        self._spend(TimeUse.DROPPED)
        free = dict(self.usable)
        stages: list[list[str]] = [[] for _ in range(shape.depth)]
        if len(self.holders) == shape.depth:
            for stage, holders in zip(stages, self.holders, strict=True):
                stage += [vm for vm in free if vm in holders][: shape.width]
        for vm in itertools.chain.from_iterable(stages):
            del free[vm]
        rest = iter(free)
        moves = any(len(stage) < shape.width for stage in stages)
        for stage in stages:
            stage += itertools.islice(rest, shape.width - len(stage))
        pause_s = self.room.restart_s
        if not self.rule.restarts:
            profile = self.shapes.workload.profile
            pause_s = self.room.pause_s(shape, profile, moves=moves)
        self.shape, self.stages, self.paused = shape, stages, True
        self.until_s = self.now_s + pause_s
        self.morphs += 1

    def _view(self) -> FleetView:
        return FleetView(
            now_s=self.now_s,
            usable=len(self.usable),
            shape=self.shape,
            changed_at_s=self.changed_at_s,
            losses_at_s=self.losses_at_s,
            room=self.room,
        )
