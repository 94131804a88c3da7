"""The peak memory of every worker of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from spottrain.morphing.memory.loads import StageLoad, stage_loads
from spottrain.morphing.memory.memory import StageMemory, WorkerTerms
from spottrain.morphing.memory.stage import MemoryModel, Share
from spottrain.morphing.simulate.compute import CPU, Compute
from spottrain.wire.model import ModelFacts, Profile, Reduction
from spottrain.wire.plan import Plan


def rank_bytes(
    facts: ModelFacts,
    profile: Profile,
    plan: Plan,
    reduction: Reduction,
    compute: Compute = CPU,
    profiles: Sequence[Profile] | None = None,
) -> tuple[StageMemory, ...]:
    """Return the peak memory of every worker of ``plan``, by rank.

    Args:
        facts: Of the model.
        profile: Of all devices, where ``profiles`` are not given.
        plan: Who computes what.
        reduction: How gradients are summed up.
        compute: What workers compute on.
        profiles: Of the device of each rank.
    """
    depth = plan.pipeline_depth
    profiles = [profile] * len(plan.slots) if profiles is None else profiles
    loads: dict[int, tuple[StageLoad, ...]] = {}
    ranks = []
    shares = _shares_of(plan)

    @cache
    def of(
        stage: int, load: StageLoad, profile: int, size: int, pipeline: int, share: Share | None
    ) -> StageMemory:
        device = profiles[profile]
        own = MemoryModel.of(
            facts,
            device.sections_at(size),
            plan.runs_of(stage),
            WorkerTerms.of(
                device,
                size,
                reduction=reduction,
                compute=compute,
                state=plan.state,
                nodes=size // plan.microbatch_size,
            ),
            segments=plan.segments,
            width=plan.num_pipelines,
            replica=pipeline,
            share=share,
        )
        return own.under(load)

    numbers = {id(one): number for number, one in enumerate(profiles)}
    for pipeline in range(plan.num_pipelines):
        # Two mini-batches fill a pipeline as one of twice the length does.
        replica = pipeline // plan.devices_per_stage_replica
        count = compute.lanes * len(plan.microbatches_of(replica))
        size = plan.microbatch_size_of(replica)
        if count not in loads:
            loads[count] = stage_loads(
                plan.schedule,
                plan.pipeline_depth,
                count,
                plan.recompute,
                chunks=plan.chunks,
                in_flight_bound=plan.in_flight_bound,
            )
        for p, (load, device) in enumerate(
            zip(loads[count], profiles[pipeline * depth :], strict=False)
        ):
            share = shares[pipeline * depth + p]
            writes = pipeline if share is None else 0  # else what it holds, wherever it is
            ranks.append(of(p, load, numbers[id(device)], size, writes, share))
    return tuple(ranks)


def _shares_of(plan: Plan) -> Sequence[Share | None]:
    """Return what each rank holds, and with how many groups it sums: its stage's ranks, those
    in its VM, and those that hold the same in others."""
    if not plan.shared_state:
        return [None] * len(plan.slots)
    shares: dict[int, Share] = {}
    for stage in range(plan.pipeline_depth):
        held = plan.held_on(stage)
        counts = Counter(plan.slots[rank].vm_id for rank in held)
        for rank, sections in held.items():
            # Where VMs have unequally many, each section is held by other ranks together.
            across = 1 if len(set(counts.values())) == 1 else len(sections)
            inside = int(counts[plan.slots[rank].vm_id] > 1)
            groups = int(len(held) > 1) if len(counts) == 1 else 1 + inside + across
            sharers = counts[plan.slots[rank].vm_id]
            shares[rank] = Share(sections, sharers, plan.devices_per_stage_replica, groups)
    return [shares[rank] for rank in range(len(plan.slots))]
