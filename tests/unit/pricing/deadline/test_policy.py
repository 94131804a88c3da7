"""The deadline policy: what is rented in which situation, and the on-demand fallback."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.pricing.deadline_jobs import FLEET, ON_DEMAND, spot, status

from spottrain.errors import ConfigError
from spottrain.pricing.deadline.fallback import feasible, on_demand_fallback
from spottrain.pricing.deadline.markets import (
    markets,
)
from spottrain.pricing.deadline.model import (
    Fleet,
    FleetDecision,
    Holdings,
    JobStatus,
    Supply,
)
from spottrain.pricing.deadline.outlook import (
    MarketOutlook,
    SpotQuote,
    observe,
    sample,
)
from spottrain.pricing.deadline.policy import decide
from spottrain.pricing.deadline.tuning import MAX_QUOTES, MAX_SAMPLES, SAMPLE_S
from spottrain.units import HOUR_S

NOTHING: tuple[Holdings, ...] = ()
DRY = spot(available=0)


def decided(
    at: JobStatus,
    supplies: tuple[Supply, ...] = (spot(), ON_DEMAND),
    holdings: tuple[Holdings, ...] = NOTHING,
    outlook: MarketOutlook | None = None,
) -> FleetDecision:
    return decide(at, FLEET, supplies, holdings, outlook or MarketOutlook())


def test_spot_vms_are_rented_while_there_is_time() -> None:
    decision = decided(status(hours=10, work=5))
    assert decision.mode == "pace"
    assert decision.count("spot") > 0
    assert decision.count("on-demand") == 0


def test_more_time_means_fewer_vms_since_each_further_one_adds_less() -> None:
    sizes = [decided(status(hours=hours, work=5)).count("spot") for hours in (6, 12, 30)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_without_spot_vms_it_waits_while_there_is_time_for_more_than_the_work() -> None:
    seen = MarketOutlook(quotes=((SpotQuote("spot", 1.0, 4),),) * 50, sampled_at_s=0.0)
    decision = decided(status(hours=20, work=5), (DRY, ON_DEMAND), outlook=seen)
    assert decision.mode == "wait"
    assert decision.wanted == ()


@given(price=st.floats(0.1, 2.0), losses=st.floats(0.0, 10.0))
def test_after_a_loss_an_unchanged_price_is_not_dearer_than_those_remembered(
    price: float, losses: float
) -> None:
    calm, outlook = spot(usd=price), MarketOutlook()
    for number in range(50):
        outlook = observe(outlook, number * SAMPLE_S, FLEET, (calm,), ())
    lost = replace(calm, losses_per_hour=losses)
    decision = decided(status(hours=20, work=5), (lost, ON_DEMAND), outlook=outlook)
    assert decision.mode == "pace"
    assert decision.count("spot") > 0


def test_a_sample_counts_with_the_interruptions_that_its_supply_has_today() -> None:
    samples = (
        (SpotQuote("a", 1.0, 2), SpotQuote("b", 1.1, 4)),
        (SpotQuote("gone", 1.0, 1),),
    )
    rough = replace(spot("a"), losses_per_hour=6.0)  # wastes 120 s each: a fifth
    seen = markets(samples, FLEET, (rough, spot("b"), ON_DEMAND))
    assert seen[0] == pytest.approx([1.1, 1.1, 1.1, 1.1])
    assert seen[1] == pytest.approx([1.2, *[math.inf] * 3])


@pytest.mark.parametrize(("hours", "mode"), [(6.0, "wait"), (5.4, "pace")])
def test_on_demand_vms_that_are_just_worth_their_price_wait_while_there_is_slack(
    hours: float, mode: str
) -> None:
    one = replace(FLEET, examples_per_s=FLEET.examples_per_s[:2])
    at = replace(status(hours=hours, work=0), examples_left=5 * HOUR_S)
    seen = MarketOutlook(quotes=((),) * 50, sampled_at_s=0.0)
    market = (DRY, ON_DEMAND)
    new = decide(at, one, market, NOTHING, seen)
    assert (new.mode, new.count("on-demand")) == (mode, int(mode == "pace"))
    held = (Holdings(name="on-demand", ready=1),)
    assert decide(at, one, market, held, seen).count("on-demand") == 1


def test_with_little_slack_a_vm_is_worth_more_since_spot_vms_may_be_lacking_later() -> None:
    fleet = replace(FLEET, examples_per_s=(0.0, 1.0, 1.9, 2.8, 3.4))
    seen = MarketOutlook(quotes=((SpotQuote("spot", 1.0, 4),),) * 8)
    for hours, vms in ((21.2, 4), (40, 3)):  # three would be in time
        at = status(hours=hours, work=17)
        assert decide(at, fleet, (spot(), ON_DEMAND), (), seen).wanted == (("spot", vms),)


def test_near_the_deadline_what_spot_vms_lack_comes_on_demand() -> None:
    at = status(hours=5.07, work=5)
    holdings = (Holdings(name="spot", ready=1),)
    decision = decided(at, (DRY, ON_DEMAND), holdings)
    assert decision.mode == "edge"
    assert dict(decision.wanted) == {"on-demand": 3, "spot": 1}


def test_a_job_without_a_vm_that_trains_risks_no_boot_in_vain_near_the_deadline() -> None:
    decision = decided(status(hours=5.07, work=5))
    assert dict(decision.wanted) == {"on-demand": 4}


def test_with_no_slack_left_all_vms_are_on_demand() -> None:
    decision = decided(status(hours=5 + 120 / HOUR_S, work=5))
    assert decision.mode == "fallback"
    assert dict(decision.wanted) == {"on-demand": 4}


def test_spot_vms_are_kept_until_the_on_demand_vms_for_them_are_ready() -> None:
    at = status(hours=5 + 145 / HOUR_S, work=5)
    holdings = (Holdings(name="spot", ready=4),)
    assert dict(decided(at, holdings=holdings).wanted) == {"on-demand": 4, "spot": 4}
    late = status(hours=5 + 125 / HOUR_S, work=5)  # the work that a loss takes is too much
    assert dict(decided(late, holdings=holdings).wanted) == {"on-demand": 4}
    booted = (*holdings, Holdings(name="on-demand", ready=4))
    assert dict(decided(at, holdings=booted).wanted) == {"on-demand": 4}


def test_a_budget_that_only_just_pays_the_fallback_risks_no_spot_vm() -> None:
    at = status(hours=20, work=5)
    min_usd = feasible(at, FLEET, (ON_DEMAND,)).min_usd
    assert min_usd is not None
    tight = replace(at, usd_left=min_usd + 0.01)
    assert decided(tight).count("spot") == 0
    assert decided(replace(at, usd_left=min_usd + 1)).count("spot") > 0


def test_a_vm_elsewhere_must_be_clearly_cheaper_than_one_that_is_held() -> None:
    at, holdings = status(hours=6, work=5), (Holdings(name="a", ready=4),)
    near = decided(at, (spot("a"), spot("b", 0.9), ON_DEMAND), holdings)
    assert near.count("b") == 0
    far = decided(at, (spot("a"), spot("b", 0.5), ON_DEMAND), holdings)
    assert (far.count("a"), far.count("b")) == (4, 4)  # until those of b are ready


def test_a_zone_that_often_preempts_its_vms_counts_as_more_expensive() -> None:
    rough = replace(spot("rough", 0.9), losses_per_hour=10.0)
    decision = decided(status(hours=6, work=5), (rough, spot("calm"), ON_DEMAND))
    assert decision.count("rough") == 0


def test_the_hourly_cap_bounds_the_fleet() -> None:
    decision = decided(status(hours=6, work=1, cap=2.5))
    assert decision.count("spot") <= 2


def test_without_a_deadline_all_spot_vms_are_taken_and_none_on_demand() -> None:
    decision = decided(status(hours=None, work=5))
    assert (decision.mode, dict(decision.wanted)) == ("spot", {"spot": 4})


def test_without_on_demand_vms_nothing_is_guaranteed_and_all_spot_is_taken() -> None:
    decision = decided(status(hours=9, work=5), (spot(available=3),))
    assert (decision.mode, decision.count("spot")) == ("spot", 3)
    assert decision.reason.endswith("; all spot VMs that make it faster")


@pytest.mark.parametrize(("hours", "supplies"), [(None, (spot(), ON_DEMAND)), (9, (spot(),))])
def test_no_vms_are_rented_that_would_not_make_it_faster(
    hours: float | None, supplies: tuple[Supply, ...]
) -> None:
    crowded = replace(FLEET, examples_per_s=(0.0, 1.0, 2.0, 2.03, 1.9))
    assert crowded.useful_vms == 2
    at = status(hours=hours, work=5)
    decision = decide(at, crowded, supplies, NOTHING, MarketOutlook())
    assert (decision.mode, dict(decision.wanted)) == ("spot", {"spot": 2})


def test_a_rate_below_the_minimum_rents_on_demand_until_spot_suffices() -> None:
    at = replace(status(hours=None, work=5), min_examples_per_s=2.0, recent_examples_per_s=1.0)
    lacking = decided(at, (spot(available=1), ON_DEMAND))
    assert dict(lacking.wanted) == {"on-demand": 2, "spot": 1}
    holdings = (Holdings(name="spot", ready=3), Holdings(name="on-demand", ready=2))
    fine = replace(at, recent_examples_per_s=2.7)
    assert decided(fine, (spot(available=0), ON_DEMAND), holdings).count("on-demand") == 0


def test_a_finished_job_wants_nothing() -> None:
    assert decided(status(hours=5, work=0)).wanted == ()


@pytest.mark.parametrize("hours", [-1.0, 0.0, 1.0])
def test_a_job_that_is_late_goes_on_with_all_it_has(hours: float) -> None:
    decision = decided(status(hours=hours, work=5))
    assert (decision.mode, decision.count("on-demand")) == ("late", 4)


def test_on_demand_vms_of_a_time_optimal_job_stay_until_there_is_slack_again() -> None:
    holdings = (Holdings(name="on-demand", ready=4),)

    def time_optimal(hours: float) -> dict[str, int]:
        at = status(hours=hours, work=5)
        supplies = (spot(), ON_DEMAND)
        return dict(
            decide(at, FLEET, supplies, holdings, MarketOutlook(), cost_optimal=False).wanted
        )

    assert time_optimal(5 + 180 / HOUR_S) == {"on-demand": 4}, "at the edge"
    assert time_optimal(5 + 400 / HOUR_S) == {"on-demand": 4}, "just off it"
    assert time_optimal(9)["spot"] == 4


def test_a_time_optimal_job_waits_for_spot_vms_only_while_they_may_cost_less() -> None:
    def time_optimal(*supplies: Supply, holdings: tuple[Holdings, ...] = ()) -> dict[str, int]:
        at = status(hours=20, work=5, usd=500.0)
        return dict(
            decide(at, FLEET, supplies, holdings, MarketOutlook(), cost_optimal=False).wanted
        )

    expensive = spot(usd=3.0, available=0)
    assert time_optimal(DRY, ON_DEMAND) == {}
    assert time_optimal(expensive, ON_DEMAND) == {"on-demand": 4}
    assert time_optimal(ON_DEMAND) == {"on-demand": 4}
    training = (Holdings(name="spot", ready=3),)
    assert time_optimal(expensive, ON_DEMAND, holdings=training) == {
        "spot": 3,
        "on-demand": 1,
    }
    rented = (Holdings(name="on-demand", ready=4),)
    assert time_optimal(spot(), ON_DEMAND, holdings=rented)["spot"] == 4


def test_near_the_deadline_losses_in_a_row_are_survived_as_far_as_there_are_vms() -> None:
    at = status(hours=5 + 294 / HOUR_S, work=5)
    four = decided(at, (DRY, ON_DEMAND), (Holdings(name="spot", ready=4),))
    assert (four.mode, four.count("on-demand")) == ("edge", 2)
    one = decided(at, (DRY, ON_DEMAND), (Holdings(name="spot", ready=1),))
    assert dict(one.wanted) == {"on-demand": 3, "spot": 1}
    rented = (Holdings(name="spot", ready=1), Holdings(name="on-demand", ready=3))
    assert dict(decided(at, (DRY, ON_DEMAND), rented).wanted) == dict(one.wanted)


# --- Before anything is rented ---


def test_a_refusal_names_the_smallest_budget_and_the_earliest_deadline() -> None:
    at = status(hours=5.2, work=5, usd=40.0)
    answer = feasible(at, FLEET, (spot(), ON_DEMAND))
    assert not answer.possible
    assert answer.min_usd == pytest.approx(4 * 3 * (5 + 120 / HOUR_S))
    assert re.fullmatch(
        "deadline and budget cannot both be guaranteed: .*left to spend: .*; "
        rf".*raise the budget to \${answer.min_usd:,.2f}.*",
        answer.reason,
    )
    assert answer.earliest_finish_s is None or answer.earliest_finish_s > 5.2 * HOUR_S
    assert feasible(replace(at, usd_left=answer.min_usd), FLEET, (ON_DEMAND,)).possible


def test_a_deadline_that_is_too_near_names_the_earliest_one() -> None:
    at = status(hours=4, work=5)
    answer = feasible(at, FLEET, (ON_DEMAND,))
    assert (answer.possible, answer.min_usd) == (False, None)
    assert answer.earliest_finish_s == pytest.approx(5 * HOUR_S + 120)
    later = replace(at, deadline_s=answer.earliest_finish_s)
    assert feasible(later, FLEET, (ON_DEMAND,)).possible


@given(work=st.floats(0.01, 50), ending_s=st.floats(0.0, 100.0))
def test_the_deadline_that_is_named_can_be_kept_a_minute_later(
    work: float, ending_s: float
) -> None:
    at = replace(status(hours=0.001, work=work), ending_s=ending_s)
    answer = feasible(at, FLEET, (ON_DEMAND,))
    named = re.search(r"move the deadline to ([0-9.,]+) h from now", answer.reason)
    assert named is not None
    moved = replace(at, deadline_s=float(named[1]) * HOUR_S)
    assert feasible(moved, FLEET, (ON_DEMAND,)).possible
    assert feasible(replace(moved, now_s=59.9), FLEET, (ON_DEMAND,)).possible


def test_without_on_demand_vms_no_deadline_can_be_guaranteed() -> None:
    answer = feasible(status(hours=50, work=5), FLEET, (spot(),))
    assert not answer.possible
    assert re.fullmatch(
        "no on-demand VMs .*: nothing can be guaranteed, .*; allow on-demand",
        answer.reason,
    )


@given(
    hours=st.floats(0.1, 100),
    work=st.floats(0.01, 50),
    usd=st.floats(0.0, 1000),
    max_vms=st.integers(1, 4),
)
def test_limits_are_feasible_exactly_if_some_size_is_in_time_and_budget(
    hours: float, work: float, usd: float, max_vms: int
) -> None:
    at = status(hours=hours, work=work, usd=usd)
    supply = replace(ON_DEMAND, available=max_vms)
    by_hand = []
    for size in range(1, max_vms + 1):
        train_s = at.examples_left / FLEET.rates[size]
        seconds = train_s + FLEET.boot_s + FLEET.morph_s
        cost = size * 3.0 * seconds / HOUR_S
        if seconds <= hours * HOUR_S * (1 + 1e-9) and cost <= usd * (1 + 1e-9):
            by_hand.append(size)
    answer = feasible(at, FLEET, (supply,))
    assert answer.possible == bool(by_hand)


@given(
    minimum=st.floats(0.01, 10),
    hours=st.floats(0.1, 100) | st.none(),
    usd=st.floats(0.0, 1000),
    max_vms=st.integers(1, 4),
)
def test_a_minimum_rate_is_feasible_exactly_if_some_size_trains_so_fast(
    minimum: float, hours: float | None, usd: float, max_vms: int
) -> None:
    at = replace(status(hours=hours, work=5, usd=usd), min_examples_per_s=minimum)
    supply = replace(ON_DEMAND, available=max_vms)
    fast = [n for n in range(1, max_vms + 1) if FLEET.rates[n] >= minimum * (1 - 1e-9)]
    answer = feasible(at, FLEET, (supply,))
    if hours is None:  # it is kept for as long as the budget lasts
        assert answer.possible == bool(fast)
        return
    by_hand = []
    for size in fast:
        seconds = at.examples_left / FLEET.rates[size] + FLEET.boot_s + FLEET.morph_s
        in_time = seconds <= hours * HOUR_S * (1 + 1e-9)
        if in_time and size * 3.0 * seconds / HOUR_S <= usd * (1 + 1e-9):
            by_hand.append(size)
    assert answer.possible == bool(by_hand)


def test_a_minimum_rate_that_on_demand_vms_cannot_train_is_reported() -> None:
    at = replace(status(hours=100, work=5), min_examples_per_s=1e9)
    answer = feasible(at, FLEET, (ON_DEMAND,))
    assert not answer.possible
    assert "1e+09 cannot be guaranteed: 4 on-demand VMs train 3.4 examples/s" in (answer.reason)


def test_a_minimum_rate_costs_what_vms_so_fast_cost() -> None:
    slow = status(hours=None, work=5, usd=10.0)
    at = replace(slow, min_examples_per_s=3.0)
    answer = feasible(at, FLEET, (ON_DEMAND,))
    assert answer.possible
    assert answer.min_usd == pytest.approx(4 * 3.0 * (5 + 120 / HOUR_S))
    assert "4 on-demand VMs alone would keep up 3 examples/s to the end" in answer.reason
    assert "left to spend: $10.00, where the job ends" in answer.reason


@given(
    hours=st.floats(-1, 50) | st.none(),
    work=st.floats(0, 50),
    usd=st.floats(0, 1000) | st.none(),
    cap=st.floats(0, 20) | st.none(),
    free=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    ready=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    booting=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    prices=st.lists(st.floats(0, 3), min_size=2, max_size=2),
    allowed=st.booleans(),
)
def test_a_decision_asks_for_nothing_that_is_not_there_nor_above_the_cap(
    hours: float | None,
    work: float,
    usd: float | None,
    cap: float | None,
    free: list[int],
    ready: list[int],
    booting: list[int],
    prices: list[float],
    allowed: bool,
) -> None:
    names = ("a", "b", "on-demand")
    supplies = [
        replace(spot(name), usd_per_hour=price, available=count)
        for name, price, count in zip(names[:2], prices, free[:2], strict=True)
    ]
    if allowed:
        supplies.append(replace(ON_DEMAND, available=free[2]))
    holdings = tuple(
        Holdings(name=supply.name, ready=ready[n], booting=booting[n])
        for n, supply in enumerate(supplies)
    )
    at = status(hours=hours, work=work, usd=usd, cap=cap)
    decision = decided(at, tuple(supplies), holdings)
    bill = 0.0
    for n, supply in enumerate(supplies):
        count = decision.count(supply.name)
        assert 0 <= count <= ready[n] + booting[n] + (supply.available or 0)
        bill += count * supply.usd_per_hour
    assert cap is None or bill <= cap * (1 + 1e-6)
    assert decision.reason


# --- Fleets, outlooks, fallbacks ---


def test_vms_that_add_nothing_are_no_size() -> None:
    fleet = Fleet(examples_per_s=(0.0, 0.0, 2.0, 1.5, 3.0))
    assert fleet.rates == (0.0, 0.0, 2.0, 2.0, 3.0)
    assert fleet.sizes == (0, 2, 4)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_no_size_lies_above_the_hull_of_the_sizes(rates: list[float]) -> None:
    if not any(rates):
        return
    fleet = Fleet(examples_per_s=(0.0, *rates))
    for few, many in zip(fleet.sizes, fleet.sizes[1:], strict=False):
        slope = (fleet.rates[many] - fleet.rates[few]) / (many - few)
        for size in range(few, many):
            above = fleet.rates[few] + slope * (size - few)
            assert fleet.rates[size] <= above + 1e-6


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_an_invalid_rate_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="examples_per_s"):
        Fleet(examples_per_s=(0.0, rate))


@pytest.mark.parametrize("usd", [-1.0, float("nan"), float("inf")])
def test_an_invalid_price_is_refused(usd: float) -> None:
    with pytest.raises(ConfigError, match="usd_per_hour"):
        spot(usd=usd)


def test_a_status_with_a_nan_is_refused() -> None:
    with pytest.raises(ConfigError, match="examples_left"):
        replace(status(hours=5, work=1), examples_left=float("nan"))


def test_samples_are_spaced_and_the_oldest_are_forgotten() -> None:
    outlook = MarketOutlook()
    for number in range(2 * MAX_SAMPLES):
        outlook = observe(outlook, number * SAMPLE_S, FLEET, (spot(),), ())
        outlook = observe(outlook, number * SAMPLE_S + 1, FLEET, (spot(),), ())
    assert len(outlook.quotes) == MAX_SAMPLES
    assert outlook.quotes[0] == (("spot", 1.0, 4),)


def test_a_sample_of_many_supplies_keeps_those_that_are_cheapest_to_train_on() -> None:
    many = [spot(f"{n}", 4.0 - 0.1 * n, available=9) for n in range(2 * MAX_QUOTES)]
    seen = sample(FLEET, many, ())
    assert len(seen) == MAX_QUOTES
    assert seen[0] == (f"{len(many) - 1}", many[-1].usd_per_hour, FLEET.max_vms)


def test_the_fallback_counts_boots_of_vms_that_are_not_rented_yet() -> None:
    at = status(hours=9, work=5)
    fresh = on_demand_fallback(at, FLEET, (ON_DEMAND,), ())
    paid = on_demand_fallback(at, FLEET, (ON_DEMAND,), (Holdings(name="on-demand", ready=4),))
    boot_usd = 4 * 3.0 * (FLEET.boot_s + FLEET.morph_s) / HOUR_S
    work = at.examples_left
    assert fresh.usd(4, work) - paid.usd(4, work) == pytest.approx(boot_usd)
