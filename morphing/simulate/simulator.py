"""Simulates a mini-batch under a plan.

``simulate_step`` plays every replica's pipeline
(``replica``) over the links that its placement gives it (``wiring``) and adds what
follows it: reductions (``reducing``), tied parameters, the gather of the commit, the
optimizer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.lists import compact_schedule
from spottrain.morphing.simulate import reducing
from spottrain.morphing.simulate.compute import CPU, Compute, update_s
from spottrain.morphing.simulate.loops.play import TooSlowError
from spottrain.morphing.simulate.replica import (
    Conditions,
    Jitter,
    Link,
    PipelineRun,
    StageTimes,
    busiest_s,
    simulate_pipeline,
)
from spottrain.morphing.simulate.sharing import SharedCores
from spottrain.morphing.simulate.wiring import wire_replicas
from spottrain.wire.model import (
    ModelFacts,
    Network,
    Profile,
    Reduction,
    SectionProfile,
    TaskOverheads,
)
from spottrain.wire.plan import Plan, ScheduleKind, segments_of

NO_OVERHEADS = TaskOverheads(forward_s=0.0, recompute_s=0.0, backward_s=0.0)
SEEDS = range(4)
"""Random seeds over which a prediction under jitter is averaged."""
CALM = 0.005
"""Deviation of a message's time, as a share of a micro-batch's time on the fastest
stage, from which on jitter is simulated. Below, it hardly slows pipelines down."""
MAX_PLAYED_MICROBATCHES = 256
"""Maximum micro-batches per replica that are simulated with jitter; more are slowed
down as these are."""
MAX_PLAYED_REPLICAS = 4
"""Maximum number of replicas with random numbers of their own; more reuse those of the
first."""

MAX_RUNS = 1024
_RUNS: dict[object, PipelineRun] = {}
"""Replicas that were played to their end, for the plans that have them too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Times of one mini-batch under a plan."""

    step_s: float
    pipeline_s: float
    """Time at which the last backward of any replica is done."""
    busy_s: tuple[float, ...]
    """For each stage, of its busiest replica: time in forward, recompute, backward."""
    peak_in_flight: tuple[int, ...]
    network: Network = "auto"
    """What sums gradients, the fastest of those that may."""


def simulate_step(
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    *,
    reduction: Reduction,
    profiles: Sequence[Profile] | None = None,
    seed: int | None = None,
    compute: Compute = CPU,
    sharing: SharedCores | None = None,
    limit_s: float = math.inf,
) -> StepTime:
    """Return the times of one mini-batch under ``plan``.

    If the plan leaves open what sums gradients, the fastest of what may do so. A stage's
    replicas reduce as soon as they have drained; tied parameters are summed once their
    stages have reduced. When all ranks are prepared they gather, then apply (design:
    Commit).

    Args:
        plan: Its ``predicted_step_s`` is not read.
        profile: Links, and times of devices.
        facts: Bytes to reduce and update.
        reduction: See ``Reducer``.
        profiles: Of the devices, in the order of ``plan.slots``; not given: that is
            ``profile`` for all.
        seed: If given, tasks and messages vary at random as they did when measured,
            equally for the same seed; see ``expect_step``.
        compute: What workers compute on: it decides where updates are made.
        sharing: Cores that ranks share: tasks, sums and updates take at least their work
            over the cores, which is a lower bound; not given: each has a core of its own.
        limit_s: It is given up where a pipeline keeps a pace at which it takes longer.

    Raises:
        TooSlowError: It takes longer than ``limit_s``.
    """
    depth, width = plan.pipeline_depth, plan.data_parallel_width
    profiles = [profile] * (depth * width) if profiles is None else profiles
    if len(profiles) != depth * width:
        raise PlanError(
            f"a plan of {depth * width} slots needs as many profiles: got {len(profiles)}"
        )
    between_vms = len({slot.vm_id for slot in plan.slots}) > 1
    gather_s = reducing.gather_s(profile, depth * width * compute.group_size, between_vms)
    applied_s = slowest_update_s(
        plan, profile, facts, profiles, compute, reduction=reduction, sharing=sharing
    )
    reducers = dict(_reducers(plan, profile, reduction, compute))
    stage_bytes = _stage_bytes(plan, facts)
    sums_s = {
        network: [reducer.sum_s(p, size) for p, size in enumerate(stage_bytes)]
        for network, reducer in reducers.items()
    }
    drained_s = limit_s - gather_s - applied_s - min(map(min, sums_s.values()))
    runs = _run_replicas(
        plan, profile, compute, facts, reduction, profiles, seed, drained_s, sharing is not None
    )
    prepared_s: dict[Network, float] = {
        network: _prepared_s(plan, facts, profile, own_s, runs, sharing)
        for network, own_s in sums_s.items()
    }
    network = min(prepared_s, key=prepared_s.__getitem__)
    step_s = prepared_s[network] + gather_s + applied_s
    pipeline_s = max(max(run.finish_s) for run in runs)
    if sharing is not None:
        pipeline_s = max(pipeline_s, sharing.least_s(_task_works_s(runs)))
    return StepTime(
        step_s=step_s,
        pipeline_s=pipeline_s,
        busy_s=tuple(max(run.busy_s[p] for run in runs) for p in range(depth)),
        peak_in_flight=tuple(max(run.peak_in_flight[p] for run in runs) for p in range(depth)),
        network=network,
    )


def _reducers(
    plan: Plan, profile: Profile, reduction: Reduction, compute: Compute
) -> Iterator[tuple[Network, reducing.Reducer]]:
    """Yield all that may sum gradients under ``plan``, the preferred one first."""
    for network in reducing.networks_of(plan, profile, compute):
        yield (
            network,
            reducing.Reducer(plan, profile, reduction, compute, network),
        )


def _stage_bytes(plan: Plan, facts: ModelFacts) -> list[int]:
    """Return the bytes of every stage's parameters."""
    return [
        sum(facts.sections[k].param_bytes for k in plan.sections_of(p))
        for p in range(plan.pipeline_depth)
    ]


