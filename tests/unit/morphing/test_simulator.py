from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.errors import PlanError
from spottrain.morphing.partition import spread
from spottrain.morphing.schedule import Task, Work, make_schedule
from spottrain.morphing.simulator import (
    Link,
    PipelineRun,
    StageTimes,
    simulate_pipeline,
    simulate_step,
)
from spottrain.wire import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Plan,
    Profile,
    ScheduleKind,
    SectionFacts,
    SectionProfile,
    Slot,
    TiedParameter,
)

kinds: st.SearchStrategy[ScheduleKind] = st.sampled_from(["varuna", "1f1b", "gpipe"])
flat_kinds: st.SearchStrategy[ScheduleKind] = st.sampled_from(["1f1b", "gpipe"])
milliseconds = st.integers(1, 1000).map(lambda ms: ms / 1000)
NO_LINK = Link(latency_s=0.0, transfer_s=0.0)


def run(
    kind: ScheduleKind,
    stages: list[StageTimes],
    count: int,
    link: Link = NO_LINK,
    *,
    recompute: bool = False,
) -> PipelineRun:
    lists = make_schedule(kind, len(stages), count, recompute=recompute)
    return simulate_pipeline(lists, stages, [link] * (len(stages) - 1))


def uniform(depth: int, forward_s: float, backward_s: float) -> list[StageTimes]:
    times = StageTimes(
        forward_s=forward_s, recompute_s=forward_s, backward_s=backward_s
    )
    return [times] * depth


@given(flat_kinds, st.integers(1, 6), st.integers(1, 12), milliseconds, milliseconds)
def test_uniform_stages_take_micro_batches_plus_stages_less_one(
    kind: ScheduleKind, depth: int, count: int, forward_s: float, backward_s: float
) -> None:
    got = run(kind, uniform(depth, forward_s, backward_s), count)
    expected = (count + depth - 1) * (forward_s + backward_s)
    assert max(got.finish_s) == pytest.approx(expected)
    assert got.busy_s == pytest.approx([count * (forward_s + backward_s)] * depth)


stage_lists = st.lists(
    st.builds(
        StageTimes,
        forward_s=milliseconds,
        recompute_s=milliseconds,
        backward_s=milliseconds,
    ),
    min_size=1,
    max_size=6,
)
links = st.builds(Link, latency_s=milliseconds, transfer_s=milliseconds)


@given(kinds, stage_lists, st.integers(1, 12), links, st.booleans())
def test_no_run_beats_its_critical_path(
    kind: ScheduleKind,
    stages: list[StageTimes],
    count: int,
    link: Link,
    recompute: bool,
) -> None:
    got = run(kind, stages, count, link, recompute=recompute)
    hop_s = link.latency_s + link.transfer_s
    for p, times in enumerate(stages):
        way_s = 2 * p * hop_s + sum(s.forward_s + s.backward_s for s in stages[:p])
        own_s = count * (times.forward_s + times.backward_s)
        assert got.busy_s[p] >= own_s - 1e-9
        assert max(got.finish_s) >= way_s + got.busy_s[p] - 1e-9
    if len(stages) > 1:
        there_s = stages[0].forward_s + link.latency_s + count * link.transfer_s
        back_s = stages[1].forward_s + stages[1].backward_s + hop_s
        assert got.finish_s[0] >= there_s + back_s + stages[0].backward_s - 1e-9


@given(kinds, stage_lists, st.integers(1, 12), links, st.booleans())
def test_the_same_input_gives_the_same_run(
    kind: ScheduleKind,
    stages: list[StageTimes],
    count: int,
    link: Link,
    recompute: bool,
) -> None:
    first = run(kind, stages, count, link, recompute=recompute)
    assert run(kind, stages, count, link, recompute=recompute) == first


def test_a_direction_of_a_link_carries_one_message_at_a_time() -> None:
    stages = uniform(2, 0.001, 0.002)
    got = run("gpipe", stages, 4, Link(latency_s=0.5, transfer_s=1.0))
    # Four activations leave one after the other; so do the gradients, each a transfer
    # behind the last; latency is paid once each way.
    last_gradient_s = 0.001 + 4 * 1.0 + 0.5 + 0.003 + 1.0 + 0.5
    assert got.finish_s[0] == pytest.approx(last_gradient_s + 0.002)


def test_recompute_is_paid_for_unless_the_graph_is_kept() -> None:
    stages = [StageTimes(forward_s=1.0, recompute_s=10.0, backward_s=2.0)] * 2
    alone = run("varuna", stages, 1, recompute=True)
    assert alone.busy_s == (3.0, 3.0)
    several = run("varuna", stages, 2, recompute=True)
    assert several.busy_s == (26.0, 6.0)


