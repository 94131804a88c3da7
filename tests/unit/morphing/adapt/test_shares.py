from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.adapt.shares import (
    replica_speed,
    share_virtual_nodes,
)
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.partition import spread
from spottrain.morphing.schedules.schedule import make_schedule
from spottrain.morphing.simulate.replica import Link, StageTimes, simulate_pipeline

throughputs = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


def splits(total: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Return all shares of 1 or more within the limits."""
    if len(limits) == 1:
        if 1 <= total <= limits[0]:
            yield (total,)
        return
    for first in range(1, min(total, limits[0]) + 1):
        yield from ((first, *rest) for rest in splits(total - first, limits[1:]))


def sizes(bounds: Sequence[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(bounds)]


def slowest_s(shares: Sequence[int], seconds: Sequence[float], fixed_s: Sequence[float]) -> float:
    return max(f + n * s for n, s, f in zip(shares, seconds, fixed_s, strict=True))


@given(throughputs, st.data())
def test_no_other_shares_end_sooner(seconds: list[float], data: st.DataObject) -> None:
    count = len(seconds)
    total = data.draw(st.integers(count, 12))
    one_each = st.lists(st.integers(1, 12), min_size=count, max_size=count)
    limits = data.draw(one_each.filter(lambda limits: sum(limits) >= total))
    fixed_s = data.draw(st.lists(st.sampled_from([0.0, 0.5, 40.0]), min_size=count, max_size=count))
    bounds = share_virtual_nodes(total, seconds, limits, fixed_s=fixed_s)
    shares = tuple(sizes(bounds))
    every = list(splits(total, limits))
    assert shares in every
    best_s = min(slowest_s(one, seconds, fixed_s) for one in every)
    assert slowest_s(shares, seconds, fixed_s) == best_s
    assert share_virtual_nodes(total, seconds, limits, fixed_s=fixed_s) == bounds


@given(throughputs, st.data())
def test_no_other_shares_of_larger_micro_batches_end_sooner(
    seconds: list[float], data: st.DataObject
) -> None:
    count = len(seconds)
    total = data.draw(st.integers(count, 12))
    several = st.lists(st.integers(1, 5), min_size=count, max_size=count)
    nodes = data.draw(several)
    fixed_s = data.draw(st.lists(st.sampled_from([0.0, 0.5, 40.0]), min_size=count, max_size=count))

    def end_s(shares: Sequence[int]) -> float:
        whole = [size * math.ceil(n / size) for n, size in zip(shares, nodes, strict=True)]
        return slowest_s(whole, seconds, fixed_s)

    shares = sizes(share_virtual_nodes(total, seconds, fixed_s=fixed_s, sizes=nodes))

    every = list(splits(total, [total] * count))
    assert tuple(shares) in every
    assert end_s(shares) == pytest.approx(min(map(end_s, every)))


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40),
    st.integers(0, 10**6),
    st.floats(0, 1e3),
)
def test_shares_of_any_size_add_up_and_no_single_node_would_end_sooner_elsewhere(
    seconds: list[float], more: int, fixed: float
) -> None:
    total = len(seconds) + more
    fixed_s = [fixed] * len(seconds)
    shares = sizes(share_virtual_nodes(total, seconds, fixed_s=fixed_s))
    assert sum(shares) == total
    assert min(shares) >= 1
    ends_s = [fixed + n * s for n, s in zip(shares, seconds, strict=True) if n > 1] or [0.0]
    next_s = min(fixed + (n + 1) * s for n, s in zip(shares, seconds, strict=True))
    assert max(ends_s) <= next_s


@given(st.integers(1, 50), st.integers(0, 500), st.floats(1e-6, 1e6))
def test_equally_fast_replicas_get_an_even_spread(replicas: int, more: int, seconds: float) -> None:
    total = replicas + more
    assert share_virtual_nodes(total, [seconds] * replicas) == spread(total, replicas)


def test_a_replica_four_times_as_fast_gets_four_times_as_much() -> None:
    seconds = [1.0, 1.0, *[4.0] * 8]
    assert sizes(share_virtual_nodes(64, seconds)) == [16, 16, *[4] * 8]


def test_virtual_nodes_that_do_not_fit_go_to_the_other_replicas() -> None:
    assert sizes(share_virtual_nodes(20, [1.0, 4.0, 4.0], [6, 20, 20])) == [6, 7, 7]


@pytest.mark.parametrize(
    ("total", "seconds", "limits", "fixed_s", "message"),
    [
        (2, [1.0] * 3, None, None, "got 3 replicas for 2"),
        (2, [], None, None, "got 0 replicas"),
        (4, [1.0, 0.0], None, None, "above 0 and finite"),
        (4, [1.0, math.nan], None, None, "above 0 and finite"),
        (4, [1.0, math.inf], None, None, "above 0 and finite"),
        (4, [1.0, 1.0], None, [0.0, -1.0], "fixed times must be 0 or more"),
        (4, [1.0, 1.0], None, [0.0], "2 replicas need as many"),
        (4, [1.0, 1.0], [1, 2], None, "can hold 3 virtual nodes"),
        (4, [1.0, 1.0], [0, 9], None, "the smallest 0: got"),
    ],
)
def test_impossible_shares_are_refused(
    total: int,
    seconds: list[float],
    limits: list[int] | None,
    fixed_s: list[float] | None,
    message: str,
) -> None:
    with pytest.raises(PlanError, match=message):
        share_virtual_nodes(total, seconds, limits, fixed_s=fixed_s)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 0.5, 2.0)])
def test_the_pace_of_a_pipeline_is_that_of_its_simulation(
    speeds: tuple[float, ...],
) -> None:
    stage_s = [3.0 / speed for speed in speeds]
    pace = replica_speed(stage_s)
    stages = [StageTimes(forward_s=s / 3, recompute_s=0, backward_s=2 * s / 3) for s in stage_s]
    lists = make_schedule("gpipe", 3, 40, recompute=False)
    run = simulate_pipeline(lists, stages, [Link(), Link()])
    took_s = pace.fixed_s + 40 * pace.per_virtual_node_s
    assert max(run.finish_s) == pytest.approx(took_s, rel=0.02)
