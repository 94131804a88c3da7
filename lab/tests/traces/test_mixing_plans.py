"""The planner and the solver of VirtualFlow, 5.1.2, on the same types of GPUs.

Where both may they find the same answer. They differ in what they may:

- Workers of a type have equal shares and equal micro-batches for the solver, in the planner
  only the same size of whole micro-batches, of which one may lack examples. So the planner may
  be faster; never where its own answer is one that the solver may give.
- The planner leaves out the slowest devices first, by what they train with their best size of
  micro-batches; the solver leaves out any. So it may be slower where mini-batches are too small
  for these sizes.
- The planner takes larger micro-batches only up to the smallest that is within ``NEAR`` of the
  best, for pipelines want many. So it may be slower by as much, never where larger ones gain
  more each time.
- The planner prefers plans that survive the loss of a VM to those that are faster by less than
  ``MEASURED``, and simpler ones to those faster by less than ``NOISE``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.builders import (
    a_link,
    a_plan,
    a_profile,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
)
from tests.tiers import costly

from spottrain.morphing.plan.choose import MEASURED, NOISE, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.layouts import NEAR
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.simulator import simulate_step
from spottrain.wire.model import Plan, Profile, Slot
from spottrain_lab.traces.mixing import Split, WorkerType, split_minibatch

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


def splits(plan: Plan) -> set[tuple[str, int, int]]:
    return set(examples_of(plan))


def shares_of(split: Split) -> set[tuple[str, int, int]]:
    return {(one.name, one.examples, one.virtual_node_examples) for one in split.shares}


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


@st.composite
def fleets(draw: st.DrawFn, per_node: tuple[float, float]) -> list[WorkerType]:
    """Return two or three types; ``per_node``: what a virtual node takes beside its examples,
    in examples of the fastest GPU, at least and at most."""
    types = []
    for name in draw(st.sampled_from(["VP", "VPK"])):
        speed = draw(st.sampled_from([1.0, 1.7, 2.0, 4.0]))
        beside = draw(st.floats(*per_node)) * LEAST
        sizes = [LEAST * 2**k for k in range(draw(st.integers(1, 5)))]
        times = {size: (beside + size) / 400 / speed for size in sizes}
        types.append(WorkerType(name=name, count=draw(st.integers(1, 4)), virtual_node_s=times))
    return types


minibatches = st.integers(1, 64).map(lambda nodes: 4 * LEAST * nodes)
models = st.sampled_from([0, 10**7, 10**8])


@costly
@given(fleets((16.0, 40.0)), minibatches, models)
def test_the_planner_finds_the_solver_s_answer_where_large_virtual_nodes_pay(
    types: list[WorkerType], minibatch_size: int, num_bytes: int
) -> None:
    case = inputs_of(types, minibatch_size, num_bytes)
    mixing = split_minibatch(minibatch_size, types, lambda workers: sums_s(case, workers))

    plan = choose_plan(case).plan

    assert plan is not None
    best = mixing.best
    if leaves_out_the_slowest(best, types):
        assert plan.predicted_step_s <= best.step_s * slack(best)
    if is_split(plan):
        assert plan.predicted_step_s >= best.step_s * (1 - 1e-6)


@costly
@given(fleets((0.0, 2.0)), minibatches, models)
def test_the_planner_is_near_the_solver_s_answer_whatever_was_measured(
    types: list[WorkerType], minibatch_size: int, num_bytes: int
) -> None:
    case = inputs_of(types, minibatch_size, num_bytes)
    mixing = split_minibatch(minibatch_size, types, lambda workers: sums_s(case, workers))

    plan = choose_plan(case).plan

    assert plan is not None
    best = mixing.best
    if leaves_out_the_slowest(best, types):
        assert plan.predicted_step_s <= best.step_s * slack(best) * (1 + NEAR)
    if is_split(plan):
        assert plan.predicted_step_s >= best.step_s * (1 - 1e-6)
