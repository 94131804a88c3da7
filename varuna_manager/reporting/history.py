"""The history of a job beyond its state, gathered while its journal is folded.

The core keeps only what decisions need. A reader of the journal passes every event, with
the state before and after, to a ``JobHistory``, which keeps what was done when, and
downsampled series. Its memory grows with VMs, generations and saved checkpoints, and with
mini-batches only since the oldest checkpoint that is kept.

The journal keeps a snapshot of it, for this version of the code alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from spottrain import codec
from spottrain.cloud.port.provider import Offer
from spottrain.codec import from_data, to_data
from spottrain.errors import WireError
from spottrain.eventlog.journal import Snapshot
from spottrain.pricing.prices.place import offer_key
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.core.planning import usable_vms, wants_training
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.reporting import series, time_split
from spottrain.varuna_manager.reporting.series import Bins, Point, downsampled
from spottrain.varuna_manager.reporting.time_split import Activity, Interval
from spottrain.varuna_manager.watch import starts
from spottrain.varuna_manager.watch.starts import VmStarts
from spottrain.wire import messages

MAX_POINTS = 2048
"""Size of a series beyond which it is downsampled."""


@dataclass(slots=True)
class PriceSeries:
    """The price of one offer over time, as far as it was seen."""

    offer: Offer
    """As it was seen first."""
    points: list[Point] = field(default_factory=list)
    """(seconds since the epoch, USD per hour), a new one where the price changed."""
    is_constant: bool = True
    """True if it was in every listing from the first one on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """Something that happened to the job as a whole."""

    at_s: float
    kind: str
    """``manager``, ``stop`` or ``limits``."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveMade:
    """A move to other machines for money, see ``core.moves``."""

    move: records.Move
    ended_s: float | None = None
    """None: it is under way."""
    given_up: str = ""
    """Why it was; empty if it was not."""


@dataclass(slots=True)
class _CurrentInterval:
    """The interval that has not ended yet."""

    since_s: float
    key: tuple[int | None, str]
    activity: Activity
    slots: Mapping[str, int]


def _nothing_yet() -> _CurrentInterval:
    return _CurrentInterval(0.0, (None, "waiting"), "waiting", {})


@dataclass(slots=True)
class JobHistory:
    """The history of a job; see the module."""

    slots: dict[str, int] = field(default_factory=dict)
    """Number of slots by VM, for VMs whose agent has registered."""
    throughput: Bins = field(default_factory=Bins)
    """Examples per second, from commit to commit."""
    prices: dict[str, PriceSeries] = field(default_factory=dict)
    """By ``offer_key``."""
    budgets: list[Point] = field(default_factory=list)
    """The budget over time; infinite without one."""
    milestones: deque[Milestone] = field(default_factory=deque)
    moves: deque[MoveMade] = field(default_factory=deque)
    """For money, the newest last."""
    checkpoints: list[Point] = field(default_factory=list)
    """(time, step) of saved checkpoints; downsampled."""
    step_s: dict[int, float] = field(default_factory=dict)
    """Median time of each generation's mini-batches, from the measurements."""
    starts: VmStarts = field(default_factory=VmStarts)
    _stretches: list[Interval] = field(default_factory=list)
    _open: _CurrentInterval = field(default_factory=_nothing_yet)
    _mark_s: float = 0.0
    """Time of the newest commit, or of the start of its generation's training."""
    _steps: list[int] = field(default_factory=list)
    _step_times: list[float] = field(default_factory=list)
    _looked: bool = False

    def __post_init__(self) -> None:
        self.milestones = deque(self.milestones, records.KEPT)
        self.moves = deque(self.moves, records.KEPT)

    def snapshot(self) -> str:
        """Return all of it as text, for ``replay`` by this version."""
        return json.dumps([_version(), to_data(self)], separators=(",", ":"))

    def note(self, before: State, event: e.Event, after: State) -> None:
        """Record one step of the fold."""
        if after.phase is JobPhase.NEW:
            return
        report = event.report if isinstance(event, e.ReportReceived) else None
        self._follow_steps(before, after, event)
        self.starts.note(before, event, after)
        if not isinstance(event, e.ProgressMade):
            self._follow_slots(after)
            self._follow_moves(before, after)
            self._follow_world(before, event, after)
        self._follow_work(before, after, report)

    def intervals(self, at_s: float) -> list[Interval]:
        """Return what the job did until ``at_s`` (seconds since the epoch), in order."""
        now = self._open
        if at_s <= now.since_s:
            return list(self._stretches)
        last = Interval(from_s=now.since_s, to_s=at_s, activity=now.activity, slots=now.slots)
        return [*self._stretches, last]

    # --- VMs and the world ------------------------------------------------------------

    def _follow_slots(self, after: State) -> None:
        for vm_id, vm in after.fleet.vms.items():
            if vm.num_slots and vm_id not in self.slots:
                self.slots[vm_id] = vm.num_slots

    def _follow_world(self, before: State, event: e.Event, after: State) -> None:
        if after.settings is not before.settings and after.settings is not None:
            limit = after.settings.budget.max_usd
            self.budgets.append((after.now_s, limit or float("inf")))
        match event:
            case e.OffersSeen():
                self._follow_prices(event, after.now_s)
            case e.ManagerStarted(software_version=version):
                again = " again" if self._looked else ""
                text = f"manager started{again}, version {version}"
                self._add_milestone(after.now_s, "manager", text)
            case e.StopRequested(by=by):
                self._add_milestone(after.now_s, "stop", f"stop requested by {by}")
            case e.LimitsChanged(by=by, limits=limits):
                self._add_milestone(after.now_s, "limits", f"{_limits(limits)}, by {by}")
            case e.GrantReceived() if after.last_message != before.last_message:
                self._add_milestone(after.now_s, "limits", after.last_message)
            case e.StepsChanged() | e.CodeUpdated():
                self._add_milestone(event.at_s, "change", after.last_message)
            case e.ClockSet(by_s=by_s):
                self._add_milestone(
                    after.now_s, "manager", f"manager's clock was set by {by_s:+.0f} s"
                )
            case e.ReportReceived(report=messages.CheckpointSaved(step=step)):
                self._follow_checkpoint(step, after)
            case _:
                pass

    def _follow_moves(self, before: State, after: State) -> None:
        if after.fleet.move is before.fleet.move:
            return
        if after.fleet.move is None:
            given_up = (
                after.last_message if after.fleet.move_after_s > before.fleet.move_after_s else ""
            )
            self.moves[-1] = replace(self.moves[-1], ended_s=after.now_s, given_up=given_up)
        elif before.fleet.move is None:
            self.moves.append(MoveMade(move=after.fleet.move))

    def _add_milestone(self, at_s: float, kind: str, text: str) -> None:
        self.milestones.append(Milestone(at_s=at_s, kind=kind, text=text))

    def _follow_prices(self, event: e.OffersSeen, at_s: float) -> None:
        seen = {offer_key(offer): offer for offer in event.offers}
        missing = event.gone if event.only_changes else self.prices.keys() - seen.keys()
        for key in missing:
            if key in self.prices:
                self.prices[key].is_constant = False
        for key, offer in seen.items():
            line = self.prices.setdefault(key, PriceSeries(offer, is_constant=not self._looked))
            if not line.points or line.points[-1][1] != offer.usd_per_hour:
                line.points.append((at_s, offer.usd_per_hour))
            if len(line.points) > 2 * MAX_POINTS:
                line.points = downsampled(line.points, MAX_POINTS)
        self._looked = True

    def _follow_checkpoint(self, step: int, after: State) -> None:
        """Record it; no restore goes back beyond the oldest checkpoint kept."""
        self.checkpoints.append((after.now_s, step))
        if len(self.checkpoints) > 2 * records.KEPT:
            self.checkpoints = self.checkpoints[::2]
        oldest = min((c.step for c in after.preparation.checkpoints), default=0)
        cut = bisect_right(self._steps, oldest) - 1
        if cut > 0:
            del self._steps[:cut], self._step_times[:cut]

    # --- Work -------------------------------------------------------------------------

    def _follow_steps(self, before: State, after: State, event: e.Event) -> None:
        step, now_s = after.history.progress.step, after.now_s
        if step < before.history.progress.step:
            self._discard_after(step)
        elif step == before.history.progress.step:
            return
        elif _starts_generation(event):
            self._count_as_trained()
        else:
            examples = (step - before.history.progress.step) * after.job.spec.minibatch_size
            begun_s = max(self._mark_s, self._open.since_s)
            now_s = after.history.progress.last_commit_at_s or now_s
            if now_s > begun_s:
                self.throughput.add(begun_s, now_s, examples / (now_s - begun_s))
            self._mark_s = now_s
        self._steps.append(step)
        self._step_times.append(now_s)

    def _follow_work(self, before: State, after: State, report: object) -> None:
        key, activity = _activity_of(after)
        if key == self._open.key:
            return
        now_s = after.now_s
        if self._open.activity == "training":
            assert before.training.generation is not None, "what trained is a generation"
            self._end_training(before.training.generation, after, report)
        else:
            self._put(self._open.since_s, now_s, self._open.activity)
        self._open = _CurrentInterval(now_s, key, activity, _slots(after, activity))
        if activity == "training":
            self._mark_s = now_s

    def _end_training(self, generation: records.Generation, after: State, report: object) -> None:
        """Count training until the last commit; later work counts only if all slots
        stopped as requested."""
        mark_s, now_s = max(self._mark_s, self._open.since_s), after.now_s
        self._put(self._open.since_s, mark_s, "training")
        broke = after.training.generation is not None and (
            after.training.generation.phase is records.GenerationPhase.BREAKING
        )
        stops = generation.phase is records.GenerationPhase.STOPPING or generation.done
        if stops or (not broke and isinstance(report, messages.GenerationStopped)):
            lost_until_s = mark_s
        else:
            step_s = generation.measured_step_s or generation.plan.predicted_step_s
            lost_until_s = min(now_s, mark_s + step_s)
        self._put(mark_s, lost_until_s, "lost")
        self._put(lost_until_s, now_s, "morphing")

    def _put(self, from_s: float, to_s: float, activity: Activity) -> None:
        if to_s > from_s:
            interval = Interval(from_s=from_s, to_s=to_s, activity=activity, slots=self._open.slots)
            self._stretches.append(interval)

    def _count_as_trained(self) -> None:
        """Count the mini-batch in flight as trained: it was committed after all."""
        for index in reversed(range(len(self._stretches))):
            one = self._stretches[index]
            if one.activity == "training":
                return
            if one.activity == "lost":
                self._stretches[index] = replace(one, activity="training")
                return

    def _discard_after(self, step: int) -> None:
        """Count what was trained after ``step`` as lost: a restore went back to it."""
        index = bisect_right(self._steps, step)
        since_s = self._step_times[index - 1] if index else 0.0
        del self._steps[index:], self._step_times[index:]
        kept = len(self._stretches)
        while kept and self._stretches[kept - 1].to_s > since_s:
            kept -= 1
        undone, self._stretches[kept:] = self._stretches[kept:], []
        for one in undone:
            if one.activity != "training":
                self._stretches.append(one)
                continue
            if one.from_s < since_s:
                self._stretches.append(replace(one, to_s=since_s))
            lost = replace(one, from_s=max(one.from_s, since_s), activity="lost")
            self._stretches.append(lost)


