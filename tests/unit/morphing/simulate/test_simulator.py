from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_link
from tests.unit.morphing.steps import (
    BYTES_PER_S,
    FACTS,
    LATENCY_S,
    PROFILE,
    plan,
    profile_of,
)

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.profiles import derive_profile
from spottrain.morphing.schedules.schedule import Task, Work, make_schedule
from spottrain.morphing.simulate.compute import Compute
from spottrain.morphing.simulate.replica import (
    Link,
    PipelineRun,
    StageTimes,
    simulate_pipeline,
)
from spottrain.morphing.simulate.simulator import (
    MAX_PLAYED_MICROBATCHES,
    expect_step,
    simulate_step,
    slowest_update_s,
    stage_times,
    stale_step,
)
from spottrain.wire.model import TaskOverheads, TiedParameter
from spottrain.wire.plan import ScheduleKind

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
    times = StageTimes(forward_s=forward_s, recompute_s=forward_s, backward_s=backward_s)
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
    lists = [tuple(Task(Work(w[0]), int(w[1:])) for w in ["F0", "F1", "B0", "B1", "F2", "B2"])]
    lists.append(tuple(Task(Work(w[0]), int(w[1:])) for w in ["F0", "B0", "F1", "B1", "F2", "B2"]))
    slow = StageTimes(forward_s=5.0, recompute_s=0.0, backward_s=5.0)
    fast = StageTimes(forward_s=1.0, recompute_s=0.0, backward_s=1.0)
    got = simulate_pipeline(lists, [fast, slow], [NO_LINK])
    assert got.peak_in_flight == (2, 1)
    # The last stage never waits after its first activation, for F2 of stage 0 runs as
    # soon as B0 has made room.
    assert got.finish_s == (32.0, 31.0)


# --- Steps -----------------------------------------------------------------------------


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


def test_an_exact_reduction_is_a_ring_of_twice_the_bytes() -> None:
    step = simulate_step(plan(1, 3, 3), PROFILE, FACTS, reduction="exact")
    ring_s = 4 * (3 * LATENCY_S + 2 * 3200 / 3 / BYTES_PER_S)
    assert step.step_s == pytest.approx(12.0 + ring_s + 2 * LATENCY_S + 3.2)


def test_an_exact_backward_quantises_the_gradients_of_its_virtual_node() -> None:
    profile = replace(PROFILE, quantise_s_per_byte=1e-3)
    fast = simulate_step(plan(1, 1, 3), profile, FACTS, reduction="fast")
    exact = simulate_step(plan(1, 1, 3), profile, FACTS, reduction="exact")
    assert exact.pipeline_s - fast.pipeline_s == pytest.approx(3 * 4 * 0.8)


def test_an_update_on_the_host_overlaps_with_backwards_and_with_the_way_up() -> None:
    profile = replace(
        PROFILE,
        download_bytes_per_s=800.0,
        host_optimizer_s_per_byte=3 / 800,
        upload_bytes_per_s=200.0,
    )
    gpu = Compute(on_gpu=True, precision="fp16")
    some = plan(1, 1, 3)
    host = simulate_step(some, profile, FACTS, reduction="fast", compute=gpu)
    # A section takes 1 s down, 3 s to update, 2 s up: the first one's way down shows,
    # the others' is beside backwards, and so does the last one's way up.
    assert host.step_s == pytest.approx(host.pipeline_s + 1 + 4 * 3 + 2)
    there = replace(some, state="device")
    device = simulate_step(there, profile, FACTS, reduction="fast", compute=gpu)
    assert device == simulate_step(some, profile, FACTS, reduction="fast")


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


def test_a_tied_parameter_s_size_in_the_facts_counts_before_an_inferred_one() -> None:
    tied = TiedParameter(name="embedding", sections=(0, 3), param_bytes=600)
    facts = replace(FACTS, tied=(tied,))
    apart = simulate_step(plan(2, 1, 2), PROFILE, facts, reduction="fast")
    untied = simulate_step(plan(2, 1, 2), PROFILE, FACTS, reduction="fast")
    tied_s = 2 * (LATENCY_S + 600 / BYTES_PER_S)
    assert apart.step_s - untied.step_s == pytest.approx(tied_s)


def test_a_slow_device_slows_its_replica_and_all_wait_for_it() -> None:
    profiles = [*[PROFILE] * 3, derive_profile(PROFILE, "slow", 0.5)]
    step = simulate_step(plan(2, 2, 4), PROFILE, FACTS, reduction="fast", profiles=profiles)
    even = simulate_step(plan(2, 2, 4), PROFILE, FACTS, reduction="fast")
    assert step.busy_s == (12.0, 24.0)
    assert step.step_s > even.step_s + 12.0


def test_profiles_that_do_not_fit_the_plan_are_refused() -> None:
    with pytest.raises(PlanError, match="needs as many profiles: got 1"):
        simulate_step(plan(2, 1, 2), PROFILE, FACTS, reduction="fast", profiles=[PROFILE])


