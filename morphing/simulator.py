"""What a mini-batch takes under a plan.

``simulate_step`` plays every replica's pipeline (``replica``) and adds what follows it:
reductions, the gather of the commit, the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spottrain.morphing.errors import PlanError
from spottrain.morphing.lists import Schedule, compact_schedule
from spottrain.morphing.replica import (
    Conditions,
    Jitter,
    Link,
    PipelineRun,
    StageTimes,
    simulate_pipeline,
)
from spottrain.wire import ModelFacts, Plan, Profile, Reduction, SectionProfile

__all__ = [
    "Conditions",
    "Jitter",
    "Link",
    "PipelineRun",
    "StageTimes",
    "StepTime",
    "least_step_s",
    "simulate_pipeline",
    "simulate_step",
    "stage_times",
]

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What one mini-batch takes under a plan."""

    step_s: float
    pipeline_s: float
    """When the last backward of any replica is done."""
    busy_s: tuple[float, ...]
    """For each stage, of its busiest replica: time in forward, recompute, backward."""
    peak_in_flight: tuple[int, ...]


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
    gather_s = (depth * width - 1) * profile.between_vms.latency_s
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


def stage_times(
    measured: Sequence[SectionProfile], sections: Iterable[int], speed: float
) -> StageTimes:
    """Return what a micro-batch takes on a stage of ``sections`` at ``speed``."""
    own = [measured[k] for k in sections]
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
    measured = profile.sections_at(plan.microbatch_size)
    least_s = way_s = 0.0
    for p, link in enumerate([*_links(plan, profile), None]):
        times = stage_times(measured, plan.sections_of(p), speeds[p])
        once_s = times.forward_s + times.backward_s
        busy_s = count * once_s + recomputes[p] * times.recompute_s
        least_s = max(least_s, way_s + busy_s)
        if link is not None:
            way_s += once_s + 2 * (link.latency_s + link.transfer_s)
    return least_s


def _links(plan: Plan, profile: Profile) -> list[Link]:
    """Return the links between neighbouring stages."""
    link, measured = profile.between_vms, profile.sections_at(plan.microbatch_size)
    return [
        Link(
            latency_s=link.latency_s,
            transfer_s=measured[bound - 1].output_bytes / link.bandwidth_bytes_per_s,
        )
        for bound in plan.stage_bounds[1:-1]
    ]


def _run_replicas(
    plan: Plan, profile: Profile, speeds: Sequence[float]
) -> list[PipelineRun]:
    """Simulate every replica, those that are alike once."""
    depth = plan.pipeline_depth
    links = _links(plan, profile)
    measured = profile.sections_at(plan.microbatch_size)
    lists: dict[int, Schedule] = {}
    known: dict[tuple[int, tuple[float, ...]], PipelineRun] = {}
    runs = []
    for replica in range(plan.data_parallel_width):
        count = len(plan.virtual_nodes_of(replica))
        own = tuple(speeds[replica * depth : (replica + 1) * depth])
        if (count, own) not in known:
            if count not in lists:
                lists[count] = compact_schedule(
                    plan.schedule, depth, count, recompute=plan.recompute
                )
            stages = [
                stage_times(measured, plan.sections_of(p), own[p]) for p in range(depth)
            ]
            known[count, own] = simulate_pipeline(lists[count], stages, links)
        runs.append(known[count, own])
    return runs


def _ring_s(ranks: int, num_bytes: float, profile: Profile) -> float:
    """Return the time of a ring all-reduce (2 (n - 1) messages of 1/n of the bytes)."""
    link = profile.between_vms
    message_s = num_bytes / ranks / link.bandwidth_bytes_per_s
    return 2 * (ranks - 1) * (link.latency_s + message_s)


def _reduced_s(
    drained_s: Sequence[float], num_bytes: int, profile: Profile, reduction: Reduction
) -> float:
    """Return when a stage's replicas, drained at ``drained_s``, have their sum."""
    width = len(drained_s)
    if reduction == "fast":
        return max(drained_s) + _ring_s(width, num_bytes, profile)
    link = profile.between_vms
    send_s = link.latency_s + num_bytes / link.bandwidth_bytes_per_s
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