def _prepared_s(
    plan: Plan,
    facts: ModelFacts,
    profile: Profile,
    sums: Sequence[float],
    runs: Sequence[PipelineRun],
    sharing: SharedCores | None,
) -> float:
    """Return when all stages have their sums, which take ``sums`` after ``runs``."""
    drained = [max(run.finish_s[p] for run in runs) for p in range(plan.pipeline_depth)]
    reduced = [at_s + sum_s for at_s, sum_s in zip(drained, sums, strict=True)]
    if sharing is not None:
        every = [*sums] * plan.data_parallel_width
        works = [task + own for task, own in zip(_task_works_s(runs), every, strict=True)]
        least_s = sharing.least_s(works)
        reduced = [max(at_s, least_s) for at_s in reduced]
    return _tied_s(plan, facts, profile, reduced)


def _task_works_s(runs: Sequence[PipelineRun]) -> list[float]:
    """Return the time of all tasks of each rank."""
    return [busy_s for run in runs for busy_s in run.busy_s]


def slowest_sums_s(
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    reduction: Reduction,
    compute: Compute,
) -> dict[Network, float]:
    """Return the time of the slowest stage's sum, by all that the plan could have chosen.

    Arguments are those of ``simulate_step``.
    """
    stage_bytes = _stage_bytes(plan, facts)
    undecided = replace(plan, network="auto")
    return {
        network: max(reducer.sum_s(p, size) for p, size in enumerate(stage_bytes))
        for network, reducer in _reducers(undecided, profile, reduction, compute)
    }


def slowest_update_s(
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    profiles: Sequence[Profile],
    compute: Compute = CPU,
    *,
    reduction: Reduction,
    sharing: SharedCores | None = None,
) -> float:
    """Return the time of the slowest update; arguments as of ``simulate_step``."""
    depth, width = plan.pipeline_depth, plan.data_parallel_width
    reducer = reducing.Reducer(plan, profile, reduction, compute)

    def on_device_s(stage: int, device: Profile) -> float:
        own = [facts.sections[k] for k in plan.sections_of(stage)]
        if width * compute.group_size > 1:  # sums on the devices follow all backwards
            beside_s = reducer.sections_s(stage, [s.param_bytes for s in own])
        else:
            size = plan.microbatch_size_of(0)
            measured = reducing.sections_at(device, size, facts, reduction)
            beside_s = [measured[section.index].backward_s for section in own]
        return update_s(device, own, plan.state, compute, beside_s)

    def slowest_s(stage: int) -> float:
        devices = {id(device): device for device in profiles[stage::depth]}
        return max(on_device_s(stage, device) for device in devices.values())

    updates = list(map(slowest_s, range(depth)))
    if sharing is None:
        return max(updates)
    return max(*updates, sharing.least_s(updates * width))


