from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import (
    a_link,
    a_plan,
    a_profile,
    microbatch_profile,
    section_profile,
)

from spottrain.morphing.adapt.stragglers import (
    MARGIN,
    OUTLYING,
    WINDOW,
    RankSample,
    StragglerWatch,
    expected_busy_s,
    slowness_of,
)
from spottrain.wire.model import (
    SectionProfile,
    TaskOverheads,
)

SHAPES = [(1, 2), (2, 2), (2, 3), (4, 1), (3, 4), (1, 8)]
NOISE = 0.1
FEW = 20
"""Mini-batches beyond a window after which a slow rank is found at the latest."""


def minibatches(
    draw: random.Random, depth: int, width: int, slow: dict[int, float]
) -> Iterator[list[RankSample]]:
    """Mini-batches of a plan whose stages and shares differ; ``slow`` ranks are slow."""
    shares = [draw.randint(1, 8) for _ in range(width)]
    stage_s = [draw.uniform(0.1, 1.0) for _ in range(depth)]
    while True:
        yield [
            RankSample(
                busy_s=shares[rank // depth]
                * stage_s[rank % depth]
                * slow.get(rank, 1.0)
                * max(0.1, draw.gauss(1.0, NOISE)),
                expected_s=shares[rank // depth] * stage_s[rank % depth],
                microbatches=shares[rank // depth],
            )
            for rank in range(depth * width)
        ]


def convicted(watch: StragglerWatch) -> list[int]:
    return [straggler.rank for straggler in watch.stragglers()]


@pytest.mark.rotated
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_noise_of_ten_per_cent_never_convicts(depth: int, width: int) -> None:
    for seed in range(35):  # over all shapes 210 runs
        counts = [0] * (depth * width)
        rows: list[tuple[float, ...]] = []
        samples = minibatches(random.Random(seed), depth, width, {})
        for _ in range(1000):
            ratios = [sample.ratio for sample in next(samples)]
            rows.append(slowness_of(ratios, depth))
            for rank, slowness in enumerate(rows[-1]):
                counts[rank] += slowness > 1 + MARGIN
                if len(rows) > WINDOW:
                    counts[rank] -= rows[-1 - WINDOW][rank] > 1 + MARGIN
            # Counted anew each time, as the watch does it, this would take long.
            assert max(counts) < OUTLYING, f"seed {seed}"


@pytest.mark.rotated
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_ranks_that_scatter_wildly_are_not_convicted(depth: int, width: int) -> None:
    """As workers that share too few cores: all are slower than others half the time."""
    for seed in range(10):
        draw = random.Random(seed)
        watch = StragglerWatch(pipeline_depth=depth)
        for _ in range(300):
            times_s = [draw.lognormvariate(0.0, 0.4) for _ in range(depth * width)]
            watch = watch.observe(
                [RankSample(busy_s=s, expected_s=1.0, microbatches=1) for s in times_s]
            )
            assert watch.stragglers() == (), f"seed {seed}"


def test_a_rank_that_runs_in_bursts_and_is_very_slow_is_found() -> None:
    """As a VM whose processor is taken away for seconds, then given for a moment."""
    for seed in range(20):
        draw = random.Random(seed)
        watch = StragglerWatch(pipeline_depth=1)
        found = 0
        for _ in range(3 * WINDOW):
            slow_s = 12.0 * draw.lognormvariate(0.0, 1.0)
            times_s = (draw.lognormvariate(0.0, 0.5), slow_s)
            watch = watch.observe(
                [RankSample(busy_s=s, expected_s=1.0, microbatches=1) for s in times_s]
            )
            assert convicted(watch) in ([], [1]), f"seed {seed}"
            found += convicted(watch) == [1]
        assert found, f"seed {seed}"


def test_with_one_replica_the_profile_may_be_wrong_about_a_stage() -> None:
    watch = StragglerWatch(pipeline_depth=3)
    for _ in range(5 * WINDOW):
        watch = watch.observe(
            [RankSample(busy_s=s, expected_s=1.0, microbatches=4) for s in (1.0, 1.9, 1.7)]
        )
        assert watch.stragglers() == ()
    for _ in range(WINDOW):
        watch = watch.observe(
            [RankSample(busy_s=s, expected_s=1.0, microbatches=4) for s in (1.0, 1.9, 2.5)]
        )
    assert convicted(watch) == [2]


def test_with_one_replica_a_rank_that_is_slow_from_the_start_must_be_very_slow() -> None:
    watch = steady([1.0, 1.0, 3.0], [4], 3)
    assert convicted(watch) == [2]


@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_a_rank_that_is_thirty_per_cent_slower_is_found(depth: int, width: int) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        slow = draw.randrange(depth * width)
        watch = StragglerWatch(pipeline_depth=depth)
        for _, samples in zip(range(WINDOW), minibatches(draw, depth, width, {}), strict=False):
            watch = watch.observe(samples)
        found = minibatches(draw, depth, width, {slow: 1.3})
        for _ in range(WINDOW + FEW):
            watch = watch.observe(next(found))
            if convicted(watch):
                break
        assert convicted(watch) == [slow], f"seed {seed}"
        (straggler,) = watch.stragglers()
        assert straggler.slowness == pytest.approx(1.3, rel=0.25)
        assert OUTLYING <= straggler.outlying <= WINDOW


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_slowness_is_the_time_over_the_median_of_the_peers(
    depth: int, width: int, data: st.DataObject
) -> None:
    ratios = data.draw(
        st.lists(st.floats(0.1, 10.0), min_size=depth * width, max_size=depth * width)
    )
    for rank, slowness in enumerate(slowness_of(ratios, depth)):
        peers = [
            ratio
            for other, ratio in enumerate(ratios)
            if other != rank and (width == 1 or other % depth == rank % depth)
        ]
        wanted = ratios[rank] / statistics.median(peers) if peers else 1.0
        assert slowness == pytest.approx(wanted)


@given(
    st.lists(st.floats(0.1, 10.0), min_size=6, max_size=6),
    st.permutations(range(3)),
    st.floats(0.1, 10.0),
)
def test_neither_the_order_of_replicas_nor_a_wrong_profile_matters(
    ratios: list[float], order: list[int], wrong: float
) -> None:
    seen = slowness_of(ratios, 2)
    moved = slowness_of([ratios[2 * d + p] for d in order for p in range(2)], 2)
    assert moved == pytest.approx([seen[2 * d + p] for d in order for p in range(2)])
    biased = [ratio * (wrong if rank % 2 else 1) for rank, ratio in enumerate(ratios)]
    assert slowness_of(biased, 2) == pytest.approx(seen)


def steady(busy_s: list[float], shares: list[int], depth: int) -> StragglerWatch:
    watch = StragglerWatch(pipeline_depth=depth)
    for _ in range(WINDOW):
        watch = watch.observe(
            [
                RankSample(
                    busy_s=s,
                    expected_s=shares[r // depth],
                    microbatches=shares[r // depth],
                )
                for r, s in enumerate(busy_s)
            ]
        )
    return watch


def test_a_replacement_saves_the_time_that_the_others_wait_now() -> None:
    # Replica 0 takes 4 micro-batches of 1 s, replica 1 as many of 2 s in one stage.
    watch = steady([4.0, 4.0, 4.0, 8.0], [4, 4], 2)
    assert watch.saved_s(watch.stragglers()) == pytest.approx(4.0)


def test_a_replacement_saves_also_where_the_others_have_taken_work_over() -> None:
    # 6 + 3 virtual nodes of 1 and 2 s take 6 s; as fast as each other they take 4.5 s.
    watch = steady([6.0, 6.0], [6, 3], 1)
    (straggler,) = watch.stragglers()
    assert (straggler.rank, straggler.slowness, straggler.outlying) == (1, 2.0, WINDOW)
    assert watch.saved_s((straggler,)) == pytest.approx(1.5)


def test_no_straggler_is_reported_before_enough_observations() -> None:
    watch = StragglerWatch(pipeline_depth=1)
    assert watch.stragglers() == ()
    samples = [RankSample(busy_s=b, expected_s=1.0, microbatches=1) for b in (1.0, 5.0)]
    for _ in range(OUTLYING - 1):
        watch = watch.observe(samples)
    assert watch.stragglers() == ()
    assert convicted(watch.observe(samples)) == [1]


def test_a_vm_that_is_fast_again_is_let_off() -> None:
    watch = steady([1.0, 5.0], [1, 1], 1)
    even = [RankSample(busy_s=1.0, expected_s=1.0, microbatches=1)] * 2
    for _ in range(WINDOW - OUTLYING + 1):
        watch = watch.observe(even)
    assert watch.stragglers() == ()


def section(index: int) -> SectionProfile:
    return section_profile(
        index,
        forward_s=1.0 + index,
        backward_s=10.0,
        recompute_s=100.0,
        saved_bytes=1,
        output_bytes=1,
    )


def test_busy_time_is_expected_from_the_tasks_that_were_run() -> None:
    link = a_link(latency_s=0.0, bytes_per_s=1.0)
    profile = a_profile(
        microbatch_profile(section(k) for k in range(3)),
        device="cpu",
        between_vms=link,
        task_overhead_s=0.01,
    )
    plan = a_plan(
        2,
        stage_bounds=(0, 2, 3),
        replica_bounds=(0, 4),
    )
    assert expected_busy_s(plan, profile, 0, 4, 3) == pytest.approx(
        4 * (1 + 2 + 20) + 3 * 200 + 11 * 0.01
    )
    assert expected_busy_s(plan, profile, 1, 4, 0) == pytest.approx(4 * 13 + 8 * 0.01)
    beside = TaskOverheads(forward_s=0.5, recompute_s=0.25, backward_s=0.125, posting_s=0.0625)
    one = replace(profile.microbatches[0], overheads=beside)
    by_kind = replace(profile, microbatches=(one,))
    assert expected_busy_s(plan, by_kind, 0, 4, 3) == pytest.approx(
        4 * (1 + 2 + 20 + 0.6875) + 3 * (200 + 0.25)
    )
    both = replace(plan, stage_bounds=(0, 2, 3), segments=2)
    whole = replace(both, segments=1)
    assert expected_busy_s(both, by_kind, 0, 4, 3) == pytest.approx(
        expected_busy_s(whole, by_kind, 0, 4, 3)
        + (4 - 3) * profile.sections_at(both.microbatch_size)[0].recompute_s
        + 4 * 2 * 0.25
    )
