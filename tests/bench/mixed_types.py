"""The planner's inputs for types of GPUs as VirtualFlow's solver takes them, and what compares
the answers of both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tests.builders import (
    a_link,
    a_plan,
    a_profile,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
)

from spottrain.morphing.plan.choose import MEASURED, NOISE
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.simulator import simulate_step
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan, Slot
from spottrain_lab.traces.mixing import Split, WorkerType

LINK = a_link(latency_s=1e-4, bytes_per_s=1e9)
LEAST = 16
"""Examples of the smallest virtual node."""


def profile_of(one: WorkerType) -> Profile:
    """Return what was measured of a type: a model of one section."""
    sizes = sorted(one.virtual_node_s.items())
    every = (
        microbatch_profile([section_profile(0, forward_s=s / 4, backward_s=3 * s / 4)], size)
        for size, s in sizes
    )
    return a_profile(*every, device=one.name, between_vms=LINK, written=True)


def inputs_of(types: Sequence[WorkerType], minibatch_size: int, num_bytes: int) -> PlanInputs:
    """Return what a plan depends on, for a model of so many bytes."""
    base, *others = map(profile_of, types)
    slots = [
        Device(
            slot=Slot(vm_id=f"{one.name}{index:02}", index=0),
            memory_bytes=2**50,
            speed=best_rate(one) / best_rate(types[0]),
            kind="" if one is types[0] else one.name,
        )
        for one in types
        for index in range(one.count)
    ]
    return PlanInputs(
        facts=model_facts([section_facts(0, param_bytes=num_bytes)]),
        profile=base,
        measured=tuple(others),
        slots=tuple(slots),
        minibatch_size=minibatch_size,
        microbatch_size=LEAST,
        reduction="fast",
        recompute=False,
        merges=True,
    )


def sums_s(case: PlanInputs, workers: int) -> float:
    """Return what sums of gradients take over so many workers."""
    plan = a_plan(1, workers, num_sections=1, microbatch_size=LEAST)
    step = simulate_step(plan, case.profile, case.facts, reduction="fast")
    return step.step_s - step.pipeline_s


def examples_of(plan: Plan) -> list[tuple[str, int, int]]:
    """Return type, examples and examples of a micro-batch of each replica."""
    return [
        (slot.vm_id[:-2], LEAST * (end - begin), plan.microbatch_size_of(replica))
        for replica, (slot, (begin, end)) in enumerate(
            zip(plan.slots, itertools.pairwise(plan.replica_bounds), strict=True)
        )
    ]


def is_split(plan: Plan) -> bool:
    """Return whether the solver may give this answer, too."""
    rows = examples_of(plan)
    whole = all(examples % size == 0 for _, examples, size in rows)
    return whole and len({name for name, _, _ in rows}) == len(set(rows))


def leaves_out_the_slowest(split: Split, types: Sequence[WorkerType]) -> bool:
    """Return whether no worker is used while a faster one, at its best size, is not."""
    used = {share.name: share.workers for share in split.shares}
    speeds = {one.name: best_rate(one) for one in types}
    lacking = [speeds[one.name] for one in types if used.get(one.name, 0) < one.count]
    return min(speeds[name] for name in used) >= max(lacking, default=0.0)


def best_rate(one: WorkerType) -> float:
    """Return the examples that a worker trains in a second, at its best size."""
    return max(size / node_s for size, node_s in one.virtual_node_s.items())


def slack(split: Split) -> float:
    """Return by which factor the planner may be slower than the solver's answer."""
    alone = sum(share.workers for share in split.shares) == 1
    return (1 + NOISE) * (1 + MEASURED if alone else 1)
