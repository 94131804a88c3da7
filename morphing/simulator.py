"""What a mini-batch takes under a plan: an event simulation of the very schedule lists.

``simulate_pipeline`` plays one replica's lists with the executor's own ``next_task``.
``simulate_step`` adds what follows the pipeline: reductions, the gather of the commit,
the optimizer. Time runs in whole nanoseconds, so that what happens at the same instant
is seen at the same instant.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedule import (
    Progress,
    StageSchedule,
    Task,
    Work,
    make_schedule,
    next_task,
)
from spottrain.wire import ModelFacts, Plan, Profile, Reduction

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What one micro-batch takes on one stage."""

    forward_s: float
    recompute_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a micro-batch takes between two neighbouring stages, either way.

    A direction carries one message at a time: it is taken for ``transfer_s``, and the
    message arrives ``latency_s`` after that.
    """

    latency_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """One replica's mini-batch; a value for each stage."""

    finish_s: tuple[float, ...]
    """When the stage has done its last backward."""
    busy_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What one mini-batch takes under a plan."""

    step_s: float
    pipeline_s: float
    """When the last backward of any replica is done."""
    busy_s: tuple[float, ...]
    """For each stage, of its busiest replica: time in forward, recompute, backward."""
    peak_in_flight: tuple[int, ...]


def simulate_pipeline(
    lists: Sequence[StageSchedule],
    stages: Sequence[StageTimes],
    links: Sequence[Link],
    *,
    bound: int | None = None,
) -> PipelineRun:
    """Play one replica's lists to the end.

    Args:
        lists: One list of tasks a stage.
        stages: One a stage.
        links: One between each two neighbouring stages.
        bound: Most micro-batches in flight on any stage; for each stage that of its
            list if not given.
    """
    return _Pipeline(lists, stages, links, bound).run()


def simulate_step(
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    *,
    reduction: Reduction,
    speeds: Sequence[float] | None = None,
) -> StepTime:
    """Return what one mini-batch takes under ``plan``.

    A stage's replicas reduce as soon as they have drained; tied parameters are summed
    once their stages have reduced. When all ranks are prepared they gather, then
    apply (design: Commit).

    Args:
        plan: Its ``predicted_step_s`` is not read.
        profile: Times on a device of speed 1.
        facts: Bytes to reduce and update.
        reduction: ``fast``: a ring all-reduce a stage. ``exact``: the sum goes from
            replica to replica, then is broadcast by a tree.
        speeds: Of the devices, in the order of ``plan.slots``; 1 for all if not given.
    """
    depth, width = plan.pipeline_depth, plan.data_parallel_width
    speeds = [1.0] * (depth * width) if speeds is None else speeds
    if len(speeds) != depth * width or min(speeds) <= 0:
        raise PlanError(
            f"a plan of {depth * width} slots needs as many speeds above 0: "
            f"got {list(speeds)}"
        )
    runs = _run_replicas(plan, profile, speeds)
    stage_bytes = [
        sum(facts.sections[k].param_bytes for k in plan.sections_of(p))
        for p in range(depth)
    ]
    reduced = [
        _reduced_s(
            [run.finish_s[p] for run in runs], stage_bytes[p], profile, reduction
        )
        for p in range(depth)
    ]
    prepared_s = _tied_s(plan, facts, profile, reduced)
    gather_s = (depth * width - 1) * profile.link_latency_s
    apply_s = profile.optimizer_s_per_byte * max(
        stage_bytes[rank % depth] / speed for rank, speed in enumerate(speeds)
    )
    return StepTime(
        step_s=prepared_s + gather_s + apply_s,
        pipeline_s=max(max(run.finish_s) for run in runs),
        busy_s=tuple(max(run.busy_s[p] for run in runs) for p in range(depth)),
        peak_in_flight=tuple(
            max(run.peak_in_flight[p] for run in runs) for p in range(depth)
        ),
    )


def stage_times(profile: Profile, sections: range, speed: float) -> StageTimes:
    """Return what a micro-batch takes on a stage of ``sections`` at ``speed``."""
    own = profile.sections[sections.start : sections.stop]
    return StageTimes(
        forward_s=sum(s.forward_s for s in own) / speed,
        recompute_s=sum(s.recompute_s for s in own) / speed,
        backward_s=sum(s.backward_s for s in own) / speed,
    )


def least_step_s(
    plan: Plan, profile: Profile, recomputes: Sequence[int], speeds: Sequence[float]
) -> float:
    """Return what ``simulate_step`` cannot fall below, at a fraction of its cost.

    No stage of replica 0, which has the most micro-batches, is faster than the way of
    the first activation to it, all its tasks, and the way of the last gradient back.

    Args:
        plan: As for ``simulate_step``.
        profile: As for ``simulate_step``.
        recomputes: Of each stage of replica 0, at least.
        speeds: As for ``simulate_step``.
    """
    count = len(plan.virtual_nodes_of(0))
    least_s = way_s = 0.0
    for p, link in enumerate([*_links(plan, profile), None]):
        times = stage_times(profile, plan.sections_of(p), speeds[p])
        once_s = times.forward_s + times.backward_s
        busy_s = count * once_s + recomputes[p] * times.recompute_s
        least_s = max(least_s, way_s + busy_s)
        if link is not None:
            way_s += once_s + 2 * (link.latency_s + link.transfer_s)
    return least_s


def _links(plan: Plan, profile: Profile) -> list[Link]:
    """Return the links between neighbouring stages."""
    return [
        Link(
            latency_s=profile.link_latency_s,
            transfer_s=profile.sections[bound - 1].output_bytes
            / profile.link_bandwidth_bytes_per_s,
        )
        for bound in plan.stage_bounds[1:-1]
    ]


def _run_replicas(
    plan: Plan, profile: Profile, speeds: Sequence[float]
) -> list[PipelineRun]:
    """Simulate every replica, those that are alike once."""
    depth = plan.pipeline_depth
    links = _links(plan, profile)
    lists: dict[int, tuple[StageSchedule, ...]] = {}
    known: dict[tuple[int, tuple[float, ...]], PipelineRun] = {}
    runs = []
    for replica in range(plan.data_parallel_width):
        count = len(plan.virtual_nodes_of(replica))
        own = tuple(speeds[replica * depth : (replica + 1) * depth])
        if (count, own) not in known:
            if count not in lists:
                lists[count] = make_schedule(
                    plan.schedule, depth, count, recompute=plan.recompute
                )
            stages = [
                stage_times(profile, plan.sections_of(p), own[p]) for p in range(depth)
            ]
            known[count, own] = simulate_pipeline(lists[count], stages, links)
        runs.append(known[count, own])
    return runs


def _ring_s(ranks: int, num_bytes: float, profile: Profile) -> float:
    """Return the time of a ring all-reduce (2 (n - 1) messages of 1/n of the bytes)."""
    message_s = num_bytes / ranks / profile.link_bandwidth_bytes_per_s
    return 2 * (ranks - 1) * (profile.link_latency_s + message_s)


def _reduced_s(
    drained_s: Sequence[float], num_bytes: int, profile: Profile, reduction: Reduction
) -> float:
    """Return when a stage's replicas, drained at ``drained_s``, have their sum."""
    width = len(drained_s)
    if reduction == "fast":
        return max(drained_s) + _ring_s(width, num_bytes, profile)
    send_s = profile.link_latency_s + num_bytes / profile.link_bandwidth_bytes_per_s
    summed_s = drained_s[0]
    for own_s in drained_s[1:]:
        summed_s = max(own_s, summed_s + send_s)
    return summed_s + math.ceil(math.log2(width)) * send_s


