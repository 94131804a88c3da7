"""A small model's facts and profile, and plans for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.builders import (
    a_link,
    a_plan,
    a_profile,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
    slots_of,
)

from spottrain.morphing.memory.memory import StageMemory
from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.plan.partition import spread
from spottrain.morphing.simulate.compute import CPU, Compute
from spottrain.wire.model import ModelFacts, Profile, Reduction
from spottrain.wire.plan import Plan

LATENCY_S, BYTES_PER_S = 0.25, 1000.0
FACTS = model_facts(
    (section_facts(i, param_bytes=800, optimizer_bytes=1600) for i in range(4)),
    num_parameters=(4 * 800 - 200) // 4,
)
PROFILE = a_profile(
    microbatch_profile(section_profile(i) for i in range(4)),
    optimizer_s_per_byte=0.001,
    between_vms=a_link(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S),
    written=True,
)


def profile_of(profile: Profile, output_bytes: int = 0, **changes: Any) -> Profile:
    """Return ``profile`` with changes, and activations of a size."""
    sections = [replace(s, output_bytes=output_bytes) for s in profile.sections_at(1)]
    measured = replace(profile.microbatches[0], sections=tuple(sections))
    return replace(profile, microbatches=(measured,), **changes)


def plan(
    depth: int,
    width: int,
    virtual_nodes: int,
    vms: Sequence[str] = "",
    chunks: int = 1,
    **changes: Any,
) -> Plan:
    """Return an even plan; ``vms`` names that of every rank, each its own if not given."""
    even: dict[str, Any] = {
        "num_sections": 4,
        "replica_bounds": spread(virtual_nodes, width),
        "slots": slots_of(vms) if vms else None,
        "schedule": "gpipe" if chunks == 1 else "interleaved",
        "recompute": False,
        "chunks": chunks,
    }
    return a_plan(depth, width, **{**even, **changes})


def plan_bytes(
    facts: ModelFacts,
    profile: Profile,
    plan: Plan,
    reduction: Reduction,
    compute: Compute = CPU,
) -> tuple[StageMemory, ...]:
    """Return the peak memory of the largest worker of each stage of ``plan``."""
    ranks = rank_bytes(facts, profile, plan, reduction, compute)
    return tuple(
        max(ranks[p :: plan.pipeline_depth], key=lambda memory: memory.needed)
        for p in range(plan.pipeline_depth)
    )
