"""What the core is told of training: progress, stalls and stragglers.

Ranks report every mini-batch; that is a measurement, and no event. The watches look at
these reports and make events of what decisions depend on. They hold nothing that a journal
must keep: those of a manager that starts begin anew, from the state.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import (
    Generation,
    GenerationPhase,
    RankPhase,
    VmPhase,
)
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.watch.timings import RankTimings
from spottrain.wire.messages import MinibatchCommitted, SkipReason
from spottrain.wire.plan import Slot

WINDOW = 64
"""Newest mini-batches whose median is the time of a step."""
STRAGGLER_WINDOW = 30
"""Newest mini-batches whose median is the time of a step where a VM is slow."""
STALL_S = 120.0
"""A generation that commits nothing for so long is reported, if ``STALLED`` mini-batches
would have taken less."""
STALLED = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportThrottle:
    """How often the core is told of progress."""

    share: float = 0.05
    """Of the time since the generation began to train: young generations more often."""
    least_s: float = 0.5
    most_s: float = 30.0
    """Age that the journal's lower bound of progress may reach."""
    straggler_s: float = 30.0
    """How often a VM that stays slow is reported again."""

    def is_due(self, reported_s: float, since_s: float, now_s: float) -> bool:
        """Return whether progress should be told of.

        Args:
            reported_s: When it was last reported.
            since_s: When the generation began to train.
        """
        wait_s = max(self.least_s, self.share * (now_s - since_s))
        return now_s - reported_s >= min(wait_s, self.most_s)


class Watches:
    """The watches of one job's generation that runs.

    Args:
        pace: How often the core is told of progress.
    """

    def __init__(self, pace: ReportThrottle | None = None) -> None:
        self._throttle = pace or ReportThrottle()
        self.progress: ProgressWatch | None = None
        self.timings: RankTimings | None = None
        self._reported_s: dict[str, float] = {}
        """When each slow VM was reported last."""
        self._looked_s: float | None = None
        """Since when it is looked whether anything is committed."""
        self._stalled_at = (0, 0)
        """Generation and step of the newest stall that was reported."""

    def observe(
        self, state: State, vm_id: str, report: MinibatchCommitted, at_s: float
    ) -> list[e.Event]:
        """Take a report; return what the core must be told now.

        Args:
            state: The state that reports before this one have led to.
            vm_id: Whose agent reports.
            report: Of one rank; another one of the same mini-batch adds nothing.
            at_s: When it arrived, in seconds since the epoch.
        """
        slot = Slot(vm_id=vm_id, index=report.slot)
        generation = _running(state, slot, report.generation)
        if generation is None:
            return []
        progress = self._progress_of(state, generation)
        events = list[e.Event]()
        if progress.observe(state, report, at_s):
            since_s = generation.started_at_s or generation.since_s
            due = self._throttle.is_due(progress.reported_s, since_s, at_s)
            if due or progress.is_urgent(state.job.on_nonfinite.stop_after):
                events.append(progress.report(at_s))
        if state.preparation.profile is not None and self.timings is None:
            self.timings = RankTimings(state, generation, state.preparation.profile)
        timings = self.timings
        if timings is not None and timings.observe(state, generation, slot, report):
            if timings.balancer is not None:
                before = progress.replica_bounds
                progress.replica_bounds = timings.balancer.replica_bounds
                if progress.replica_bounds != before:
                    events.append(progress.report(at_s))
            events += self._stragglers(state, generation, timings, progress, at_s)
        return events

    def pending(self, state: State, at_s: float) -> list[e.Event]:
        """Return the progress that the core was not told of: it precedes every event.

        So a decision is made on the newest progress.
        """
        progress, generation = self.progress, state.training.generation
        if progress is None or generation is None or not progress.has_news:
            return []
        return [progress.report(at_s)] if progress.number == generation.number else []

    def stalled(self, state: State, at_s: float) -> list[e.Event]:
        """Return that the generation commits nothing any more, once."""
        generation, watch = state.training.generation, self.progress
        if generation is None or generation.phase is not GenerationPhase.RUNNING:
            return []
        known = watch if watch and watch.number == generation.number else None
        if self._looked_s is None:
            self._looked_s = at_s
        # What was committed while no manager looked is not known to this one.
        newest_s = known.committed_at_s if known else self._looked_s
        since_s = max(generation.since_s, newest_s)
        step_s = generation.measured_step_s or generation.plan.predicted_step_s
        step = known.step if known else state.history.progress.step
        late_s = max(STALL_S, STALLED * step_s)
        if at_s - since_s < late_s or (generation.number, step) == self._stalled_at:
            return []
        self._stalled_at = generation.number, step
        stalled = e.ProgressStalled(
            at_s=at_s,
            generation=generation.number,
            step=step,
            since_s=since_s,
            step_s=step_s,
        )
        return [stalled]

    def _progress_of(self, state: State, generation: Generation) -> ProgressWatch:
        if self.progress is None or self.progress.number != generation.number:
            self.progress = ProgressWatch(state, generation)
            self.timings, self._reported_s = None, {}
        return self.progress

    def _stragglers(
        self,
        state: State,
        generation: Generation,
        timings: RankTimings,
        progress: ProgressWatch,
        at_s: float,
    ) -> Iterator[e.Event]:
        for straggler in timings.stragglers(state, generation.plan):
            vm_id = generation.plan.slots[straggler.rank].vm_id
            vm = state.fleet.vms.get(vm_id)
            reported_s = self._reported_s.get(vm_id, -math.inf)
            if vm is None or vm.slow is not None:
                continue
            if at_s - reported_s < self._throttle.straggler_s:
                continue
            self._reported_s[vm_id] = at_s
            yield e.StragglerFound(
                at_s=at_s,
                generation=generation.number,
                vm_id=vm_id,
                slowness=straggler.slowness,
                outlying=straggler.outlying,
                observed=len(timings.watch.samples),
                step_s=progress.step_s(STRAGGLER_WINDOW),
                saved_s=timings.watch.saved_s((straggler,)),
            )


