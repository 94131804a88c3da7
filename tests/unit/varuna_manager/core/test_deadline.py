"""Deadline and throughput as the core keeps them; what is decided is tested in pricing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.builders import minibatch_committed
from tests.unit.varuna_manager.story import FOUR, OFFER, ON_DEMAND, Story

from spottrain.pricing.deadline.model import Fleet
from spottrain.pricing.prices.place import offer_key
from spottrain.varuna_manager.core.allocation import next_launch
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.reporting.deadline import deadline_line, deadline_view

SPOT_KEY, DEMAND_KEY = offer_key(OFFER), offer_key(ON_DEMAND)
TERMS = FleetTerms(
    cloud=OFFER.cloud,
    instance_type=OFFER.instance_type,
    fleet=Fleet(examples_per_s=(0.0, 0.0, 2.0, 3.0, 4.0), boot_s=10.0, morph_s=2.0, lost_s=2.0),
    losses_per_hour={SPOT_KEY: 0.1},
)
TRAIN_S = 97 * 8 / 4.0
"""What is left after three steps takes four VMs."""


def story(left_s: float | None, **settings: Any) -> Story:
    """Four spot VMs that train, and a deadline so far away from then on."""
    deadline_s = None if left_s is None else 1003.0 + left_s
    settings = {"allow_on_demand": True, **settings}
    job = Story(deadline_s=deadline_s, **settings)
    job.training(*FOUR)
    return job


def rate(job: Story, terms: FleetTerms = TERMS) -> None:
    job.tell(e.FleetRated, terms=terms)


def test_without_deadline_or_throughput_nothing_is_decided() -> None:
    job = story(None)
    rate(job)
    assert job.decision is None
    assert deadline_view(job.state, job.now_s) is None


def test_before_throughputs_are_known_on_demand_vms_are_rented_only_to_start() -> None:
    job = Story(deadline_s=9000.0, allow_on_demand=True, min_vms=2)
    job.start(replace(OFFER, available=0), ON_DEMAND)
    wish = job.launch()
    assert (wish.offer.spot, wish.count) == (False, 2)


def test_with_time_to_spare_there_are_spot_vms_only() -> None:
    job = story(10 * TRAIN_S)
    rate(job)
    decision = job.decision
    assert decision is not None
    assert dict(decision.wanted) == {SPOT_KEY: 4}
    assert job.emitted(c.LaunchVms) == []


def test_a_slow_vm_may_be_replaced_though_no_more_are_wanted() -> None:
    job = story(10 * TRAIN_S)
    rate(job)
    assert next_launch(job.state).offer is None
    launch = next_launch(job.state, replacing=job.vm("a"))
    assert (launch.offer, launch.count) == (OFFER, 1)


def test_what_spot_does_not_give_is_not_rented_on_demand_with_time_to_spare() -> None:
    job = story(10 * TRAIN_S)
    rate(job)
    job.tell(e.OffersSeen, offers=(replace(OFFER, available=0), ON_DEMAND))
    job.tell(e.VmLost, vm_id="a", reason="taken")
    assert job.emitted(c.LaunchVms) == []


def test_an_on_demand_vm_is_rented_where_spot_is_as_expensive() -> None:
    job = story(10 * TRAIN_S)
    rate(job)
    expensive = replace(OFFER, usd_per_hour=ON_DEMAND.usd_per_hour)
    job.tell(e.OffersSeen, offers=(expensive, ON_DEMAND))
    job.tell(e.VmLost, vm_id="a", reason="taken")
    wish = job.launch()
    assert (wish.offer.spot, wish.count) == (False, 1)


def test_a_cost_optimal_job_rents_no_spot_vm_at_the_on_demand_price() -> None:
    job = story(10 * TRAIN_S, objective="examples_per_dollar")
    rate(job)
    expensive = replace(OFFER, usd_per_hour=ON_DEMAND.usd_per_hour)
    job.tell(e.OffersSeen, offers=(expensive, ON_DEMAND))
    job.tell(e.VmLost, vm_id="a", reason="taken")
    assert not any(wish.offer.spot for wish in job.emitted(c.LaunchVms))


def test_when_time_grows_short_on_demand_vms_take_the_places_of_spot_vms() -> None:
    job = story(TRAIN_S + 35.0)
    rate(job)
    wish = job.launch()
    assert not wish.offer.spot
    assert job.decision is not None
    assert job.decision.mode in ("edge", "fallback")
    held_back = [vm for vm in job.vms.values() if vm.leaves_at_s is not None]
    assert held_back == [], "spot VMs train on until on-demand VMs do"
    new = tuple(f"d{n}" for n in range(wish.count))
    intent = next(iter(job.intents))
    vms = tuple(job.listed(vm_id, intent, offer=ON_DEMAND) for vm_id in new)
    job.tell(e.VmsLaunched, intent=intent, vms=vms)
    for vm_id in new:
        job.ready(vm_id)
    leaving = [k for k, vm in job.vms.items() if vm.leaves_at_s is not None]
    assert len(leaving) == len(new)
    assert set(leaving) <= set(FOUR)


def test_a_deadline_that_cannot_be_met_ends_the_job_before_it_trains() -> None:
    job = Story(deadline_s=1000.0 + 100.0, allow_on_demand=True)
    rate(job)
    job.start()
    assert job.state.outcome is not None
    assert (job.state.outcome.kind, job.state.outcome.exit_code) == ("deadline", 4)
    assert "deadline" in job.state.outcome.reason
    assert job.state.phase is JobPhase.ENDED


def test_a_deadline_once_found_feasible_stays_so_while_vms_boot() -> None:
    job = Story(deadline_s=1000.0 + 229.0, allow_on_demand=True)
    job.start()
    rate(job)
    assert job.state.phase is JobPhase.ACTIVE
    job.wait(9.0)
    assert job.state.phase is JobPhase.ACTIVE
    rate(job, replace(TERMS, fleet=replace(TERMS.fleet, boot_s=20.0)))
    assert job.state.phase is JobPhase.ACTIVE
    half = tuple(rate / 2 for rate in TERMS.fleet.examples_per_s)
    rate(job, replace(TERMS, fleet=replace(TERMS.fleet, examples_per_s=half)))
    assert job.state.outcome is not None
    assert job.state.outcome.kind == "deadline"


def test_without_on_demand_vms_nothing_is_guaranteed_and_the_job_trains_on() -> None:
    job = story(TRAIN_S / 2, allow_on_demand=False)
    rate(job)
    assert job.state.phase is JobPhase.ACTIVE
    decision = job.decision
    assert decision is not None
    assert dict(decision.wanted) == {SPOT_KEY: 4}


def test_a_job_below_its_minimum_throughput_gets_on_demand_vms() -> None:
    job = story(None, min_examples_per_s=3.5)
    rate(job)
    job.tell(e.OffersSeen, offers=(replace(OFFER, available=0), ON_DEMAND))
    for vm_id in ("c", "d"):
        job.tell(e.VmLost, vm_id=vm_id, reason="taken")
    job.broken("a", "b")
    job.plan("a", "b")
    job.open()
    job.begin(3)
    assert job.emitted(c.LaunchVms) == [], "nothing was measured yet"
    for step in range(4, 10):
        job.now_s += 4.0
        for slot in job.generation.plan.slots:
            job.report(
                slot.vm_id,
                minibatch_committed(
                    step,
                    generation=job.generation.number,
                    sections=(0,) if slot.vm_id == "a" else (1,),
                    step_s=4.0,
                ),
            )
    job.wait(120.0)
    (wish,) = job.emitted(c.LaunchVms)
    assert not wish.offer.spot


def test_an_earlier_deadline_is_decided_on_at_once() -> None:
    job = story(10 * TRAIN_S)
    rate(job)
    nearer = job.now_s + TRAIN_S + 35.0
    job.tell(
        e.LimitsChanged,
        by="a person",
        limits=(Limit(name="deadline_s", value=nearer),),
    )
    assert job.decision is not None
    assert job.decision.mode in ("edge", "fallback")


def test_finish_and_cost_are_shown_with_an_interval() -> None:
    job = story(3 * TRAIN_S, max_usd=50.0)
    rate(job)
    shown = deadline_view(job.state, job.now_s)
    assert shown is not None
    assert shown["mode"] == "spot"
    finish, usd = shown["finish_s"], shown["usd"]
    assert job.now_s < finish["low"] <= finish["expected"] <= finish["high"]
    assert finish["high"] <= job.state.job.deadline_s
    assert 0 < usd["low"] <= usd["expected"] <= usd["high"] <= 50.0
    line = deadline_line(shown, job.state.job.deadline_s)
    assert "of slack" in line
    assert " in total" in line


def test_a_time_optimal_job_is_expected_as_soon_as_its_fleet_can_finish() -> None:
    job = story(100 * TRAIN_S)
    rate(job)
    shown = deadline_view(job.state, job.now_s)
    assert shown is not None
    finish = shown["finish_s"]
    assert finish["expected"] - job.now_s == pytest.approx(TRAIN_S, rel=0.05)
    assert finish["low"] < job.now_s + TRAIN_S < finish["high"]


def test_a_deadline_that_can_no_longer_be_met_is_reported() -> None:
    job = story(TRAIN_S / 2)
    rate(job)
    late = deadline_view(job.state, job.now_s)
    assert late is not None
    assert "cannot be met" in deadline_line(late, job.state.job.deadline_s)


def test_where_the_hourly_cap_pays_for_no_vm_no_end_is_in_sight() -> None:
    job = story(3 * TRAIN_S)
    rate(job)
    job.tell(
        e.LimitsChanged,
        by="a person",
        limits=(Limit(name="max_usd_per_hour", value=1e-6),),
    )
    shown = deadline_view(job.state, job.now_s)
    assert shown is not None
    assert shown["finish_s"]["expected"] is shown["finish_s"]["high"] is None
    line = deadline_line(shown, job.state.job.deadline_s)
    assert line.endswith("not guaranteed · finish unknown")


def test_without_on_demand_vms_nobody_knows_the_latest_finish() -> None:
    job = story(3 * TRAIN_S, allow_on_demand=False)
    rate(job)
    shown = deadline_view(job.state, job.now_s)
    assert shown is not None
    assert shown["finish_s"]["expected"] is not None
    assert shown["finish_s"]["high"] is None
    assert "latest finish unknown" in deadline_line(shown, job.state.job.deadline_s)


def test_spot_vms_that_would_be_late_without_interruptions_are_reported() -> None:
    job = story(TRAIN_S / 2, allow_on_demand=False)
    rate(job)
    shown = deadline_view(job.state, job.now_s)
    assert shown is not None
    assert "cannot" in deadline_line(shown, job.state.job.deadline_s)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"deadline_s": 1000.0 + 20.0}, "4 VMs without preemptions need"),
        ({"deadline_s": 9000.0, "max_usd": 0.6}, "raise the budget to"),
        ({"min_examples_per_s": 1e9}, "4 VMs train 4.44 examples/s at most"),
    ],
)
def test_spot_vms_that_miss_the_limits_without_interruptions_are_not_rented(
    limits: dict[str, Any], reason: str
) -> None:
    job = Story(**limits)
    rate(job)
    job.start()
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 4
    assert reason in job.state.outcome.reason
    assert job.state.phase is JobPhase.ENDED


def test_spot_vms_that_could_meet_the_limits_are_rented() -> None:
    job = Story(deadline_s=1000.0 + 1.1 * TRAIN_S, max_usd=5.0)
    job.start()
    rate(job)
    assert job.state.phase is JobPhase.ACTIVE


def test_a_minimum_throughput_out_of_reach_is_accepted_and_reported() -> None:
    job = story(3 * TRAIN_S)
    rate(job)
    job.tell(
        e.LimitsChanged,
        by="a person",
        limits=(Limit(name="min_examples_per_s", value=1e300),),
    )
    shown = deadline_view(job.state, job.now_s)
    assert shown is not None
    line = deadline_line(shown, job.state.job.deadline_s)
    assert "slo.min_examples_per_s: 1e+300 " in line


@pytest.mark.parametrize("left_s", [TRAIN_S + 35.0, 3 * TRAIN_S])
def test_a_budget_with_nothing_to_spare_for_a_lease_is_refused(
    left_s: float,
) -> None:
    job = Story(deadline_s=1000.0 + left_s, allow_on_demand=True, max_usd=1.0)
    job.start()
    rate(job)
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 4
    assert "budget" in job.state.outcome.reason
