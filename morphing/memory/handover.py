"""Memory of workers while sections change their owners."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cache

from spottrain.morphing.memory.copies import held_bytes, with_copies
from spottrain.morphing.memory.memory import PAGE_BYTES
from spottrain.morphing.memory.room import WorkerBytes
from spottrain.morphing.simulate.compute import CPU, Compute, trained_bytes
from spottrain.wire.model import ModelFacts
from spottrain.wire.plan import Plan


def handover_bytes(
    facts: ModelFacts,
    plan: Plan,
    previous: Plan,
    compute: Compute = CPU,
    loading: int = 0,
) -> tuple[WorkerBytes, ...]:
    """Return what every worker of ``plan`` holds during the handover.

    While sections change their owners, a worker keeps those it had under ``previous``
    beside those it is to have, and an undo slot for the largest of both; where the
    plans keep state in different memories, each in its own. On top are ``loading``
    bytes of its loader processes, in its VM's memory, and the copies of one state that it
    keeps under ``previous``.
    """
    kept = held_bytes(facts, previous)
    had = {slot: previous.held_by(rank) for rank, slot in enumerate(previous.slots)}
    sizes = [
        section.param_bytes
        + compute.lanes * trained_bytes(section)
        + section.optimizer_bytes
        + PAGE_BYTES
        for section in facts.sections
    ]

    def held(*stages: Iterable[int]) -> int:
        own = [sizes[k] for k in set(itertools.chain(*stages))]
        return sum(own) + max(own, default=0)

    @cache
    def both(old: tuple[int, ...], new: tuple[int, ...]) -> WorkerBytes:
        if not compute.on_gpu:
            return WorkerBytes(held(old, new) + loading)
        homes = {"host": held(), "device": held()}
        locked: set[int] = set()
        for state, sections in ((plan.state, new), (previous.state, old)):
            locked.update(sections if state == "host" else ())
        if plan.state == previous.state:
            homes[plan.state] = held(old, new)
        else:
            homes[plan.state], homes[previous.state] = held(new), held(old)
        locked_bytes = sum(sizes[k] - PAGE_BYTES for k in locked)
        return WorkerBytes(homes["device"], homes["host"] + loading, locked_bytes)

    return tuple(
        with_copies(
            both(had.get(slot, ()), plan.held_by(rank)),
            kept.get(slot, 0),
            on_gpu=compute.on_gpu,
        )
        for rank, slot in enumerate(plan.slots)
    )
