"""One replica's mini-batch: against the executor's rule, the original and closed forms."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.pipelines import (
    few,
    pipelines,
)
from tests.unit.morphing.slow_replica import SlowReplica

from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.schedules.schedule import OrderPolicy, expand
from spottrain.morphing.simulate.loops.play import TooSlowError
from spottrain.morphing.simulate.replica import (
    Conditions,
    Jitter,
    Link,
    PipelineRun,
    StageTimes,
    simulate_pipeline,
)
from spottrain.wire.plan import ScheduleKind

# --- The executor's rule ----------------------------------------------------------------


@given(pipelines(), st.none() | st.integers(1, 4), st.booleans())
def test_the_simulation_follows_next_task(
    pipeline: tuple[Schedule, list[StageTimes], list[Link]], bound: int | None, ahead: bool
) -> None:
    schedule, stages, links = pipeline
    slow = SlowReplica(expand(schedule), stages, links, OrderPolicy.OPPORTUNISTIC, bound, ahead)
    run = simulate_pipeline(schedule, stages, links, bound=bound, asynchronous=ahead)
    assert run == slow.run()


@given(pipelines())
def test_in_order_too(
    pipeline: tuple[Schedule, list[StageTimes], list[Link]],
) -> None:
    schedule, stages, links = pipeline
    got = simulate_pipeline(schedule, stages, links, conditions=Conditions.STRICT)
    assert got == SlowReplica(expand(schedule), stages, links, OrderPolicy.STRICT).run()


@given(pipelines(), st.sampled_from(Conditions))
def test_lists_at_length_give_the_same_run(
    pipeline: tuple[Schedule, list[StageTimes], list[Link]], conditions: Conditions
) -> None:
    schedule, stages, links = pipeline
    short = simulate_pipeline(schedule, stages, links, conditions=conditions)
    at_length = expand(schedule)
    assert simulate_pipeline(at_length, stages, links, conditions=conditions) == short


# --- Closed forms and bounds ------------------------------------------------------------


@given(
    st.sampled_from(["1f1b", "gpipe"]),
    st.sampled_from(Conditions),
    st.integers(1, 6),
    st.integers(1, 50),
    few,
    few,
)
def test_uniform_stages_take_micro_batches_plus_stages_less_one(
    kind: ScheduleKind,
    conditions: Conditions,
    depth: int,
    count: int,
    forward_s: float,
    backward_s: float,
) -> None:
    stage = StageTimes(forward_s=forward_s, recompute_s=0.0, backward_s=backward_s)
    schedule = compact_schedule(kind, depth, count, recompute=False)
    got = simulate_pipeline(
        schedule, [stage] * depth, [Link()] * (depth - 1), conditions=conditions
    )
    whole_s = (count + depth - 1) * (forward_s + backward_s)
    assert max(got.finish_s) == pytest.approx(whole_s)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 6), few, few)
def test_interleaving_divides_the_bubble_by_the_chunks(
    depth: int, chunks: int, groups: int, forward_s: float, backward_s: float
) -> None:
    count = depth * groups
    whole = (
        chunks * StageTimes(forward_s=forward_s, recompute_s=0.0, backward_s=backward_s).forward_s
    )
    stage = StageTimes(forward_s=whole, recompute_s=0.0, backward_s=chunks * backward_s)
    schedule = compact_schedule("interleaved", depth, count, recompute=False, chunks=chunks)
    got = simulate_pipeline(schedule, [stage] * depth, [Link()] * (depth - 1))
    expected = (count * chunks + depth - 1) * (forward_s + backward_s)
    assert max(got.finish_s) == pytest.approx(expected)


@given(pipelines(longest=400), st.none() | st.integers(1, 8))
def test_a_mini_batch_that_ends_in_time_is_not_given_up(
    pipeline: tuple[Schedule, list[StageTimes], list[Link]], bound: int | None
) -> None:
    run = simulate_pipeline(*pipeline, bound=bound)
    limit_s = max(run.finish_s)
    again = simulate_pipeline(*pipeline, bound=bound, fast_forward=False)
    assert simulate_pipeline(*pipeline, bound=bound, limit_s=limit_s) == run == again


def test_a_mini_batch_that_keeps_too_slow_a_pace_is_given_up() -> None:
    """Stages that are nearly equal, and few micro-batches in flight, come to no steady state."""
    numbers = random.Random(1)
    stages = [
        StageTimes(
            forward_s=numbers.uniform(0.0097, 0.0103),
            recompute_s=0.0,
            backward_s=numbers.uniform(0.0197, 0.0203),
        )
        for _ in range(8)
    ]
    links = [Link(transfer_s=0.004, latency_s=0.001)] * 7
    play = partial(
        simulate_pipeline,
        compact_schedule("1f1b", 8, 500, recompute=False),
        stages,
        links,
        bound=12,
        asynchronous=True,
    )
    end_s = max(play().finish_s)

    assert max(play(limit_s=end_s).finish_s) == end_s
    with pytest.raises(TooSlowError):
        play(limit_s=0.95 * end_s)


def critical_path_s(schedule: Schedule, stages: list[StageTimes], links: list[Link]) -> float:
    """A bound for any conduct: the way to a stage, its work, and the way back."""
    bound = way = Fraction(0)
    for p, times in enumerate(stages):
        once = Fraction(times.forward_s) + Fraction(times.backward_s)
        bound = max(bound, way + schedule.num_microbatches * once)
        if p < len(links):
            link = Fraction(links[p].latency_s) + Fraction(links[p].transfer_s)
            way += once + 2 * link
    return float(bound)


@given(pipelines(), st.sampled_from(Conditions))
def test_nothing_beats_the_critical_path(
    pipeline: tuple[Schedule, list[StageTimes], list[Link]], conditions: Conditions
) -> None:
    got = simulate_pipeline(*pipeline, conditions=conditions)
    assert max(got.finish_s) >= critical_path_s(*pipeline) - 1e-9


@given(pipelines(), st.data())
def test_in_order_a_slower_task_never_makes_the_mini_batch_finish_earlier(
    pipeline: tuple[Schedule, list[StageTimes], list[Link]], data: st.DataObject
) -> None:
    schedule, stages, links = pipeline
    more = st.just(0.0) | few
    slower_links = [
        Link(
            latency_s=k.latency_s + data.draw(more),
            transfer_s=k.transfer_s + data.draw(more),
        )
        for k in links
    ]
    slower_stages = [
        StageTimes(
            forward_s=s.forward_s + data.draw(more),
            recompute_s=s.recompute_s + data.draw(more),
            backward_s=s.backward_s + data.draw(more),
        )
        for s in stages
    ]
    order = Conditions.STRICT
    fast = simulate_pipeline(schedule, stages, links, conditions=order)
    slow = simulate_pipeline(schedule, slower_stages, slower_links, conditions=order)
    assert all(a <= b for a, b in zip(fast.finish_s, slow.finish_s, strict=True))


def test_a_stage_that_departs_from_its_list_may_be_done_sooner_over_a_slower_link() -> None:
    """No rule that does not know the future is free of this (Graham 1966): over the
    faster link a gradient comes just after the stage has begun another forward."""
    schedule = compact_schedule("varuna", 2, 4, recompute=True)
    stages = [
        StageTimes(forward_s=2.0, recompute_s=2.0, backward_s=1.0),
        StageTimes(forward_s=1.0, recompute_s=1.0, backward_s=1.0),
    ]
    fast = simulate_pipeline(schedule, stages, [Link(latency_s=1.0)])
    slow = simulate_pipeline(schedule, stages, [Link(latency_s=2.0)])
    assert (max(fast.finish_s), max(slow.finish_s)) == (22.0, 20.0)


# --- Jitter -----------------------------------------------------------------------------


def jittered(seed: int, relative: float = 0.1) -> PipelineRun:
    stage = StageTimes(forward_s=0.01, recompute_s=0.01, backward_s=0.02)
    schedule = compact_schedule("varuna", 3, 30, recompute=True)
    jitter = Jitter(relative=relative, seed=seed)
    return simulate_pipeline(schedule, [stage] * 3, [Link(transfer_s=0.001)] * 2, jitter=jitter)


def test_a_seed_gives_the_same_run_again_and_another_seed_another() -> None:
    assert jittered(1) == jittered(1)
    assert jittered(1) != jittered(2)


def test_no_relative_jitter_is_no_jitter() -> None:
    stage = StageTimes(forward_s=0.01, recompute_s=0.01, backward_s=0.02)
    schedule = compact_schedule("varuna", 3, 30, recompute=True)
    plain = simulate_pipeline(schedule, [stage] * 3, [Link(transfer_s=0.001)] * 2)
    assert jittered(1, relative=0.0) == plain


def test_jitter_leaves_the_mean_and_slows_the_whole() -> None:
    runs = [jittered(seed) for seed in range(200)]
    plain = jittered(0, relative=0.0)
    busy = sum(run.busy_s[2] for run in runs) / len(runs)
    assert busy == pytest.approx(plain.busy_s[2], rel=0.01)
    mean_s = sum(max(run.finish_s) for run in runs) / len(runs)
    assert mean_s > max(plain.finish_s)


# --- Refusals and compiling -------------------------------------------------------------

STAGE = StageTimes(forward_s=1.0, recompute_s=1.0, backward_s=1.0)


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf, 1e12])
def test_a_time_that_is_none_is_refused(wrong: float) -> None:
    schedule = compact_schedule("1f1b", 2, 2, recompute=False)
    for stages, link in (
        ([STAGE, replace(STAGE, forward_s=wrong)], Link()),
        ([STAGE, STAGE], Link(latency_s=wrong)),
    ):
        with pytest.raises(PlanError, match=r"times must be 0 or more.*; take fewer"):
            simulate_pipeline(schedule, stages, [link])


def test_stages_and_links_must_fit_the_lists() -> None:
    schedule = compact_schedule("1f1b", 2, 2, recompute=False)
    with pytest.raises(PlanError, match="got 3 stages and 1 links"):
        simulate_pipeline(schedule, [STAGE] * 3, [Link()])
    with pytest.raises(PlanError, match="got 2 stages and 2 links"):
        simulate_pipeline(schedule, [STAGE] * 2, [Link()] * 2)
