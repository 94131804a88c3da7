"""Hazards: laws of the estimate, and its bounds against published tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammaincinv

from spottrain.cloud.port.provider import SpotPool
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.hazard import (
    BANDS,
    MOST_APART,
    PRIOR_VM_HOURS,
    UNKNOWN_PER_HOUR,
    Hazards,
    ObservedHours,
    _bounds,
    band_per_hour,
    gamma_quantile,
    usual_per_hour,
)
from spottrain.pricing.prices.place import Place

HERE = Place("aws", "us-east-1", "us-east-1a", "p4d.24xlarge")
BESIDE = HERE._replace(zone="us-east-1b")
FAR = HERE._replace(region="us-west-2", zone="us-west-2a")
BANDED = {("aws", "us-east-1", "p4d.24xlarge"): 1}

hours = st.floats(0.0, 1e4)
losses = st.integers(0, 1000)


def seen(place: Place, vm_hours: float, count: int) -> ObservedHours:
    return ObservedHours(place=place, vm_hours=vm_hours, losses=count)


def test_a_band_is_a_share_lost_in_a_month() -> None:
    assert 1 - math.exp(-band_per_hour(0) * 730.0) == pytest.approx(0.025)
    assert [band_per_hour(b) for b in range(5)] == sorted(map(band_per_hour, range(5)))
    with pytest.raises(ValueError, match="got 5"):
        band_per_hour(len(BANDS))


def expected(place: Place, bands: dict[tuple[str, str, str], int] = BANDED) -> float:
    return Hazards([], bands).of(place).losses_per_hour


def test_without_observations_the_gpu_counts() -> None:
    hazard = Hazards([], {}).of(HERE)
    assert hazard.losses_per_hour == pytest.approx(usual_per_hour(HERE))
    assert 24 * usual_per_hour(HERE) == catalogue().gpus["A100"].losses_per_day
    assert usual_per_hour(HERE._replace(instance_type="own")) == UNKNOWN_PER_HOUR
    assert (hazard.vm_hours, hazard.losses) == (0.0, 0)


def test_a_cloud_s_bands_say_which_of_its_places_are_interrupted_more() -> None:
    bands = {**BANDED, ("aws", "us-west-2", "p4d.24xlarge"): 3, ("aws", "x", "p4d.24xlarge"): 2}
    assert expected(HERE, bands) < usual_per_hour(HERE) < expected(FAR, bands)
    ratio = band_per_hour(3) / band_per_hour(1)
    assert expected(FAR, bands) / expected(HERE, bands) == pytest.approx(ratio)


@given(st.dictionaries(st.sampled_from(["us-east-1", "us-west-2", "a", "b"]), st.integers(0, 4)))
def test_publishing_moves_an_estimate_by_no_more_than_a_bound(bands: dict[str, int]) -> None:
    """So clouds that publish and clouds that do not are comparable."""
    rate = expected(HERE, {("aws", region, HERE.instance_type): b for region, b in bands.items()})
    usual = usual_per_hour(HERE)
    assert usual / MOST_APART <= rate * (1 + 1e-9)
    assert rate <= usual * MOST_APART * (1 + 1e-9)


def test_a_rate_says_what_it_rests_on() -> None:
    assert Hazards([], BANDED).of(FAR).basis == "assumed"
    assert Hazards([], BANDED).of(HERE).basis == "published"
    assert Hazards([seen(FAR, 1.0, 0)], BANDED).of(FAR).basis == "measured"
    assert Hazards([seen(FAR, 1.0, 0)], BANDED).of(FAR._replace(zone="b")).basis == "measured"


def test_bounds_hold_the_rates_of_recorded_groups_until_there_are_observations() -> None:
    """1.4 to 14.6 losses a VM-day."""
    unknown = Hazards([], BANDED).of(FAR)
    assert unknown.high > 14.6 / 24
    seen_long = Hazards([seen(FAR, 2400.0, 240)], BANDED).of(FAR)
    assert 0.07 < seen_long.low < 0.1 < seen_long.high < 0.14


def test_a_few_losses_of_our_own_outweigh_the_published_rate() -> None:
    """20 losses in 200 VM-hours, as in traces of 2021."""
    hazard = Hazards([seen(HERE, 200.0, 20)], BANDED).of(HERE)
    before = PRIOR_VM_HOURS * usual_per_hour(HERE)
    assert hazard.losses_per_hour == pytest.approx((20 + before) / 224)
    assert hazard.low < 0.1 < hazard.high


def test_losses_of_a_zone_count_for_other_zones_of_its_region_only() -> None:
    hazards = Hazards([seen(HERE, 100.0, 10)], BANDED)
    before = PRIOR_VM_HOURS * usual_per_hour(HERE)
    assert hazards.of(BESIDE).losses_per_hour == pytest.approx((10 + before) / 124)
    assert hazards.of(FAR) == Hazards([], BANDED).of(FAR)


def test_bounds_are_garwoods() -> None:
    """Chi-squared tables: 1 and 3 events, one-sided 95 %."""
    assert _bounds(1.0) == pytest.approx((0.0513, 4.7439), abs=1e-4)
    assert _bounds(3.0) == pytest.approx((0.8177, 7.7537), abs=1e-4)


@given(hours, losses, hours, losses)
def test_the_estimate_lies_between_its_bounds_and_between_observed_and_prior(
    here_h: float, here: int, beside_h: float, beside: int
) -> None:
    hazards = Hazards([seen(HERE, here_h, here), seen(BESIDE, beside_h, beside)], BANDED)
    hazard = hazards.of(HERE)
    assert 0.0 <= hazard.low <= hazard.losses_per_hour <= hazard.high
    prior = Hazards([seen(BESIDE, beside_h, beside)], BANDED).of(HERE)
    own = here / here_h if here_h > 0 else math.inf
    ends = sorted((prior.losses_per_hour, own))
    if here_h > 0 or here == 0:
        low, high = (ends[0], ends[1]) if here_h > 0 else (0.0, ends[0])
        assert low * (1 - 1e-9) <= hazard.losses_per_hour <= high * (1 + 1e-9)


@given(st.lists(st.tuples(st.sampled_from([HERE, BESIDE]), hours, losses), max_size=6))
def test_splitting_exposures_changes_nothing(
    rows: list[tuple[Place, float, int]],
) -> None:
    whole = [
        seen(
            place,
            math.fsum(h for p, h, _ in rows if p == place),
            sum(n for p, _, n in rows if p == place),
        )
        for place in (HERE, BESIDE)
    ]
    in_parts = Hazards([seen(*row) for row in reversed(rows)], BANDED).of(HERE)
    at_once = Hazards(whole, BANDED).of(HERE)
    assert in_parts.losses_per_hour == pytest.approx(at_once.losses_per_hour)


@given(hours, losses)
def test_safe_hours_lower_the_hazard_and_losses_raise_it(vm_hours: float, count: int) -> None:
    def mean(more_h: float, more: int) -> float:
        rows = [seen(HERE, vm_hours + more_h, count + more)]
        return Hazards(rows, BANDED).of(HERE).losses_per_hour

    assert mean(PRIOR_VM_HOURS, 0) < mean(0.0, 0) < mean(0.0, 1)


def said(zone: str, losses_per_hour: float | None, score: float | None) -> SpotPool:
    return SpotPool(
        cloud=HERE.cloud,
        region=HERE.region,
        zone=zone,
        instance_type=HERE.instance_type,
        losses_per_hour=losses_per_hour,
        obtainability=score,
    )


def prior(hazards: Hazards, place: Place) -> float:
    return hazards.of(place).losses_per_hour / usual_per_hour(place)


def test_what_a_cloud_says_of_a_zone_or_region_moves_the_prior() -> None:
    pools = [said(HERE.zone, 0.02, 0.4), said(HERE.region, 0.06, None)]
    hazards = Hazards([], {}, pools)
    assert prior(hazards, HERE) == pytest.approx(0.02 / 0.04)
    assert prior(hazards, BESIDE) == pytest.approx(0.06 / 0.04)
    assert prior(hazards, FAR) == pytest.approx(1.0)
    assert hazards.of(HERE).basis == "published"
    assert hazards.obtainability(HERE) == 0.4
    assert hazards.obtainability(BESIDE) is None


def test_of_a_region_as_a_whole_the_mean_of_its_zones_is_known() -> None:
    pools = [said(HERE.zone, 0.02, 0.4), said(BESIDE.zone, 0.04, None)]
    region = HERE._replace(zone=HERE.region)
    hazards = Hazards([], {}, pools)
    assert prior(hazards, region) == pytest.approx(0.03 / 0.03)
    assert hazards.obtainability(region) == 0.4
    assert prior(hazards, BESIDE) == pytest.approx(0.04 / 0.03)
    whole = said(HERE.region, 0.08, None)  # what is said of it outdoes the mean
    assert prior(Hazards([], {}, [*pools, whole]), region) == pytest.approx(0.08 / 0.04)


def test_a_score_alone_leaves_the_published_band() -> None:
    hazards = Hazards([], BANDED, [said(HERE.zone, None, 0.4)])
    assert hazards.of(HERE).basis == "published"
    assert prior(hazards, HERE) == pytest.approx(1.0)  # the only band is the median


@given(st.floats(1e-2, 1e5), st.sampled_from([0.05, 0.5, 0.95]))
def test_quantiles_of_the_gamma_distribution_are_those_of_scipy(shape: float, share: float) -> None:
    assert gamma_quantile(shape, share) == pytest.approx(gammaincinv(shape, share), rel=1e-11)
