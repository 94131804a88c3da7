"""Traffic of a plan between places (zones, regions) in one mini-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from spottrain.morphing.simulate.compute import NARROW_BYTES
from spottrain.morphing.simulate.reducing import FLOAT32_BYTES
from spottrain.wire.model import ModelFacts, Reduction, WireType
from spottrain.wire.plan import Plan

Place = TypeVar("Place", bound=Hashable)


def sent_bytes(
    plan: Plan,
    facts: ModelFacts,
    places: Mapping[str, Place],
    reduction: Reduction,
    wire: WireType = "own",
) -> Counter[tuple[Place, Place]]:
    """Return the bytes per mini-batch that a plan sends between places.

    Activations and their gradients between stages, and the ring all-reduce of each
    stage's gradients: ``2 (D - 1) / D`` times their size over every link of the ring,
    twice that for exact sums.
    Hand-overs, tied parameters and messages of a few bytes are left out.

    Args:
        plan: Who computes what.
        places: Where each VM of the plan is.
        reduction: How gradients are summed up.
        wire: In which activations travel; facts count those of fp32.

    Returns:
        Bytes both ways together, by the two places, which are never the same.
    """
    at = [places[slot.vm_id] for slot in plan.slots]
    num_bytes: Counter[tuple[Place, Place]] = Counter()
    if len(set(at)) > 1:
        every = _activations(plan, facts, wire), _gradients(plan, facts, reduction)
        for links in every:
            for here, there, count in links:
                if at[here] != at[there]:
                    num_bytes[at[here], at[there]] += count
    return num_bytes


_Links = Iterator[tuple[int, int, int]]
"""Two ranks, and the bytes between them."""


def _activations(plan: Plan, facts: ModelFacts, wire: WireType) -> _Links:
    narrower = 1 if wire == "own" else FLOAT32_BYTES // NARROW_BYTES
    depth, runs = plan.pipeline_depth, plan.pipeline_depth * plan.chunks
    for pipeline in range(plan.num_pipelines):
        replica = pipeline // plan.devices_per_stage_replica
        nodes = plan.replica_bounds[replica + 1] - plan.replica_bounds[replica]
        examples = nodes * plan.microbatch_size
        for run in range(runs - 1):
            here, there = run % depth, (run + 1) % depth
            last = facts.sections[plan.stage_bounds[run + 1] - 1]
            num_bytes = 2 * examples * last.activation_bytes_per_example // narrower
            yield pipeline * depth + here, pipeline * depth + there, num_bytes


def _gradients(plan: Plan, facts: ModelFacts, reduction: Reduction) -> _Links:
    depth, ranks = plan.pipeline_depth, plan.num_pipelines
    for stage in range(depth if ranks > 1 else 0):
        size = sum(
            section.summed_bytes if reduction == "exact" else section.trained_bytes
            for run in range(stage, depth * plan.chunks, depth)
            for section in facts.sections[plan.stage_bounds[run] : plan.stage_bounds[run + 1]]
        )
        num_bytes = 2 * (ranks - 1) * size // ranks
        for one in range(ranks):
            after = (one + 1) % ranks
            yield one * depth + stage, after * depth + stage, num_bytes