def expect_step(
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    *,
    reduction: Reduction,
    profiles: Sequence[Profile] | None = None,
    compute: Compute = CPU,
    sharing: SharedCores | None = None,
    limit_s: float = math.inf,
) -> StepTime:
    """Return the expected times of a mini-batch where links jitter.

    A pipeline waits for late messages and gains nothing from early ones, so jitter
    slows it down. Arguments are those of ``simulate_step``; where links are calm
    (``CALM``) so is the result, otherwise it is the mean over ``SEEDS``, and never
    less.

    Raises:
        TooSlowError: It takes longer than ``limit_s``.
    """

    def play(plan: Plan, seed: int | None, limit_s: float = math.inf) -> StepTime:
        return simulate_step(
            plan,
            profile,
            facts,
            reduction=reduction,
            profiles=profiles,
            seed=seed,
            compute=compute,
            sharing=sharing,
            limit_s=limit_s,
        )

    calm = play(plan, None, limit_s)
    if _is_calm(plan, profile, profiles or (profile,), compute):
        return calm
    settled = replace(plan, network=calm.network)
    steps = [play(settled, seed) for seed in SEEDS]
    mean_s = statistics.fmean(step.step_s for step in steps)
    drained_s = statistics.fmean(step.pipeline_s for step in steps)
    return replace(
        calm,
        step_s=max(calm.step_s, mean_s),
        pipeline_s=max(calm.pipeline_s, drained_s),
        peak_in_flight=tuple(map(max, zip(*(step.peak_in_flight for step in steps), strict=True))),
    )


def stale_step(
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    *,
    reduction: Reduction,
    profiles: Sequence[Profile] | None = None,
    compute: Compute = CPU,
    sharing: SharedCores | None = None,
) -> StepTime:
    """Return the times of a mini-batch where gradients are stale by one (PipeDream-2BW).

    Pipelines do not drain: each further mini-batch takes what two in a row take longer than
    one, and the update, which shares the device with them unless the CPU makes it for a
    GPU. Commits follow each other, so none can take longer than that. And mini-batch t
    waits for the commit of t - 2: two together take no less than one that is alone.

    Arguments are those of ``expect_step``, and its jitter counts in the same way.
    """
    profiles = [profile] * len(plan.slots) if profiles is None else profiles

    def expect(one: Plan) -> StepTime:
        return expect_step(
            one,
            profile,
            facts,
            reduction=reduction,
            profiles=profiles,
            compute=compute,
            sharing=sharing,
        )

    alone = expect(plan)
    if plan.chunks > 1:  # which a mini-batch has to itself
        return alone
    twice = replace(
        plan,
        network=alone.network,
        minibatch_size=2 * plan.minibatch_size,
        replica_bounds=tuple(2 * at for at in plan.replica_bounds),
    )
    steady_s = expect(twice).pipeline_s - alone.pipeline_s
    if not compute.on_gpu or plan.state == "device":
        steady_s += slowest_update_s(
            plan, profile, facts, profiles, compute, reduction=reduction, sharing=sharing
        )
    commit_s = alone.step_s - alone.pipeline_s
    step_s = max(steady_s, commit_s, alone.step_s / 2)
    return replace(alone, step_s=min(step_s, alone.step_s))


def _is_calm(plan: Plan, profile: Profile, profiles: Sequence[Profile], compute: Compute) -> bool:
    """Return whether messages hardly vary compared with tasks."""
    rows = wire_replicas(plan, profile, compute)
    deviation_s = max(
        (
            link.jitter * (link.latency_s + link.transfer_s)
            for links in {id(row): row for row in rows}.values()
            for link in links
        ),
        default=0.0,
    )
    devices = {id(device): device for device in profiles}.values()
    min_s = min(
        sum(measured[k].forward_s + measured[k].backward_s for k in plan.sections_of(p))
        for measured in (device.sections_at(plan.microbatch_size) for device in devices)
        for p in range(plan.pipeline_depth)
    )
    return deviation_s < CALM * min_s


