"""Memory for copies of the state on other VMs, see ``Plan.peer_copies``."""

from __future__ import annotations

from spottrain.morphing.memory.memory import PAGE_BYTES
from spottrain.morphing.memory.room import WorkerBytes
from spottrain.wire.model import ModelFacts
from spottrain.wire.plan import Plan, Slot

ROOMS = 2
"""Copies of a section at once: of a state that is whole, and of the next one; as
``pipeline.state.slot``."""


def state_bytes(facts: ModelFacts, plan: Plan) -> tuple[int, ...]:
    """Return the bytes of each rank's copies of one state: its own, and those it keeps."""
    holders = plan.copy_holders
    own = [
        sum(
            facts.sections[k].param_bytes + facts.sections[k].optimizer_bytes + PAGE_BYTES
            for k in plan.sections_of(rank % plan.pipeline_depth)
        )
        for rank in range(len(holders))
    ]
    return tuple(
        own[rank] + sum(own[r] for r, holder in enumerate(holders) if holder == rank)
        for rank in range(len(holders))
    )


def copy_bytes(facts: ModelFacts, plan: Plan, previous: Plan | None = None) -> tuple[int, ...]:
    """Return the bytes of all copies that each rank of a plan has at most, in host memory.

    Until its own are whole, it keeps those that it had under ``previous``.
    """
    before = {} if previous is None else held_bytes(facts, previous)
    return tuple(
        num_bytes + max(num_bytes * (ROOMS - 1), before.get(slot, 0))
        for slot, num_bytes in zip(plan.slots, state_bytes(facts, plan), strict=False)
    )


def held_bytes(facts: ModelFacts, plan: Plan) -> dict[Slot, int]:
    """Return the bytes of one whole state's copies that each slot of a plan keeps."""
    return dict(zip(plan.slots, state_bytes(facts, plan), strict=False))


def with_copies(needed: WorkerBytes, num_bytes: int, *, on_gpu: bool) -> WorkerBytes:
    """Return what a worker needs with copies, which are never on a GPU."""
    if on_gpu:
        return needed._replace(host=needed.host + num_bytes)
    return needed._replace(device=needed.device + num_bytes)
