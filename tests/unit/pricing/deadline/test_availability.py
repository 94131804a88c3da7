"""How much spot VMs will train, from samples of how many there were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from spottrain.pricing.deadline.availability import Availability, availability
from spottrain.units import HOUR_S

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=200).map(np.array)


@given(alpha=st.floats(0.05, 500), ratio=st.floats(0.1, 10))
def test_quantiles_are_those_of_a_beta_distribution(alpha: float, ratio: float) -> None:
    chances = (0.05, 0.1, 0.5, 0.9, 0.95)
    found = Availability(alpha=alpha, beta=alpha * ratio, usual=0.5).quantiles(chances)
    assert found == pytest.approx(beta.ppf(chances, alpha, alpha * ratio), abs=0.005)


@given(SHARES, st.floats(0, 1000))
def test_any_samples_give_shares_in_order(shares: np.ndarray, hours: float) -> None:
    low, middle, high = availability(shares, hours * HOUR_S).quantiles((0.05, 0.5, 0.95))
    assert 0 <= low <= middle <= high <= 1


def test_a_market_that_was_longer_the_same_is_surer_to_stay_so() -> None:
    few, many = (availability(np.full(count, 0.5), 48 * HOUR_S) for count in (4, 192))
    assert few.quantile(0.05) < many.quantile(0.05) < 0.5 < many.quantile(0.95)
    assert many.quantile(0.95) < few.quantile(0.95)


def test_what_is_there_now_counts_for_the_near_future_and_not_for_the_far() -> None:
    shares = np.tile((0.0, 1.0), 96)
    soon, later = (availability(shares, hours * HOUR_S).quantile(0.5) for hours in (0.25, 200))
    assert soon > 0.9
    assert later == pytest.approx(0.5, abs=0.05)