class ProgressWatch:
    """How far a generation is.

    A mini-batch counts once a live rank of every section has reported it: Varuna's design
    section 6 (e).

    Args:
        state: With that generation, which has said from which step it trains.
    """

    def __init__(self, state: State, generation: Generation) -> None:
        self.number = generation.number
        start = max(state.history.progress.step, generation.from_step or 0)
        self.step = start
        self.committed_at_s = 0.0
        self.reported_s = -math.inf
        self.has_news = False
        self.replica_bounds: tuple[int, ...] = ()
        self._sections = [start] * generation.plan.num_sections
        self._times_s = deque[float](maxlen=WINDOW)
        self._peak_bytes = 0
        self._every_steps, self._cost_s = 0, 0.0
        """Of checkpoints, as rank 0 says."""
        self._copied_step: int | None = None
        self._loss = math.nan
        self._nonfinite = 0
        self._nonfinite_in_row = state.history.progress.nonfinite_in_row
        self._nonfinite_last: int | None = None
        self._skipped: SkipReason = ""

    def observe(self, state: State, report: MinibatchCommitted, at_s: float) -> bool:
        """Take a rank's report; return whether it completes a mini-batch."""
        self._peak_bytes = max(self._peak_bytes, report.peak_bytes)
        if report.copied_step is not None:
            self._copied_step = max(report.copied_step, self._copied_step or 0)
        if report.checkpoint_every_steps:
            self._every_steps = report.checkpoint_every_steps
            self._cost_s = report.checkpoint_cost_s
        for section in report.sections:
            if 0 <= section < len(self._sections):
                self._sections[section] = max(self._sections[section], report.step)
        step = min(*self._sections, state.job.spec.steps)
        if step <= self.step:
            return False
        self.step, self.committed_at_s, self.has_news = step, at_s, True
        self._loss = report.loss
        self._times_s.append(report.step_s)
        if report.skipped in ("loss", "gradients"):
            self._nonfinite += 1
            self._nonfinite_in_row += 1
            self._nonfinite_last, self._skipped = step, report.skipped
        else:
            self._nonfinite_in_row = 0
        return True

    def is_urgent(self, limit: int) -> bool:
        """Return whether the core must be told at once: a row of mini-batches that change
        nothing has begun, or is as long as ``limit``."""
        return self._nonfinite_in_row == 1 or self._nonfinite_in_row >= limit

    def step_s(self, window: int = WINDOW) -> float:
        """Return the median time of the newest mini-batches."""
        newest = tuple(self._times_s)[-window:]
        return statistics.median(newest) if newest else 0.0

    def report(self, at_s: float) -> e.ProgressMade:
        """Return what the core is told, and note that it was."""
        made = e.ProgressMade(
            at_s=at_s,
            generation=self.number,
            step=self.step,
            committed_at_s=self.committed_at_s,
            loss=self._loss,
            step_s=self.step_s(),
            peak_bytes=self._peak_bytes,
            nonfinite=self._nonfinite,
            nonfinite_in_row=self._nonfinite_in_row,
            nonfinite_last=self._nonfinite_last,
            skipped=self._skipped,
            replica_bounds=self.replica_bounds,
            checkpoint_every_steps=self._every_steps,
            checkpoint_cost_s=self._cost_s,
            copied_step=self._copied_step,
        )
        self.reported_s, self.has_news = at_s, False
        self._nonfinite, self._nonfinite_last, self._skipped = 0, None, ""
        return made


def _running(state: State, slot: Slot, number: int) -> Generation | None:
    """Return the generation that runs, if a live rank of it reports."""
    generation, vm = state.training.generation, state.fleet.vms.get(slot.vm_id)
    if generation is None or generation.number != number or generation.from_step is None:
        return None
    if vm is None or vm.phase is VmPhase.RETURNING:
        return None
    live = generation.ranks.get(slot, RankPhase.GONE) is not RankPhase.GONE
    return generation if live and generation.phase is not GenerationPhase.OPENING else None
