"""A small model's facts and profile, and plans for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spottrain.morphing.plan.partition import spread
from spottrain.wire.model import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Plan,
    Profile,
    SectionFacts,
    SectionProfile,
    Slot,
)

LATENCY_S, BYTES_PER_S = 0.25, 1000.0
FACTS = ModelFacts(
    fingerprint="model",
    num_parameters=(4 * 800 - 200) // 4,
    blocks="blocks",
    sections=tuple(
        SectionFacts(
            index=i,
            param_bytes=800,
            optimizer_bytes=1600,
            activation_bytes_per_example=0,
        )
        for i in range(4)
    ),
    tied=(),
    dataset_len=1,
    heldout_len=0,
)
PROFILE = Profile(
    fingerprint="model",
    device="device",
    software="software",
    microbatches=(
        MicrobatchProfile(
            microbatch_size=1,
            sections=tuple(
                SectionProfile(
                    index=i,
                    forward_s=1.0,
                    backward_s=2.0,
                    recompute_s=1.0,
                    saved_bytes=0,
                    output_bytes=0,
                )
                for i in range(4)
            ),
        ),
    ),
    optimizer_s_per_byte=0.001,
    within_vm=LinkProfile(latency_s=LATENCY_S, bandwidth_bytes_per_s=BYTES_PER_S),
    between_vms=LinkProfile(latency_s=LATENCY_S, bandwidth_bytes_per_s=BYTES_PER_S),
    origin="written",
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
    ranks = depth * width
    vms = vms or [f"vm{rank}" for rank in range(ranks)]
    values: dict[str, Any] = {
        "pipeline_depth": depth,
        "data_parallel_width": width,
        "microbatch_size": 1,
        "minibatch_size": virtual_nodes,
        "schedule": "gpipe" if chunks == 1 else "interleaved",
        "recompute": False,
        "stage_bounds": tuple(
            4 * run // (depth * chunks) for run in range(depth * chunks + 1)
        ),
        "replica_bounds": spread(virtual_nodes, width),
        "slots": tuple(
            Slot(vm_id=vm, index=list(vms[:rank]).count(vm))
            for rank, vm in enumerate(vms)
        ),
        "predicted_step_s": 0.0,
        "chunks": chunks,
    }
    return Plan(**{**values, **changes})
