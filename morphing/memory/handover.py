"""What workers hold while sections change their owners, when one plan follows another."""

from __future__ import annotations

from functools import cache

from spottrain.morphing.memory.memory import PAGE_BYTES, gradient_bytes
from spottrain.wire import ModelFacts, Plan, Slot


def handover_bytes(facts: ModelFacts, plan: Plan, previous: Plan) -> tuple[int, ...]:
    """Return what every worker of ``plan`` holds while sections change their owners.

    Until all are where they belong, a worker keeps what it had under ``previous`` beside
    what it is to have, and room to undo an update of the largest of both.
    """
    had: dict[Slot, int] = {
        slot: rank % previous.pipeline_depth for rank, slot in enumerate(previous.slots)
    }
    sizes = [
        section.param_bytes
        + gradient_bytes(facts, section.index)
        + section.optimizer_bytes
        + PAGE_BYTES
        for section in facts.sections
    ]

    @cache
    def held(before: int | None, stage: int) -> int:
        sections = set(plan.sections_of(stage))
        if before is not None:
            sections.update(previous.sections_of(before))
        own = [sizes[k] for k in sections]
        return sum(own) + max(own)

    return tuple(
        held(had.get(slot), rank % plan.pipeline_depth)
        for rank, slot in enumerate(plan.slots)
    )
