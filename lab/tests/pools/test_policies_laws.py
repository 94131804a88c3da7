"""Laws that the linear programs must obey on any market, and a closed form."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_lab.pools import programs
from spottrain_lab.pools.market import Demand, Hours, InfeasibleError, OfferType
from spottrain_lab.pools.policies import cheapest, fairest, shortest

RATE = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 7.0])
PRICE = st.sampled_from([0.1, 0.5, 1.0, 3.0])
CLOSE = 1 + 1e-6


@st.composite
def markets(draw: st.DrawFn) -> tuple[list[OfferType], list[Demand]]:
    """Markets of a few types and jobs, each job with at least one type it fits."""
    kinds = draw(st.integers(1, 3))
    quotas = st.sampled_from([1.0, 2.0, 5.0, math.inf])
    types = [
        OfferType(name=f"t{j}", usd_per_hour=draw(PRICE), quota=draw(quotas)) for j in range(kinds)
    ]
    rates = st.tuples(*[RATE] * kinds).filter(any)
    jobs = [
        Demand(
            name=f"j{m}",
            examples=draw(st.sampled_from([1800.0, 3600.0, 9000.0])),
            examples_per_s=draw(rates),
            deadline_h=draw(st.sampled_from([0.5, 1.0, 3.0, 20.0, math.inf])),
        )
        for m in range(draw(st.integers(1, 4)))
    ]
    return types, jobs


def usd_or_none(types: list[OfferType], jobs: list[Demand]) -> float:
    try:
        return cheapest(types, jobs).usd
    except InfeasibleError:
        return math.inf


@given(markets(), st.integers(0, 2))
def test_more_quota_never_costs_more(
    drawn: tuple[list[OfferType], list[Demand]], which: int
) -> None:
    types, jobs = drawn
    wide = [
        replace(kind, quota=kind.quota + 1) if j == which else kind for j, kind in enumerate(types)
    ]
    assert usd_or_none(wide, jobs) <= usd_or_none(types, jobs) * CLOSE


@given(markets(), st.integers(0, 3), st.sampled_from([1.1, 2.0, 10.0]))
def test_a_looser_deadline_never_costs_more(
    drawn: tuple[list[OfferType], list[Demand]], which: int, factor: float
) -> None:
    types, jobs = drawn
    loose = [
        replace(job, deadline_h=job.deadline_h * factor) if m == which else job
        for m, job in enumerate(jobs)
    ]
    assert usd_or_none(types, loose) <= usd_or_none(types, jobs) * CLOSE


@given(markets(), st.sampled_from([0.01, 3.0, 1000.0]))
def test_scaled_prices_scale_the_cost(
    drawn: tuple[list[OfferType], list[Demand]], factor: float
) -> None:
    types, jobs = drawn
    expensive = [replace(t, usd_per_hour=t.usd_per_hour * factor) for t in types]
    usd = usd_or_none(types, jobs)
    assert usd_or_none(expensive, jobs) == pytest.approx(usd * factor, rel=1e-6)


@given(markets())
def test_a_solution_is_in_time_and_within_quotas(
    drawn: tuple[list[OfferType], list[Demand]],
) -> None:
    types, jobs = drawn
    try:
        found = cheapest(types, jobs)
    except InfeasibleError:
        return
    check(types, jobs, found)
    ends = [job.deadline_h for job in jobs]
    for job, hours in zip(jobs, found.hours, strict=True):
        assert sum(hours) <= job.deadline_h * CLOSE
    assert found.makespan_h <= max(ends) * CLOSE


@given(markets())
def test_the_deadlines_that_are_named_can_be_met(
    drawn: tuple[list[OfferType], list[Demand]],
) -> None:
    types, jobs = drawn
    if usd_or_none(types, jobs) < math.inf:
        return
    with pytest.raises(InfeasibleError) as error:
        cheapest(types, jobs)
    nearest = error.value.min_deadline_h
    eased = [replace(job, deadline_h=nearest.get(job.name, job.deadline_h) * CLOSE) for job in jobs]
    assert usd_or_none(types, eased) < math.inf


@given(markets(), st.sampled_from([1.0, 1.3, 4.0]))
def test_the_shortest_within_a_budget_is_within_it_and_cannot_be_had_for_less(
    drawn: tuple[list[OfferType], list[Demand]], factor: float
) -> None:
    types, jobs = drawn
    endless = [replace(job, deadline_h=math.inf) for job in jobs]
    max_usd = cheapest(types, endless).usd * factor
    found = shortest(types, jobs, max_usd=max_usd)
    check(types, jobs, found)
    assert found.usd <= max_usd * CLOSE
    tighter = [replace(j, deadline_h=found.makespan_h * 0.999) for j in jobs]
    assert usd_or_none(types, tighter) > max_usd


def check(types: list[OfferType], jobs: list[Demand], found: Hours) -> None:
    """Assert that all work is done, and that dollars and makespan add up."""
    for job, hours in zip(jobs, found.hours, strict=True):
        assert min(hours) >= 0
        rates = zip(hours, job.examples_per_s, strict=True)
        assert sum(h * 3600 * r for h, r in rates) == pytest.approx(job.examples)
    used = [sum(column) for column in zip(*found.hours, strict=True)]
    prices = zip(used, types, strict=True)
    assert found.usd == pytest.approx(sum(h * t.usd_per_hour for h, t in prices))
    for hours_used, kind in zip(used, types, strict=True):
        assert hours_used <= kind.quota * found.makespan_h * CLOSE


def test_many_deadlines_are_all_met() -> None:
    types = [OfferType(name=name, usd_per_hour=1, quota=3) for name in ("fast", "slow")]
    jobs = [
        Demand(
            name=f"j{m}",
            examples=3600.0,
            examples_per_s=(1.0, 0.5),
            deadline_h=1.0 + m / 3,
        )
        for m in range(40)
    ]
    found = cheapest(types, jobs)
    check(types, jobs, found)
    for job, hours in zip(jobs, found.hours, strict=True):
        assert sum(hours) <= job.deadline_h * CLOSE


def close_deadlines(
    number: int, *rates: float, quota: float
) -> tuple[list[OfferType], list[Demand]]:
    """Jobs that all need nearly all of their time."""
    types = [OfferType(name=f"t{k}", usd_per_hour=9.0**k, quota=quota) for k in range(len(rates))]
    jobs = [
        Demand(
            name=f"j{m}",
            examples=3600.0 * (10 + m),
            examples_per_s=rates,
            deadline_h=(10 + m) * 1.001,
        )
        for m in range(number)
    ]
    return types, jobs


@pytest.mark.parametrize("rates", [(1.0,), (1.0, 2.0)])
@pytest.mark.parametrize("quota", [40, 1000, math.inf])
def test_a_quota_that_is_enough_costs_nothing(rates: tuple[float, ...], quota: float) -> None:
    types, jobs = close_deadlines(40, *rates, quota=quota)
    assert cheapest(types, jobs).usd == pytest.approx(1180.0)


def test_a_quota_that_is_one_too_small_is_named() -> None:
    types, jobs = close_deadlines(40, 1.0, quota=39)
    with pytest.raises(InfeasibleError, match="t0"):
        cheapest(types, jobs)


def test_of_many_jobs_only_the_late_one_is_named() -> None:
    types, jobs = close_deadlines(300, 1.0, 1.1, 1.2, quota=1000)
    assert programs.MAX_COLUMNS // (3 * 300) < 300
    assert cheapest(types, jobs).usd == pytest.approx(sum(10 + m for m in range(300)))
    jobs[123] = replace(jobs[123], deadline_h=100.0)
    with pytest.raises(InfeasibleError, match=r"^j123: deadline 100 h: ") as error:
        cheapest(types, jobs)
    assert error.value.min_deadline_h == pytest.approx({"j123": 133 / 1.2})


@given(markets())
def test_fewer_periods_than_deadlines_give_no_infeasible_solution(
    drawn: tuple[list[OfferType], list[Demand]],
) -> None:
    types, jobs = drawn
    exact_usd = usd_or_none(types, jobs)
    wide = [replace(kind, quota=10.0 * len(jobs)) for kind in types]
    wide_usd = usd_or_none(wide, jobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "MIN_PERIODS", 2)
        patch.setattr(programs, "MAX_COLUMNS", 1)
        assert usd_or_none(types, jobs) >= exact_usd / CLOSE
        assert usd_or_none(wide, jobs) == pytest.approx(wide_usd)


@given(
    st.lists(st.tuples(PRICE, st.floats(0.1, 10)), min_size=1, max_size=4),
    st.floats(0.05, 30),
)
def test_one_job_costs_what_the_best_two_types_in_turn_cost(
    offers: list[tuple[float, float]], deadline_h: float
) -> None:
    types = [OfferType(name=f"t{j}", usd_per_hour=usd) for j, (usd, _) in enumerate(offers)]
    job = Demand(
        name="job",
        examples=3600.0,
        examples_per_s=tuple(rate for _, rate in offers),
        deadline_h=deadline_h,
    )
    singles = [usd / rate for usd, rate in offers if 1 / rate <= deadline_h]
    pairs = [
        (part * first_usd / first + (1 - part) * second_usd / second)
        for (first_usd, first), (second_usd, second) in permutations(offers, 2)
        if first < second and 1 / first > deadline_h >= 1 / second
        for part in [(deadline_h - 1 / second) / (1 / first - 1 / second)]
    ]
    expected = min(singles + pairs, default=math.inf)
    assert usd_or_none(types, [job]) == pytest.approx(expected, rel=1e-5)


@given(markets())
def test_fair_shares_are_no_worse_than_an_equal_part_of_everything(
    drawn: tuple[list[OfferType], list[Demand]],
) -> None:
    types, jobs = drawn
    finite = [replace(t, quota=min(t.quota, 5.0)) for t in types]
    assert fairest(finite, jobs, against="isolated").objective >= 1 - 1e-6