def test_every_task_has_its_overhead() -> None:
    bare = simulate_step(plan(2, 1, 3), PROFILE, FACTS, reduction="fast")
    profile = replace(PROFILE, task_overhead_s=0.5)
    step = simulate_step(plan(2, 1, 3), profile, FACTS, reduction="fast")
    assert step.busy_s == tuple(busy_s + 3 * 2 * 0.5 for busy_s in bare.busy_s)
    assert step.step_s - bare.step_s == pytest.approx((3 + 1) * 2 * 0.5)


def test_kinds_of_tasks_have_overheads_of_their_own() -> None:
    beside = TaskOverheads(
        forward_s=0.5,
        recompute_s=0.25,
        backward_s=0.125,
        posting_s=0.0625,
        receiving_s=0.03125,
    )
    one = replace(PROFILE.microbatches[0], overheads=beside)
    profile = replace(PROFILE, microbatches=(one,), task_overhead_s=9.0)
    case = plan(3, 1, 1)
    bare = simulate_step(case, PROFILE, FACTS, reduction="fast")
    step = simulate_step(case, profile, FACTS, reduction="fast")
    more_s = [a - b for a, b in zip(step.busy_s, bare.busy_s, strict=True)]
    # Of one micro-batch no stage recomputes; the stage in the middle sends and receives
    # both ways.
    assert more_s == [0.71875, 0.8125, 0.71875]


@pytest.mark.parametrize(("fetch_s", "more_s"), [(12.0, 0.0), (15.0, 3.0)])
def test_examples_from_loaders_cost_what_is_not_hidden(fetch_s: float, more_s: float) -> None:
    beside = TaskOverheads(forward_s=0.0, recompute_s=0.0, backward_s=0.0, fetch_s=fetch_s)
    one = replace(PROFILE.microbatches[0], overheads=beside)
    profile = replace(PROFILE, microbatches=(one,))
    case = replace(plan(1, 1, 3), recompute=False)  # 12 s a micro-batch
    bare = simulate_step(case, PROFILE, FACTS, reduction="fast")
    step = simulate_step(case, profile, FACTS, reduction="fast")
    assert step.step_s - bare.step_s == pytest.approx(3 * more_s)


def test_an_interleaved_plan_runs_the_very_runs_of_its_stages() -> None:
    sections = [replace(s, forward_s=float(1 + s.index)) for s in PROFILE.sections_at(1)]
    measured = replace(PROFILE.microbatches[0], sections=tuple(sections))
    profile = replace(PROFILE, microbatches=(measured,))
    step = simulate_step(plan(2, 1, 2, chunks=2), profile, FACTS, reduction="fast")
    # Stage 0 has sections 0 and 2, stage 1 has 1 and 3; a backward takes 2.
    assert step.busy_s == (2 * (1 + 3 + 4), 2 * (2 + 4 + 4))


def test_a_bound_on_micro_batches_in_flight_is_kept() -> None:
    some = plan(2, 1, 6, in_flight_bound=2)
    step = simulate_step(some, PROFILE, FACTS, reduction="fast")
    free = simulate_step(plan(2, 1, 6), PROFILE, FACTS, reduction="fast")
    assert max(step.peak_in_flight) == 2
    assert max(free.peak_in_flight) == 6
    assert step.step_s >= free.step_s


def test_neighbours_in_one_vm_wait_less_for_each_other() -> None:
    slow = a_link(latency_s=1.0, bytes_per_s=1e3)
    profile = profile_of(PROFILE, output_bytes=1000, between_vms=slow)
    apart, together = (
        simulate_step(plan(4, 1, 3, vms), profile, FACTS, reduction="fast").pipeline_s
        for vms in ("abcd", "aacc")
    )
    # Two of the three hops there and back: each as much shorter as the links differ.
    assert apart - together == pytest.approx(4 * (2.0 - LATENCY_S - 1.0))


def test_links_out_of_one_vm_carry_one_message_at_a_time() -> None:
    # Stage 1's activations and gradients both leave its VM, or VMs of their own.
    stages = [StageTimes(forward_s=1.0, recompute_s=0.0, backward_s=1.0)] * 3
    own = [Link(transfer_s=3.0, vms=(0, 1)), Link(transfer_s=3.0, vms=(2, 3))]
    shared = [Link(transfer_s=3.0, vms=(0, 1)), Link(transfer_s=3.0, vms=(1, 2))]
    lists = make_schedule("1f1b", 3, 8, recompute=False)
    apart, together = (
        max(simulate_pipeline(lists, stages, links).finish_s) for links in (own, shared)
    )
    assert together > apart
    assert max(simulate_pipeline(lists, stages, own, fast_forward=False).finish_s) == apart
    assert max(simulate_pipeline(lists, stages, shared, fast_forward=False).finish_s) == together