def _tied_s(
    plan: Plan, facts: ModelFacts, profile: Profile, reduced_s: Sequence[float]
) -> float:
    """Return when tied gradients are summed over their stages, one after the other.

    Facts do not say how large a tied parameter is, but what sections count beyond the
    distinct parameters (of 4 bytes an element) is theirs; it is shared out evenly.
    """
    at_s = list(reduced_s)
    counted = sum(s.param_bytes for s in facts.sections)
    excess = max(0, counted - FLOAT32_BYTES * facts.num_parameters)
    extra_uses = sum(len(tied.sections) - 1 for tied in facts.tied)
    for tied in facts.tied:
        owners = {plan.stage_of(section) for section in tied.sections}
        if len(owners) > 1:
            begin_s = max(at_s[p] for p in owners)
            end_s = begin_s + _ring_s(len(owners), excess / extra_uses, profile)
            for p in owners:
                at_s[p] = end_s
    return max(at_s)


NANOSECONDS = 10**9
_DONE, _ACTIVATION, _GRADIENT = range(3)


class _Pipeline:
    """The events of one replica."""

    def __init__(
        self,
        lists: Sequence[StageSchedule],
        stages: Sequence[StageTimes],
        links: Sequence[Link],
        bound: int | None,
    ) -> None:
        last = len(lists) - 1
        self.last = last
        self.progress = [
            Progress(tasks, first=p == 0, last=p == last, bound=bound)
            for p, tasks in enumerate(lists)
        ]
        self.forward = [round(times.forward_s * NANOSECONDS) for times in stages]
        self.recompute = [round(times.recompute_s * NANOSECONDS) for times in stages]
        self.backward = [round(times.backward_s * NANOSECONDS) for times in stages]
        self.latency = [round(link.latency_s * NANOSECONDS) for link in links]
        self.transfer = [round(link.transfer_s * NANOSECONDS) for link in links]
        self.free = {_ACTIVATION: [0] * last, _GRADIENT: [0] * last}
        """When each direction of each link has carried what it was given so far."""
        self.events: list[tuple[int, int, int]] = []
        """Heap of (time, stage, what)."""
        self.running: list[Task | None] = [None] * (last + 1)
        self.busy = [0] * (last + 1)
        self.finish = [0] * (last + 1)

    def run(self) -> PipelineRun:
        """Play all events."""
        events, progress = self.events, self.progress
        for p in range(self.last + 1):
            self._start(p, 0)
        while events:
            now = events[0][0]
            touched = set()
            # All that happens at an instant is known before anything starts at it.
            while events and events[0][0] == now:
                _, p, what = heapq.heappop(events)
                touched.add(p)
                if what == _DONE:
                    self._finish(p, now)
                elif what == _ACTIVATION:
                    progress[p].activations += 1
                else:
                    progress[p].gradients += 1
            for p in touched:
                if self.running[p] is None:
                    self._start(p, now)
        return PipelineRun(
            finish_s=tuple(at / NANOSECONDS for at in self.finish),
            busy_s=tuple(time / NANOSECONDS for time in self.busy),
            peak_in_flight=tuple(p.peak_in_flight for p in progress),
        )

    def _start(self, p: int, now: int) -> None:
        task = next_task(self.progress[p])
        if task is None:
            return
        self.running[p] = task
        work = task.work
        if work is Work.FORWARD:
            duration = self.forward[p]
        else:
            duration = self.backward[p] if work is Work.BACKWARD else self.recompute[p]
        self.busy[p] += duration
        heapq.heappush(self.events, (now + duration, p, _DONE))

    def _finish(self, p: int, now: int) -> None:
        task = self.running[p]
        assert task is not None
        self.running[p] = None
        self.finish[p] = now
        self.progress[p].completed(task)
        if task.work is Work.FORWARD and p < self.last:
            self._send(p, p + 1, _ACTIVATION, now)
        elif task.work is Work.BACKWARD and p > 0:
            self._send(p - 1, p - 1, _GRADIENT, now)

    def _send(self, link: int, to: int, what: int, now: int) -> None:
        free = self.free[what]
        free[link] = max(now, free[link]) + self.transfer[link]
        heapq.heappush(self.events, (free[link] + self.latency[link], to, what))