def stage_times(
    measured: Sequence[SectionProfile],
    run: range,
    overheads: TaskOverheads = NO_OVERHEADS,
    *,
    keeps_graph: bool = False,
    segments: int = 1,
) -> StageTimes:
    """Return the times of a micro-batch on a run of sections.

    All segments but the last are recomputed within the backward. Each further segment
    enters the user's code once more in a forward, and in a backward.

    Args:
        measured: All sections.
        run: Those of the run.
        overheads: Added to each task.
        keeps_graph: Whether forwards keep their tensors for the backward: then they
            take as long as recomputes, which do nothing else.
        segments: In which the run is recomputed.
    """
    own = [measured[k] for k in run]
    *others, last = segments_of(run, segments)
    further_s = len(others) * overheads.recompute_s
    beside_s = {
        "forward": overheads.forward_s + further_s,
        "recompute": overheads.recompute_s,
        "backward": overheads.backward_s + further_s,
    }
    is_last, is_first = own[-1].index == measured[-1].index, own[0].index == measured[0].index
    messages_s = {
        "forward": (not is_last) * overheads.posting_s + (not is_first) * overheads.receiving_s,
        "backward": (not is_first) * overheads.posting_s + (not is_last) * overheads.receiving_s,
    }
    times = {}
    for work in ("forward", "recompute", "backward"):
        taken = [
            (getattr(s, f"{work}_s"), getattr(s, f"{work}_spread"))
            for s in own
            if work != "recompute" or s.index in last
        ]
        if work == "forward" and keeps_graph:
            taken = [
                (max(time_s, s.recompute_s) if s.index in last else time_s, spread)
                for s, (time_s, spread) in zip(own, taken, strict=True)
            ]
        if work == "backward":
            again = (s for s in own if s.index not in last)
            taken += [(s.recompute_s, s.recompute_spread) for s in again]
        parts = [time_s for time_s, _ in taken]
        spreads = [spread for _, spread in taken]
        total_s = sum(parts) + beside_s[work]
        total_s += messages_s.get(work, 0.0)
        varies_s = math.hypot(*(p * s for p, s in zip(parts, spreads, strict=True)))
        times[f"{work}_s"] = total_s
        times[f"{work}_spread"] = varies_s / total_s if total_s else 0.0
    return StageTimes(**times)


def _run_replicas(
    plan: Plan,
    profile: Profile,
    compute: Compute,
    facts: ModelFacts,
    reduction: Reduction,
    profiles: Sequence[Profile],
    seed: int | None,
    limit_s: float,
    each: bool,
) -> list[PipelineRun]:
    """Simulate every replica, equal ones once (with jitter: a few times): ``each`` with the
    micro-batches that it has, or as if equal ones had those of the largest.

    Raises:
        TooSlowError: One of them takes longer than ``limit_s``.
    """
    depth, width = plan.pipeline_depth, plan.data_parallel_width
    counts = [len(plan.microbatches_of(replica)) for replica in range(width)]
    rows = wire_replicas(plan, profile, compute)
    known: dict[object, PipelineRun] = {}
    runs: dict[int, PipelineRun] = {}
    # Those with fewer micro-batches are no longer at them than equal ones with more.
    for replica in sorted(range(width), key=lambda replica: -counts[replica]):
        links, size = rows[replica], plan.microbatch_size_of(replica)
        own = profiles[replica * depth : (replica + 1) * depth]
        chance = seed
        if seed is not None:
            chance = seed + SEEDS.stop * (replica % MAX_PLAYED_REPLICAS)
        # Equal links are one tuple, and equal devices have one profile.
        key = counts[replica] if each else 0, size, tuple(map(id, own)), id(links), chance
        if key not in known:
            if any(max(run.finish_s) > limit_s for run in known.values()):
                raise TooSlowError
            stages = tuple(
                _stage_times(plan, p, device, size, facts, reduction)
                for p, device in enumerate(own)
            )
            known[key] = _play(plan, counts[replica], stages, links, chance, compute, limit_s)
        runs[replica] = known[key]
    return [runs[replica] for replica in range(width)]


def min_messages_s(plan: Plan, profile: Profile, compute: Compute) -> float:
    """Return the least time in which all messages of a mini-batch pass the links and NICs that
    the plan's slots give them."""
    rows = wire_replicas(plan, profile, compute)
    taken_s = {id(row): busiest_s(row) for row in {id(row): row for row in rows}.values()}
    counts = (len(plan.microbatches_of(replica)) for replica in range(len(rows)))
    return max(count * taken_s[id(row)] for count, row in zip(counts, rows, strict=True))


def min_sums_s(
    plan: Plan, profile: Profile, facts: ModelFacts, reduction: Reduction, compute: Compute
) -> list[float]:
    """Return for each stage how long its gradients take to be summed by what is fastest at it."""
    stage_bytes = _stage_bytes(plan, facts)
    every_s = (
        [reducer.sum_s(p, size) for p, size in enumerate(stage_bytes)]
        for _, reducer in _reducers(plan, profile, reduction, compute)
    )
    return [min(own_s) for own_s in zip(*every_s, strict=True)]