@given(st.integers(1, 4), st.integers(1, 24), st.integers(1, 3))
def test_without_a_drain_a_mini_batch_takes_its_slowest_stage_s_time(
    depth: int, count: int, width: int
) -> None:
    """With as many micro-batches as stages; never less than half of what it takes alone."""
    some = plan(depth, width, width * count, schedule="1f1b", recompute=False)
    alone = expect_step(some, PROFILE, FACTS, reduction="fast")
    stale = stale_step(some, PROFILE, FACTS, reduction="fast")
    assert alone.step_s / 2 <= stale.step_s <= alone.step_s
    if count >= 4 * depth:
        update_s = slowest_update_s(
            some, PROFILE, FACTS, [PROFILE] * depth * width, reduction="fast"
        )
        assert stale.step_s >= max(stale.busy_s)
        longest_s = max(max(stale.busy_s) + update_s, alone.step_s - alone.pipeline_s)
        assert stale.step_s <= longest_s * 1.1 + 2 * depth * LATENCY_S


def test_jitter_slows_a_pipeline_on_the_mean() -> None:
    calm = a_link(latency_s=0.5, bytes_per_s=1e3)
    shaky = replace(calm, jitter=0.6)
    still, shaken = (
        expect_step(
            plan(4, 2, 24, schedule="1f1b"),
            profile_of(PROFILE, output_bytes=500, between_vms=link),
            FACTS,
            reduction="fast",
        )
        for link in (calm, shaky)
    )
    assert shaken.step_s > still.step_s
    assert shaken.busy_s == pytest.approx(still.busy_s)


def test_the_same_seed_gives_the_same_step() -> None:
    shaky = a_link(latency_s=0.5, bytes_per_s=1e3, jitter=0.6)
    profile = profile_of(PROFILE, output_bytes=500, between_vms=shaky)
    once, again, other = (
        simulate_step(plan(2, 2, 8), profile, FACTS, reduction="fast", seed=seed)
        for seed in (3, 3, 4)
    )
    assert once == again != other


def test_equal_replicas_have_random_numbers_of_their_own() -> None:
    sections = [replace(s, forward_spread=0.3) for s in PROFILE.sections_at(1)]
    measured = replace(PROFILE.microbatches[0], sections=tuple(sections))
    profile = replace(PROFILE, microbatches=(measured,))
    one = simulate_step(plan(1, 1, 4), profile, FACTS, reduction="fast", seed=0)
    several = simulate_step(plan(1, 3, 12), profile, FACTS, reduction="fast", seed=0)
    assert several.pipeline_s > one.pipeline_s


def test_a_very_long_mini_batch_is_slowed_down_as_a_long_one_is() -> None:
    shaky = a_link(latency_s=0.5, bytes_per_s=1e3, jitter=0.6)
    profile = profile_of(PROFILE, output_bytes=500, between_vms=shaky)
    ratios = []
    for count in (MAX_PLAYED_MICROBATCHES, 400 * MAX_PLAYED_MICROBATCHES):
        some = plan(2, 1, count, schedule="1f1b")
        still, shaken = (
            simulate_step(some, profile, FACTS, reduction="fast", seed=seed) for seed in (None, 0)
        )
        ratios.append(shaken.pipeline_s / still.pipeline_s)
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-3)


def test_segments_cost_the_forward_of_all_but_the_last_once_more() -> None:
    def step_s(**changes: Any) -> float:
        step = simulate_step(plan(1, 1, 3, **changes), PROFILE, FACTS, reduction="fast")
        return step.step_s

    whole = step_s(recompute=True)
    assert whole == step_s()
    assert step_s(recompute=True, segments=2) == pytest.approx(whole + 3 * 2)
    assert step_s(recompute=True, segments=9) == pytest.approx(whole + 3 * 3)


def test_each_further_segment_enters_the_user_s_code_once_more() -> None:
    beside = TaskOverheads(forward_s=0.5, recompute_s=0.25, backward_s=0.125)
    measured = PROFILE.sections_at(1)
    times = stage_times(measured, range(4), beside, segments=2)
    assert times.forward_s == 4 * 1.0 + 0.5 + 0.25
    assert times.recompute_s == 2 * 1.0 + 0.25
    assert times.backward_s == 4 * 2.0 + 2 * 1.0 + 0.125 + 0.25


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5))
def test_segments_never_make_a_mini_batch_faster_than_a_whole_recompute(
    depth: int, virtual_nodes: int, segments: int
) -> None:
    whole = plan(depth, 1, virtual_nodes, schedule="1f1b", recompute=True)
    cut = replace(whole, segments=segments)
    times = [simulate_step(one, PROFILE, FACTS, reduction="fast").step_s for one in (whole, cut)]
    assert times[0] <= times[1] + 1e-9
