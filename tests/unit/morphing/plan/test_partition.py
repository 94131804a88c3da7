from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.partition import join, partition, spread

# Whole numbers: their sums are exact, so that equal costs compare as equal.
costs = st.lists(st.integers(0, 20), min_size=1, max_size=8)


def all_bounds(count: int, stages: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, count), stages - 1)
    return [(0, *cuts, count) for cuts in inner]


def rank(
    bounds: Sequence[int], costs_s: Sequence[float], last_costs_s: Sequence[float]
) -> tuple[float, float]:
    runs = [sum(costs_s[a:b]) for a, b in itertools.pairwise(bounds)]
    runs[-1] = sum(last_costs_s[bounds[-2] :])
    return max(runs), sum(run**2 for run in runs)


@given(costs, st.data())
def test_no_cut_has_a_cheaper_bottleneck_or_is_more_even(
    costs_s: list[int], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs_s)))
    last_costs_s = [data.draw(st.integers(0, cost)) for cost in costs_s]
    bounds = partition(costs_s, stages, last_costs_s=last_costs_s)
    assert bounds in all_bounds(len(costs_s), stages)
    best = min(rank(b, costs_s, last_costs_s) for b in all_bounds(len(costs_s), stages))
    assert rank(bounds, costs_s, last_costs_s) == best
    assert partition(costs_s, stages, last_costs_s=last_costs_s) == bounds


@given(costs, st.data())
def test_the_best_cut_that_fits_is_found_if_there_is_one(
    costs_s: list[int], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs_s)))
    whole = len(costs_s)
    ends = data.draw(
        st.lists(
            st.lists(st.integers(0, whole), min_size=whole, max_size=whole),
            min_size=stages,
            max_size=stages,
        )
    )

    def farthest(stage: int, start: int) -> int:
        return max(start, ends[stage][start])

    good = [
        bounds
        for bounds in all_bounds(whole, stages)
        if all(b <= farthest(p, a) for p, (a, b) in enumerate(itertools.pairwise(bounds)))
    ]
    bounds = partition(costs_s, stages, farthest)
    if not good:
        assert bounds is None
    else:
        assert bounds in good
        best = min(rank(b, costs_s, costs_s) for b in good)
        assert rank(bounds, costs_s, costs_s) == best


def test_a_heavy_head_shortens_the_last_stage() -> None:
    assert partition([1, 1, 1, 1, 1, 1, 1, 4], 3) == (0, 3, 7, 8)


@pytest.mark.parametrize("stages", [0, 4])
def test_stages_without_a_section_are_refused(stages: int) -> None:
    with pytest.raises(PlanError, match="every stage needs a section: got"):
        partition([1.0, 1.0, 1.0], stages)


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_refused(cost: float) -> None:
    with pytest.raises(PlanError, match="calibrate again"):
        partition([1.0, cost], 1)


@given(st.integers(1, 300), st.data())
def test_shares_differ_by_at_most_one_and_larger_ones_come_first(
    virtual_nodes: int, data: st.DataObject
) -> None:
    replicas = data.draw(st.integers(1, virtual_nodes))
    bounds = spread(virtual_nodes, replicas)
    shares = [b - a for a, b in itertools.pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == virtual_nodes
    assert len(shares) == replicas
    assert shares == sorted(shares, reverse=True)
    assert 1 <= shares[-1] >= shares[0] - 1


@pytest.mark.parametrize("replicas", [0, 4])
def test_replicas_without_a_virtual_node_are_refused(replicas: int) -> None:
    with pytest.raises(PlanError, match="every replica needs a virtual node"):
        spread(3, replicas)


def test_spans_are_kept_in_one_piece_the_shortest_first() -> None:
    assert join(6, [(1, 2), (4, 5)], 3) == (0, 1, 3, 4, 6)
    assert join(6, [(1, 2), (0, 5)], 2) == (0, 1, 3, 4, 5, 6)
    assert join(6, [(1, 2)], 6) == (0, 1, 2, 3, 4, 5, 6)


@given(
    st.integers(1, 12).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(
                st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(
                    lambda ends: (min(ends), max(ends))
                ),
                max_size=4,
            ),
            st.integers(1, n),
        )
    )
)
def test_joined_sections_are_enough_for_the_stages(
    case: tuple[int, list[tuple[int, int]], int],
) -> None:
    count, spans, stages = case
    groups = join(count, spans, stages)
    assert groups[0] == 0
    assert groups[-1] == count
    assert len(groups) > stages
    assert join(count, reversed(spans), stages) == groups
