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

from hypothesis import given
from hypothesis import strategies as st
from tests.bench.mixed_types import (
    LEAST,
    inputs_of,
    is_split,
    leaves_out_the_slowest,
    slack,
    sums_s,
)
from tests.tiers import costly

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.layouts import NEAR
from spottrain_lab.traces.mixing import WorkerType, split_minibatch


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
