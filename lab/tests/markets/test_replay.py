"""The deadline policy on synthetic markets: in time, in budget, near the bound, intervals kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import costly
from tests.unit.pricing.deadline_jobs import FLEET, spot, status
from tests.unit.pricing.deadline_jobs import ON_DEMAND as VMS

from spottrain.pricing.deadline.forecast import forecast
from spottrain.pricing.deadline.model import Holdings
from spottrain.pricing.deadline.outlook import MarketOutlook
from spottrain.units import HOUR_S
from spottrain_lab.markets.baselines import (
    CostOptimal,
    GreedyFailover,
    LookAhead,
    OnDemandOnly,
    Redundancy,
    SpotOnlyWait,
    UniformProgress,
)
from spottrain_lab.markets.evaluate import (
    FREE,
    evaluate,
    kept,
    offline_optimum_usd,
    online_bound_row,
    online_bound_usd,
    rows,
)
from spottrain_lab.markets.replay import ON_DEMAND, play
from spottrain_lab.markets.scenarios import Scenario, Zone, prolonged, synthetic


def scenario(lives: list[tuple[float, float]], *, hours: float, work: float) -> Scenario:
    """``work``: hours of the largest fleet."""
    return Scenario(
        name="by hand",
        zones=(Zone(name="spot", lives=tuple(lives), usd_per_hour=(1.0,)),),
        on_demand_usd_per_hour=3.0,
        notice_s=0.0,
        fleet=FLEET,
        examples=work * HOUR_S * FLEET.rates[-1],
        deadline_s=hours * HOUR_S,
        max_usd=1000.0,
    )


STEADY = [(0.0, math.inf)] * 4


def test_a_job_without_losses_takes_boot_joining_and_training() -> None:
    outcome = play(scenario(STEADY, hours=9, work=5), SpotOnlyWait())
    paid_s = FLEET.boot_s + FLEET.morph_s + 5 * HOUR_S
    assert outcome.finished_s == pytest.approx(paid_s)
    assert outcome.usd == pytest.approx(4 * paid_s / HOUR_S)
    assert outcome.booting_usd == pytest.approx(4 * FLEET.boot_s / HOUR_S)
    assert outcome.paused_usd == pytest.approx(4 * FLEET.morph_s / HOUR_S)


def test_a_loss_costs_a_pause_and_the_work_in_flight() -> None:
    lives = [(0.0, 2 * HOUR_S), *STEADY[1:]]
    outcome = play(scenario(lives, hours=9, work=5), SpotOnlyWait())
    whole = play(scenario(STEADY, hours=9, work=5), SpotOnlyWait())
    left = (5 - 2) * HOUR_S + FLEET.boot_s + FLEET.morph_s + FLEET.lost_s
    later_s = 2 * HOUR_S + FLEET.morph_s + left * FLEET.rates[4] / FLEET.rates[3]
    assert outcome.losses == 1
    assert outcome.finished_s == pytest.approx(later_s)
    assert outcome.finished_s > whole.finished_s


def test_without_spot_vms_the_fallback_alone_is_in_time() -> None:
    outcome = play(scenario([], hours=6, work=5), CostOptimal())
    assert outcome.in_time
    assert outcome.on_demand_usd == pytest.approx(outcome.usd)


def test_a_storm_at_the_worst_moment_does_not_break_the_deadline() -> None:
    for storm_h in (0.5, 1.0, 2.0, 4.0, 5.0):
        lives = [(0.0, storm_h * HOUR_S)] * 4
        outcome = play(scenario(lives, hours=5.2, work=5), CostOptimal())
        assert outcome.in_time, storm_h


@pytest.mark.rotated
@given(st.integers(10**6, 10**9))
@costly
def test_limits_are_kept_on_any_market_and_cost_is_no_less_than_the_bound(
    seed: int,
) -> None:
    market = synthetic(seed)
    outcome = play(market, CostOptimal())
    assert outcome.in_time
    assert outcome.in_budget
    assert outcome.usd >= offline_optimum_usd(market) * (1 - 1e-6)


@given(st.integers(10**6, 10**9), st.floats(0.0, 0.05), st.floats(0.0, 0.05))
@costly
def test_limits_are_kept_with_next_to_no_slack_of_time_and_money(
    seed: int, time: float, money: float
) -> None:
    market = synthetic(seed)
    paid_s, usd = market.on_demand()
    tight = replace(market, deadline_s=paid_s * (1 + time), max_usd=usd * (1 + money))
    outcome = play(tight, CostOptimal())
    assert outcome.in_time
    assert outcome.in_budget


def test_redundant_vms_are_slower_and_lose_no_work() -> None:
    plain = scenario(STEADY, hours=20, work=5)
    redundant = Redundancy.scenario(plain)
    whole = play(redundant, Redundancy())
    start_s = FLEET.boot_s + FLEET.morph_s
    assert whole.finished_s == pytest.approx(start_s + 5 * HOUR_S / Redundancy.speed)
    struck = Redundancy.scenario(scenario([(0.0, 2 * HOUR_S), *STEADY], hours=20, work=5))
    one_lost = play(struck, Redundancy())
    assert one_lost.finished_s < whole.finished_s + FLEET.boot_s + 2 * FLEET.morph_s + 1


def test_the_look_ahead_rents_no_vms_that_it_expects_to_lose() -> None:
    rule = LookAhead()
    lives = [(0.0, 600.0), (0.0, 900.0), (0.0, 1200.0), (0.0, math.inf)]
    outcome = play(scenario(lives, hours=30, work=5), rule)
    eager = play(scenario(lives, hours=30, work=5), SpotOnlyWait())
    assert outcome.finished
    assert outcome.launches <= eager.launches
    steady = scenario(STEADY, hours=9, work=5)
    assert play(steady, LookAhead()).usd == play(steady, SpotOnlyWait()).usd


def test_on_demand_only_is_in_time_and_spot_only_may_be_late() -> None:
    dry = scenario([(0.0, HOUR_S)] * 4, hours=6, work=5)
    assert play(dry, OnDemandOnly()).in_time
    assert not play(dry, SpotOnlyWait()).in_time


def test_failover_rents_on_demand_at_once_and_uniform_progress_when_behind() -> None:
    short = scenario([(0.0, HOUR_S)] * 4, hours=12, work=5)
    greedy, even = play(short, GreedyFailover()), play(short, UniformProgress())
    assert greedy.in_time
    assert even.in_time
    assert greedy.finished_s < even.finished_s


def test_a_scenario_is_the_same_for_the_same_seed_and_feasible() -> None:
    assert synthetic(7) == synthetic(7)
    assert synthetic(7) != synthetic(8)
    for seed in range(20):
        market = synthetic(seed)
        paid_s, usd = market.on_demand()
        assert paid_s <= market.deadline_s
        assert usd <= market.max_usd * (1 + 1e-9)
        for zone in market.zones:
            assert all(a < b for a, b in zone.lives)
            assert max(zone.usd_per_hour) <= market.on_demand_usd_per_hour


def test_markets_repeat_for_late_jobs() -> None:
    short = replace(scenario([(0.0, HOUR_S)] * 4, hours=3, work=2), market_s=1.5 * HOUR_S)
    assert not play(short, SpotOnlyWait()).finished
    late = play(prolonged(short), SpotOnlyWait())
    assert late.finished
    assert not late.in_time
    assert late.finished_s == pytest.approx(3 * HOUR_S * (1 + late.late_by))
    assert 3 * HOUR_S < late.finished_s < 4 * HOUR_S
    assert play(prolonged(short), OnDemandOnly()) == play(short, OnDemandOnly())


def test_a_late_job_pays_to_the_end_and_rules_are_compared_on_jobs_in_time() -> None:
    dry = replace(scenario([(0.0, HOUR_S)] * 4, hours=3, work=2), market_s=1.5 * HOUR_S)
    gone = replace(dry, zones=(replace(dry.zones[0], lives=()),))
    cases = [evaluate(one) for one in (scenario(STEADY, hours=9, work=5), dry, gone)]
    found = {row.rule: row for row in rows(cases)}
    row, ours = found["spot only, wait"], found[CostOptimal.name]
    assert (row.in_time, row.never, ours.in_time) == (1, 1, 3)
    assert row.late_by == pytest.approx(cases[1].outcomes[3].late_by)
    easy = cases[0]
    assert row.in_time_over_bound == pytest.approx(easy.outcomes[3].usd / easy.offline_optimum_usd)
    assert row.ours_over_bound == pytest.approx(easy.outcomes[0].usd / easy.offline_optimum_usd)
    assert row.kept_over_bound == pytest.approx(3 * row.total_over_bound)


def test_in_one_zone_the_online_bound_lies_between() -> None:
    lives = [(at_h * HOUR_S, (at_h + 2) * HOUR_S) for at_h in (0, 0, 1, 2, 3, 4)]
    market = scenario(lives, hours=6, work=2)
    assert online_bound_usd(replace(market, zones=market.zones * 2)) is None
    row = online_bound_row([evaluate(market)])
    assert row is not None
    assert row.jobs == 1
    assert row.over_bound > row.online_over_bound
    assert row.over_online == pytest.approx(row.over_bound / row.online_over_bound)
    assert online_bound_row([]) is None


def test_the_table_has_a_row_for_each_rule_and_one_without_frictions() -> None:
    cases = [evaluate(scenario(STEADY, hours=9, work=5))]
    found = {row.rule: row for row in rows(cases)}
    ours = found[CostOptimal.name]
    assert ours.in_time == 1
    assert found["on-demand only"].on_demand == pytest.approx(1.0)
    assert 1.0 <= found[FREE].over_bound < ours.over_bound
    assert found["spot only, wait"].late_by is None
    assert len(cases[0].forecasts) == len(cases[0].time_optimal_forecasts) == 3
    predicted = cases[0].forecasts
    assert kept(predicted) == (
        sum(one.finish_kept for one in predicted) / 3,
        sum(one.usd_kept for one in predicted) / 3,
    )


# --- Forecasts ---


def test_a_forecast_lies_between_the_earliest_finish_and_the_deadline() -> None:
    at = status(hours=9, work=5)
    predicted = forecast(
        at, FLEET, (spot(), VMS), (Holdings(name="spot", ready=4),), MarketOutlook()
    )
    finish, usd = predicted.finish_s, predicted.usd
    assert 5 * HOUR_S <= finish.low <= finish.expected <= finish.high <= 9 * HOUR_S
    assert usd.low <= usd.expected <= usd.high <= 4 * 3 * 5.1


def test_a_job_that_is_late_costs_what_on_demand_vms_cost() -> None:
    at = status(hours=2, work=5)
    for cost_optimal in (True, False):
        predicted = forecast(
            at, FLEET, (spot(), VMS), (), MarketOutlook(), cost_optimal=cost_optimal
        )
        assert predicted.usd.expected == pytest.approx(4 * 3 * 5, rel=0.05)
        assert predicted.usd.low < predicted.usd.expected < predicted.usd.high


def test_without_a_deadline_the_end_is_open() -> None:
    at = status(hours=None, work=5, usd=99.0)
    predicted = forecast(at, FLEET, (spot(), VMS), (), MarketOutlook())
    assert predicted.finish_s.high == math.inf
    assert predicted.finish_s.expected == pytest.approx(5 * HOUR_S)
    assert predicted.usd.high == 99.0
    dry = forecast(at, FLEET, (spot(available=0), VMS), (), MarketOutlook())
    assert dry.finish_s.expected == math.inf


def test_a_finished_job_costs_no_more() -> None:
    at = status(hours=5, work=0)
    predicted = forecast(at, FLEET, (spot(), VMS), (), MarketOutlook())
    assert (predicted.usd.high, predicted.finish_s.high) == (0.0, 0.0)


def test_the_name_of_the_supply_on_demand_is_that_of_the_replay() -> None:
    assert VMS.name == ON_DEMAND
