"""The interval of checkpoints: it costs least, follows what is measured, and is bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.adapt.checkpointing import (
    MAX_S,
    MIN_COST_S,
    MIN_S,
    CheckpointInterval,
    expected_lag_s,
    interval_s,
    state_losses_per_s,
)

costs = st.floats(MIN_COST_S, 60.0)
rates = st.floats(1e-7, 1.0)


def wasted(every_s: float, cost_s: float, losses_per_s: float) -> float:
    """Return the time of a job over its undisturbed time, by Daly's exact model: losses
    are a Poisson process, and strike checkpoints too."""
    return math.expm1((every_s + cost_s) * losses_per_s) / (losses_per_s * every_s)


@given(costs, rates, st.floats(MIN_S, MAX_S))
def test_no_other_interval_costs_noticeably_less(
    cost_s: float, losses_per_s: float, other_s: float
) -> None:
    if (other_s + cost_s) * losses_per_s > 500:
        return  # such a job would never end
    chosen_s = interval_s(cost_s, losses_per_s)
    least = wasted(other_s, cost_s, losses_per_s)
    assert wasted(chosen_s, cost_s, losses_per_s) <= 1.02 * least


@given(costs, costs, rates, rates)
def test_it_grows_with_the_cost_and_falls_with_the_losses(
    cost_s: float, more_s: float, rate: float, higher: float
) -> None:
    few, many = sorted((rate, higher))
    cheap_s, expensive_s = sorted((cost_s, more_s))
    if expensive_s < 1 / many:  # as checkpoints are: Daly's is not monotonic beyond
        assert interval_s(cheap_s, few) <= interval_s(expensive_s, few) * (1 + 1e-9)
    assert interval_s(cheap_s, many) <= interval_s(cheap_s, few) * (1 + 1e-9)


@pytest.mark.parametrize(("losses_per_s", "every_s"), [(0.0, 5.0), (10.0, 5.0)])
def test_what_asks_for_no_store_may_take_a_share_of_the_time(
    losses_per_s: float, every_s: float
) -> None:
    """With no losses known, too; with many, no more often than by that share."""
    interval = CheckpointInterval(losses_per_s, 0.1, 0.05, min_cost_s=0.01, cheap_share=0.01)
    assert interval.every_steps == round(every_s / 0.1)


@given(st.floats(0.0, 1e9), st.floats(0.0, 1e9))
def test_it_is_bounded_whatever_was_measured(cost_s: float, losses_per_s: float) -> None:
    assert MIN_S <= interval_s(cost_s, losses_per_s) <= MAX_S


@pytest.mark.parametrize("values", [(-1.0, 1.0), (1.0, -1.0), (math.nan, 1.0)])
def test_what_is_no_measurement_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="give 0 or more"):
        interval_s(*values)


ALONE = [{"a"}, {"b"}]
PAIRS = [{"a", "c"}, {"b", "d"}]
SAME_PAIR = [{"a", "b"}, {"a", "b"}]


def test_second_copies_make_losses_of_progress_rare() -> None:
    moments = [0.0, 1000.0, 2000.0]
    alone, pairs = (state_losses_per_s(s, moments, 3600.0) for s in (ALONE, PAIRS))
    assert 0 < pairs < alone / 2
    # Of four VMs two pairs of six are fatal; of two VMs the only one is.
    together = state_losses_per_s(SAME_PAIR, moments, 3600.0)
    assert together > pairs / 2
    assert state_losses_per_s([{"a", "b", "c"}], moments, 3600.0) < together


@given(st.integers(0, 20), st.floats(0.0, 1e6), st.booleans())
def test_rates_follow_what_was_observed(seen: int, observed_s: float, spot: bool) -> None:
    moments = [observed_s * i / (seen + 1) for i in range(seen)]
    rate = state_losses_per_s(ALONE, moments, observed_s, spot=spot)
    assert rate >= 0
    assert state_losses_per_s(ALONE, moments, 2 * observed_s + 1, spot=spot) < rate
    more = [*moments, observed_s]
    assert state_losses_per_s(ALONE, more, observed_s, spot=spot) > rate
    # On-demand VMs are trusted more, until they have shown what they are like.
    assert state_losses_per_s(ALONE, [], observed_s, spot=False) < state_losses_per_s(
        ALONE, [], observed_s
    )


def test_losses_in_bursts_make_second_copies_worth_less() -> None:
    apart = [100.0 * i for i in range(20)]
    bursts = [500.0 * (i // 5) + i % 5 for i in range(20)]
    rates = [state_losses_per_s(PAIRS, seen, 3600.0) for seen in (apart, bursts)]
    assert rates[0] < rates[1] / 3


def test_a_plan_without_vms_loses_nothing() -> None:
    assert state_losses_per_s([], [], 0.0) == 0.0


def observed(cost_s: float, steps: int = 20, minibatch_s: float = 1.0) -> CheckpointInterval:
    """An interval that has seen a checkpoint, over three mini-batches."""
    interval = CheckpointInterval(1 / 3600, 5 * minibatch_s)
    for _ in range(steps):
        interval.observe(minibatch_s, saving=False)
    interval.begin(0.25 * cost_s)
    for left in (2, 1, 0):
        interval.observe(minibatch_s + 0.25 * cost_s, saving=left > 0)
    interval.observe(minibatch_s, saving=False)
    return interval


@given(st.floats(0.2, 20.0), st.floats(0.01, 10.0))
def test_what_a_checkpoint_costs_is_what_it_slows_training_by(
    cost_s: float, minibatch_s: float
) -> None:
    interval = observed(cost_s, minibatch_s=minibatch_s)
    assert interval.step_s == minibatch_s
    assert interval.cost_s == pytest.approx(cost_s, rel=1e-6)
    every_s = interval.every_steps * minibatch_s
    assert every_s == pytest.approx(interval_s(cost_s, 1 / 3600), abs=minibatch_s / 2 + 1e-3)


def test_a_checkpoint_that_costs_nothing_measurable_is_not_free() -> None:
    assert observed(0.0).cost_s == MIN_COST_S


def test_until_it_is_measured_a_cost_is_what_was_known() -> None:
    interval = CheckpointInterval(1 / 3600, 1.0, cost_s=7.0)
    interval.begin(1.0)  # a plan without second copies begins with one
    interval.observe(30.0, saving=True)
    interval.observe(2.0, saving=False)
    assert interval.cost_s == 7.0
    for _ in range(3):
        interval.observe(1.0, saving=False)
    # The first mini-batch of a generation is slow whatever is beside it.
    assert interval.cost_s == pytest.approx((7.0 + 1.0 + 1.0) / 2)


def test_without_measurements_every_vm_counts() -> None:
    assert MIN_S / 2 <= expected_lag_s(64) < expected_lag_s(4) <= MAX_S / 2