def read_history(job: JobDir) -> tuple[State, JobHistory]:
    """Return the present state of a job and its history.

    Raises:
        JournalError: The journal is missing or damaged.
    """
    with contextlib.closing(Journal(job.journal, read_only=True)) as journal:
        state, history = replay(journal)
    with contextlib.closing(Measurements(job.measurements, read_only=True)) as measured:
        history.step_s = measured.median_step_s()
    return state, history


def replay(journal: Journal) -> tuple[State, JobHistory]:
    """Return the state that a journal's events lead to, and the job's history.

    Raises:
        JournalError: The journal is damaged.
    """
    state, history, seq = State(), JobHistory(), 0
    if (known := _snapshot(journal)) is not None:
        saved, history = known
        state, seq = saved.state, saved.seq
    for _, step in journal.steps(seq, state):
        history.note(step.before, step.event, step.after)
        state = step.after
    return state, history


def _snapshot(journal: Journal) -> tuple[Snapshot[State], JobHistory] | None:
    """Return the newest snapshot and the history in it, if this version saved it."""
    if (saved := journal.snapshot()) is None:
        return None
    try:
        version, history = json.loads(saved.extra)
        ours = version == _version()
        return (saved, from_data(JobHistory, history)) if ours else None
    except (ValueError, TypeError, WireError):
        return None  # it is damaged; the rows say the same


