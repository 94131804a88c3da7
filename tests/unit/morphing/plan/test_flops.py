"""FLOPs of any model, and the share of peak that they come to."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.steps import FACTS

from spottrain.morphing.plan.flops import ComputeUse, model_flops_per_example, training_use
from spottrain.wire.model import ModelFacts


def with_flops(*flops: int | None) -> ModelFacts:
    return replace(
        FACTS,
        sections=tuple(
            replace(FACTS.sections[0], index=k, flops_per_example=one)
            for k, one in enumerate(flops)
        ),
    )


@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=9))
def test_backward_counts_twice_the_forward(flops: list[int]) -> None:
    facts = with_flops(*flops)
    assert model_flops_per_example(facts) == 3 * sum(flops)
    use = training_use(facts, 10, 2.0, [None, None])
    assert use is not None
    assert use.flops_per_s == pytest.approx(7.5 * sum(flops))


def test_facts_without_flops_give_nothing() -> None:
    for facts in (FACTS, with_flops(1, None)):
        assert model_flops_per_example(facts) is None
        assert training_use(facts, 10, 4.0, [1.0]) is None
    assert training_use(with_flops(1), 10, 4.0, []) is None


def test_a_share_of_peak_needs_the_peak_of_every_device() -> None:
    known = training_use(with_flops(1), 20, 2.0, [100.0, 50.0])
    unknown = training_use(with_flops(1), 20, 2.0, [100.0, None])
    assert known is not None
    assert unknown is not None
    assert (known.flops_per_s, known.utilisation) == (15.0, 0.2)
    assert (unknown.flops_per_s, unknown.utilisation) == (15.0, None)
    assert (known + unknown).utilisation is None
    assert known.times(3) == known + known + known
    assert unknown.times(2) == unknown + unknown


@given(
    st.lists(
        st.builds(
            ComputeUse,
            flops=st.floats(1.0, 1e18),
            device_s=st.floats(1e-3, 1e9),
            peak_flops=st.floats(1e3, 1e21),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_sum_is_a_mean_weighted_by_time_and_by_what_was_possible(
    uses: list[ComputeUse],
) -> None:
    total = functools.reduce(operator.add, uses)
    flops = sum(use.flops for use in uses)
    assert total.flops_per_s == pytest.approx(flops / sum(use.device_s for use in uses))
    shares = [use.utilisation or 0.0 for use in uses]
    least, most = min(shares), max(shares)
    assert total.utilisation is not None
    assert least * (1 - 1e-9) <= total.utilisation <= most * (1 + 1e-9)
