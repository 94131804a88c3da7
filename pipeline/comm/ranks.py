"""Ranks of a plan that exchange tensors. Rank = pipeline * pipeline_depth + stage."""

from __future__ import annotations

from collections.abc import Sequence

from spottrain.wire.model import TiedParameter
from spottrain.wire.plan import Plan


def neighbours(plan: Plan, rank: int) -> tuple[int | None, int | None]:
    """Return the ranks of the stages before and after ``rank``, in its pipeline.

    The stages of an interleaved plan form a ring: what leaves the last stage enters the
    next chunk of the first.
    """
    depth = plan.pipeline_depth
    pipeline, stage = divmod(rank, depth)
    before, after = (pipeline * depth + p % depth for p in (stage - 1, stage + 1))
    ring = plan.chunks > 1
    has_before, has_after = ring or stage > 0, ring or stage < depth - 1
    return before if has_before else None, after if has_after else None


def links_within_vms(plan: Plan) -> list[tuple[int, int]]:
    """Return the directed links between neighbours in one VM: who sends, who receives."""
    found = []
    for rank, slot in enumerate(plan.slots):
        for other in neighbours(plan, rank):
            if other not in (None, rank) and plan.slots[other].vm_id == slot.vm_id:
                found.append((rank, other))
    return list(dict.fromkeys(found))


def tied_ranks(plan: Plan, tied: TiedParameter, pipeline: int) -> tuple[int, ...]:
    """Return the ranks of one pipeline that hold a copy of a tied parameter; where state is
    shared, those of all."""
    if plan.shared_state:
        return tuple(sorted({rank for k in tied.sections for rank in plan.holders_of(k)}))
    stages = dict.fromkeys(plan.stage_of(section) for section in tied.sections)
    return tuple(pipeline * plan.pipeline_depth + stage for stage in stages)


def memberships(plan: Plan, ties: Sequence[TiedParameter]) -> list[tuple[int, ...]]:
    """Return every group that a plan needs, in an order that all ranks share."""
    stages = [plan.stage_ranks(p) for p in range(plan.pipeline_depth)]
    alone = plan.devices_per_stage_replica == 1
    tensor = [] if alone else [plan.tensor_ranks(rank) for rank in range(len(plan.slots))]
    shared = list[tuple[int, ...]]()
    if plan.shared_state:
        shared = [plan.sharers_of(rank) for rank in range(len(plan.slots))]
        shared += [plan.holders_of(section) for section in range(plan.num_sections)]
    return stages + tensor + shared + tie_groups(plan, ties)


def tie_groups(plan: Plan, ties: Sequence[TiedParameter]) -> list[tuple[int, ...]]:
    """Return the groups that sum tied parameters, in an order that all ranks share."""
    pipelines = range(plan.num_pipelines)
    return [tied_ranks(plan, tied, one) for one in pipelines for tied in ties]