@functools.cache
def _version() -> str:
    """Return what changes with the code that folds: a history that other code has folded
    is folded again."""
    files = (
        __file__,
        series.__file__,
        starts.__file__,
        time_split.__file__,
        codec.__file__,
    )
    return hashlib.sha256(b"".join(Path(one).read_bytes() for one in files)).hexdigest()


def _starts_generation(event: e.Event) -> bool:
    report = event.report if isinstance(event, e.ReportReceived) else None
    return isinstance(report, messages.GenerationStarted)


def _limits(limits: tuple[Limit, ...]) -> str:
    """Return changed limits as text."""
    return ", ".join(
        f"{one.name} {'removed' if one.value is None else f'set to {one.value:g}'}"
        for one in limits
    )


_TRAINS = (records.GenerationPhase.RUNNING, records.GenerationPhase.STOPPING)


def _activity_of(state: State) -> tuple[tuple[int | None, str], Activity]:
    """Return what a job does, and a key that changes with it or its participants."""
    generation = state.training.generation
    if generation is not None:
        if generation.phase in _TRAINS:
            return (generation.number, "training"), "training"
        return (generation.number, generation.phase.value), "morphing"
    if (round_ := state.preparation.round) is not None:
        return (round_.number, round_.purpose), "preparing"
    activity: Activity = "morphing" if _plans_again(state) else "waiting"
    return (None, activity), activity


def _plans_again(state: State) -> bool:
    """Return whether a job that has trained is about to continue, having enough VMs."""
    answer = state.training.answer
    refused = answer is not None and answer.plan is None and state.training.plan_asked is None
    enough = len(usable_vms(state)) >= max(1, state.job.resources.min_vms)
    trained = state.training.next_generation > 1
    return trained and enough and not refused and wants_training(state)


def _slots(state: State, activity: Activity) -> Mapping[str, int]:
    """Return the number of participating slots by VM."""
    if activity == "waiting":
        return {}
    if (generation := state.training.generation) is not None:
        trains = activity == "training"
        slots = generation.plan.slots if trains else generation.participants
        return Counter(slot.vm_id for slot in slots)
    if activity == "preparing" and (round_ := state.preparation.round) is not None:
        return Counter(slot.vm_id for slot in round_.participants)
    return {vm.vm_id: vm.num_slots for vm in usable_vms(state)}