def _stage_times(
    plan: Plan, stage: int, device: Profile, size: int, facts: ModelFacts, reduction: Reduction
) -> tuple[StageTimes, ...]:
    """Return the times of each of a stage's runs of sections, for micro-batches of ``size``."""
    measured = reducing.sections_at(device, size, facts, reduction)
    overheads = device.overheads_at(size)
    times = [
        stage_times(
            measured,
            run,
            overheads,
            keeps_graph=not plan.recompute or run.stop == plan.num_sections,
            segments=plan.segments,
        )
        for run in plan.runs_of(stage)
    ]
    if overheads.fetch_s:
        times = _waiting(times, overheads, plan.recompute)
    return tuple(times)


def _waiting(
    stage: Sequence[StageTimes], overheads: TaskOverheads, recompute: bool
) -> list[StageTimes]:
    """Return a stage whose first forward waits for examples that loaders make."""
    busy_s = sum(run.forward_s + run.backward_s for run in stage)
    if recompute:
        busy_s += sum(run.recompute_s for run in stage)
    first, *others = stage
    waits_s = overheads.stall_s(busy_s)
    return [replace(first, forward_s=first.forward_s + waits_s), *others]


def _play(
    plan: Plan,
    count: int,
    stages: tuple[tuple[StageTimes, ...], ...],
    links: tuple[Link, ...],
    seed: int | None,
    compute: Compute,
    limit_s: float,
) -> PipelineRun:
    """Play a replica of ``count`` micro-batches."""
    jitter = None if seed is None else Jitter(seed=seed)
    how = plan.schedule, plan.recompute, plan.chunks, plan.in_flight_bound

    def run(count: int, jitter: Jitter | None) -> PipelineRun:
        return _played(count, stages, links, how, jitter, compute, limit_s)

    depth = plan.pipeline_depth
    brief = max(1, MAX_PLAYED_MICROBATCHES // depth) * depth
    if count <= brief or jitter is None:
        return run(count, jitter)
    calm = run(count, None)
    shaken = zip(run(brief, jitter).finish_s, run(brief, None).finish_s, strict=True)
    slower = max(late_s / early_s for late_s, early_s in shaken)
    return replace(calm, finish_s=tuple(slower * at_s for at_s in calm.finish_s))


def _played(
    count: int,
    stages: tuple[tuple[StageTimes, ...], ...],
    links: tuple[Link, ...],
    how: tuple[ScheduleKind, bool, int, int | None],
    jitter: Jitter | None,
    compute: Compute,
    limit_s: float,
) -> PipelineRun:
    """Play ``count`` micro-batches: plans that differ in their width, their home of state or
    their VMs have many replicas in common."""
    # Ranks that divide matrices must come to the same sums.
    conditions = Conditions.RUNTIME if compute.group_size == 1 else Conditions.STRICT
    key = count, stages, links, how, jitter, compute.on_gpu, conditions
    if key not in _RUNS:
        schedule, recompute, chunks, bound = how
        lists = compact_schedule(schedule, len(stages), count, recompute=recompute, chunks=chunks)
        run = simulate_pipeline(
            lists,
            stages,
            links,
            bound=bound,
            conditions=conditions,
            jitter=jitter,
            asynchronous=compute.on_gpu,
            limit_s=math.inf if jitter else limit_s,
        )
        if len(_RUNS) == MAX_RUNS:
            _RUNS.clear()
        _RUNS[key] = run
    return _RUNS[key]


def _tied_s(plan: Plan, facts: ModelFacts, profile: Profile, reduced_s: Sequence[float]) -> float:
    """Return the time at which tied gradients are summed over their stages."""
    at_s = list(reduced_s)
    for tied, num_bytes in zip(facts.tied, reducing.tied_bytes(facts), strict=True):
        owners = {plan.stage_of(section) for section in tied.sections}
        vms = {plan.slots[p].vm_id for p in owners}
        link = profile.between_vms if len(vms) > 1 else profile.within_vm
        copy_s = num_bytes / link.bandwidth_bytes_per_s + link.latency_s
        end_s = max(at_s[p] for p in owners) + reducing.tied_hops(tied, owners) * copy_s
        for p in owners:
            at_s[p] = end_s
    return max(at_s)