def test_a_late_gradient_is_waited_for_with_forwards() -> None:
    lists = [
        tuple(
            Task(Work(w[0]), int(w[1:])) for w in ["F0", "F1", "B0", "B1", "F2", "B2"]
        )
    ]
    lists.append(
        tuple(
            Task(Work(w[0]), int(w[1:])) for w in ["F0", "B0", "F1", "B1", "F2", "B2"]
        )
    )
    slow = StageTimes(forward_s=5.0, recompute_s=0.0, backward_s=5.0)
    fast = StageTimes(forward_s=1.0, recompute_s=0.0, backward_s=1.0)
    got = simulate_pipeline(lists, [fast, slow], [NO_LINK])
    assert got.peak_in_flight == (2, 1)
    # The last stage never waits after its first activation, for F2 of stage 0 runs as
    # soon as B0 has made room.
    assert got.finish_s == (32.0, 31.0)


# --- Steps -----------------------------------------------------------------------------

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


def plan(depth: int, width: int, virtual_nodes: int) -> Plan:
    return Plan(
        pipeline_depth=depth,
        data_parallel_width=width,
        microbatch_size=1,
        minibatch_size=virtual_nodes,
        schedule="gpipe",
        recompute=False,
        stage_bounds=tuple(4 // depth * p for p in range(depth + 1)),
        replica_bounds=spread(virtual_nodes, width),
        slots=tuple(Slot(vm_id=f"vm{i}", index=0) for i in range(depth * width)),
        predicted_step_s=0.0,
    )


def test_one_worker_computes_and_applies() -> None:
    step = simulate_step(plan(1, 1, 3), PROFILE, FACTS, reduction="fast")
    assert step.pipeline_s == pytest.approx(3 * 12.0)
    assert step.step_s == pytest.approx(36.0 + 3.2)
    assert step.busy_s == (36.0,)
    assert step.peak_in_flight == (3,)


def test_a_fast_reduction_is_a_ring_after_the_slowest_replica() -> None:
    step = simulate_step(plan(1, 3, 4), PROFILE, FACTS, reduction="fast")
    # Four sections' gradients and the loss, two tensors at a time.
    ring_s = 4 * (3 * LATENCY_S + 3200 / 3 / BYTES_PER_S)
    assert step.pipeline_s == pytest.approx(24.0)
    assert step.step_s == pytest.approx(24.0 + ring_s + 2 * LATENCY_S + 3.2)


def test_an_exact_reduction_is_a_chain_and_a_broadcast() -> None:
    step = simulate_step(plan(1, 3, 3), PROFILE, FACTS, reduction="exact")
    send_s = 5 * LATENCY_S + 3200 / BYTES_PER_S
    assert step.step_s == pytest.approx(12.0 + 4 * send_s + 2 * LATENCY_S + 3.2)


def test_a_stage_reduces_while_the_one_before_drains() -> None:
    narrow = simulate_step(plan(2, 1, 2), PROFILE, FACTS, reduction="fast")
    wide = simulate_step(plan(2, 2, 4), PROFILE, FACTS, reduction="fast")
    ring_s = 2 * (2 * LATENCY_S + 800 / BYTES_PER_S)
    # Only the ring of stage 0 shows, which drains last; four ranks gather in two rounds.
    assert wide.step_s - narrow.step_s == pytest.approx(ring_s + LATENCY_S)


def test_tied_parameters_are_summed_once_their_stages_have_reduced() -> None:
    facts = replace(FACTS, tied=(TiedParameter(name="embedding", sections=(0, 3)),))
    apart = simulate_step(plan(2, 1, 2), PROFILE, facts, reduction="fast")
    untied = simulate_step(plan(2, 1, 2), PROFILE, FACTS, reduction="fast")
    tied_s = 2 * (LATENCY_S + 200 / BYTES_PER_S)
    assert apart.step_s - untied.step_s == pytest.approx(tied_s)
    together = simulate_step(plan(1, 1, 2), PROFILE, facts, reduction="fast")
    assert together == simulate_step(plan(1, 1, 2), PROFILE, FACTS, reduction="fast")


def test_a_slow_device_slows_its_replica_and_all_wait_for_it() -> None:
    speeds = [1.0, 1.0, 1.0, 0.5]
    step = simulate_step(plan(2, 2, 4), PROFILE, FACTS, reduction="fast", speeds=speeds)
    even = simulate_step(plan(2, 2, 4), PROFILE, FACTS, reduction="fast")
    assert step.busy_s == (12.0, 24.0)
    assert step.step_s > even.step_s + 12.0


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.0]])
def test_speeds_that_do_not_fit_the_plan_are_refused(speeds: list[float]) -> None:
    with pytest.raises(PlanError, match="needs as many speeds above 0"):
        simulate_step(plan(2, 1, 2), PROFILE, FACTS, reduction="fast", speeds=speeds)
