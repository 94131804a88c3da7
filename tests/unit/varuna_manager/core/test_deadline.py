"""Deadline and throughput as the core keeps them; what is decided is tested in pricing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.varuna_manager.story import OFFER, ON_DEMAND, Story

from spottrain import wire
from spottrain.pricing.deadline.model import Fleet
from spottrain.pricing.ranking.order import offer_key
from spottrain.varuna_manager.core.allocation import best_offer
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.varuna_manager.reporting.deadline import deadline_line, deadline_view

FOUR = ("a", "b", "c", "d")
SPOT_KEY, DEMAND_KEY = offer_key(OFFER), offer_key(ON_DEMAND)
TERMS = FleetTerms(
    cloud=OFFER.cloud,
    instance_type=OFFER.instance_type,
    fleet=Fleet(
        examples_per_s=(0.0, 0.0, 2.0, 3.0, 4.0), boot_s=10.0, morph_s=2.0, lost_s=2.0
    ),
    losses_per_hour={SPOT_KEY: 0.1},
)
TRAIN_S = 97 * 8 / 4.0
"""What is left after three steps takes four VMs."""


def story(left_s: float | None, **settings: Any) -> Story:
    """Four spot VMs that train, and a deadline so far away from then on."""
    deadline_s = None if left_s is None else 1003.0 + left_s
    settings = {"allow_on_demand": True, **settings}
    told = Story(deadline_s=deadline_s, **settings)
    told.training(*FOUR)
    return told


def weigh(told: Story, terms: FleetTerms = TERMS) -> None:
    told.tell(e.FleetRated, terms=terms)


def test_a_job_that_promises_nothing_decides_nothing() -> None:
    told = story(None)
    weigh(told)
    assert told.state.deadline.decision is None
    assert deadline_view(told.state, told.now_s) is None


def test_before_it_is_known_what_vms_do_none_are_rented_on_demand_but_to_begin() -> (
    None
):
    told = Story(deadline_s=9000.0, allow_on_demand=True, min_vms=2)
    told.start(replace(OFFER, available=0), ON_DEMAND)
    wish = told.intend()
    assert (wish.offer.spot, wish.count) == (False, 2)


def test_with_time_to_spare_there_are_spot_vms_only() -> None:
    told = story(10 * TRAIN_S)
    weigh(told)
    decision = told.state.deadline.decision
    assert decision is not None
    assert dict(decision.wanted) == {SPOT_KEY: 4}
    assert told.wished(c.IntendLaunch) == []


def test_a_slow_vm_may_be_replaced_though_no_more_are_wanted() -> None:
    told = story(10 * TRAIN_S)
    weigh(told)
    transition = Transition(told.state, told.now_s)
    assert best_offer(transition, 1) == (None, 0)
    assert best_offer(transition, 1, told.state.vms["a"]) == (OFFER, 1)


def test_what_spot_does_not_give_is_not_rented_on_demand_with_time_to_spare() -> None:
    told = story(10 * TRAIN_S)
    weigh(told)
    told.tell(e.OffersSeen, offers=(replace(OFFER, available=0), ON_DEMAND))
    told.tell(e.VmLost, vm_id="a", reason="taken")
    assert told.wished(c.IntendLaunch) == []


def test_in_the_place_of_a_spot_vm_as_dear_as_one_on_demand_the_latter_is_rented() -> (
    None
):
    told = story(10 * TRAIN_S)
    weigh(told)
    dear = replace(OFFER, usd_per_hour=ON_DEMAND.usd_per_hour)
    told.tell(e.OffersSeen, offers=(dear, ON_DEMAND))
    told.tell(e.VmLost, vm_id="a", reason="taken")
    wish = told.intend()
    assert (wish.offer.spot, wish.count) == (False, 1)


def test_a_thrifty_job_rents_no_spot_vm_as_dear_as_one_on_demand() -> None:
    told = story(10 * TRAIN_S, objective="examples_per_dollar")
    weigh(told)
    dear = replace(OFFER, usd_per_hour=ON_DEMAND.usd_per_hour)
    told.tell(e.OffersSeen, offers=(dear, ON_DEMAND))
    told.tell(e.VmLost, vm_id="a", reason="taken")
    assert not any(wish.offer.spot for wish in told.wished(c.IntendLaunch))


def test_when_time_grows_short_on_demand_vms_take_the_places_of_spot_vms() -> None:
    told = story(TRAIN_S + 35.0)
    weigh(told)
    wish = told.intend()
    assert not wish.offer.spot
    assert told.state.deadline.decision is not None
    assert told.state.deadline.decision.mode in ("edge", "net")
    held_back = [vm for vm in told.state.vms.values() if vm.leaves_at_s is not None]
    assert held_back == [], "spot VMs train on until on-demand VMs do"
    new = tuple(f"d{n}" for n in range(wish.count))
    intent = next(iter(told.state.intents))
    vms = tuple(told.vm(vm_id, intent, offer=ON_DEMAND) for vm_id in new)
    told.tell(e.VmsLaunched, intent=intent, vms=vms)
    for vm_id in new:
        told.ready(vm_id)
    leaving = [k for k, vm in told.state.vms.items() if vm.leaves_at_s is not None]
    assert len(leaving) == len(new)
    assert set(leaving) <= set(FOUR)


def test_a_deadline_that_nobody_can_keep_ends_the_job_before_it_trains() -> None:
    told = Story(deadline_s=1000.0 + 100.0, allow_on_demand=True)
    told.start()
    weigh(told)
    assert told.state.outcome is not None
    assert (told.state.outcome.kind, told.state.outcome.exit_code) == ("deadline", 4)
    assert "move the deadline to" in told.state.outcome.reason
    assert told.state.phase is JobPhase.ENDED


def test_a_promise_once_made_is_not_taken_back_while_vms_boot() -> None:
    told = Story(deadline_s=1000.0 + 229.0, allow_on_demand=True)
    told.start()
    weigh(told)
    assert told.state.phase is JobPhase.ACTIVE
    told.wait(9.0)
    assert told.state.phase is JobPhase.ACTIVE
    weigh(told, replace(TERMS, fleet=replace(TERMS.fleet, boot_s=20.0)))
    assert told.state.phase is JobPhase.ACTIVE
    half = tuple(rate / 2 for rate in TERMS.fleet.examples_per_s)
    weigh(told, replace(TERMS, fleet=replace(TERMS.fleet, examples_per_s=half)))
    assert told.state.outcome is not None
    assert told.state.outcome.kind == "deadline"


def test_without_on_demand_vms_nothing_is_promised_and_the_job_does_what_it_can() -> (
    None
):
    told = story(TRAIN_S / 2, allow_on_demand=False)
    weigh(told)
    assert told.state.phase is JobPhase.ACTIVE
    decision = told.state.deadline.decision
    assert decision is not None
    assert dict(decision.wanted) == {SPOT_KEY: 4}


def test_too_slow_a_job_gets_on_demand_vms_until_it_is_fast_enough() -> None:
    told = story(None, min_examples_per_s=3.5)
    weigh(told)
    told.tell(e.OffersSeen, offers=(replace(OFFER, available=0), ON_DEMAND))
    for vm_id in ("c", "d"):
        told.tell(e.VmLost, vm_id=vm_id, reason="taken")
    told.broken("a", "b")
    told.plan("a", "b")
    told.open()
    told.begin(3)
    assert told.wished(c.IntendLaunch) == [], "nothing was measured yet"
    for step in range(4, 10):
        told.now_s += 4.0
        for slot in told.generation.plan.slots:
            told.report(
                slot.vm_id,
                wire.MinibatchCommitted(
                    generation=told.generation.number,
                    slot=0,
                    step=step,
                    sections=(0,) if slot.vm_id == "a" else (1,),
                    loss=1.0,
                    grad_norm=1.0,
                    step_s=4.0,
                    peak_bytes=1,
                ),
            )
    told.wait(120.0)
    (wish,) = told.wished(c.IntendLaunch)
    assert not wish.offer.spot


def test_a_nearer_deadline_is_decided_over_at_once() -> None:
    told = story(10 * TRAIN_S)
    weigh(told)
    nearer = told.now_s + TRAIN_S + 35.0
    told.tell(
        e.LimitsChanged,
        by="a person",
        limits=(Limit(name="deadline_s", value=nearer),),
    )
    assert told.state.deadline.decision is not None
    assert told.state.deadline.decision.mode in ("edge", "net")


def test_what_is_promised_is_shown_with_an_interval() -> None:
    told = story(3 * TRAIN_S, max_usd=50.0)
    weigh(told)
    shown = deadline_view(told.state, told.now_s)
    assert shown is not None
    assert shown["mode"] == "spot"
    finish, usd = shown["finish_s"], shown["usd"]
    assert told.now_s < finish["low"] <= finish["expected"] <= finish["high"]
    assert finish["high"] <= told.state.job.deadline_s
    assert 0 < usd["low"] <= usd["expected"] <= usd["high"] <= 50.0
    line = deadline_line(shown, told.state.job.deadline_s)
    assert "of slack" in line
    assert " in total" in line


def test_a_job_in_haste_is_expected_as_soon_as_its_fleet_can_do_it() -> None:
    told = story(100 * TRAIN_S)
    weigh(told)
    shown = deadline_view(told.state, told.now_s)
    assert shown is not None
    finish = shown["finish_s"]
    assert finish["expected"] - told.now_s == pytest.approx(TRAIN_S, rel=0.05)
    assert finish["low"] < told.now_s + TRAIN_S < finish["high"]


def test_a_deadline_that_cannot_be_kept_any_more_is_told_so() -> None:
    told = story(TRAIN_S / 2)
    weigh(told)
    late = deadline_view(told.state, told.now_s)
    assert late is not None
    assert "cannot be met" in deadline_line(late, told.state.job.deadline_s)


def test_where_the_hourly_cap_bears_no_vm_no_end_is_in_sight() -> None:
    told = story(3 * TRAIN_S)
    weigh(told)
    told.tell(
        e.LimitsChanged,
        by="a person",
        limits=(Limit(name="max_usd_per_hour", value=1e-6),),
    )
    shown = deadline_view(told.state, told.now_s)
    assert shown is not None
    assert shown["finish_s"]["expected"] is shown["finish_s"]["high"] is None
    line = deadline_line(shown, told.state.job.deadline_s)
    assert line.endswith("not guaranteed · finish unknown")


def test_without_on_demand_vms_nobody_knows_the_latest_finish() -> None:
    told = story(3 * TRAIN_S, allow_on_demand=False)
    weigh(told)
    shown = deadline_view(told.state, told.now_s)
    assert shown is not None
    assert shown["finish_s"]["expected"] is not None
    assert shown["finish_s"]["high"] is None
    assert "latest finish unknown" in deadline_line(shown, told.state.job.deadline_s)


def test_spot_vms_that_would_be_late_at_their_best_are_told_so() -> None:
    told = story(TRAIN_S / 2, allow_on_demand=False)
    weigh(told)
    shown = deadline_view(told.state, told.now_s)
    assert shown is not None
    assert "cannot be met" in deadline_line(shown, told.state.job.deadline_s)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"deadline_s": 1000.0 + 20.0}, "4 VMs that nobody takes away need"),
        ({"deadline_s": 9000.0, "max_usd": 0.6}, "raise the budget to"),
        ({"min_examples_per_s": 1e9}, "4 VMs train 4.44 examples/s at the most"),
    ],
)
def test_spot_vms_that_cannot_do_it_at_their_best_are_not_rented(
    limits: dict[str, Any], reason: str
) -> None:
    told = Story(**limits)
    told.start()
    weigh(told)
    assert told.state.outcome is not None
    assert told.state.outcome.exit_code == 4
    assert reason in told.state.outcome.reason
    assert told.state.phase is JobPhase.ENDED


def test_spot_vms_that_could_do_it_are_rented() -> None:
    told = Story(deadline_s=1000.0 + 1.1 * TRAIN_S, max_usd=5.0)
    told.start()
    weigh(told)
    assert told.state.phase is JobPhase.ACTIVE


def test_a_least_rate_out_of_reach_is_taken_and_told_to_be_so() -> None:
    told = story(3 * TRAIN_S)
    weigh(told)
    told.tell(
        e.LimitsChanged,
        by="a person",
        limits=(Limit(name="min_examples_per_s", value=1e300),),
    )
    shown = deadline_view(told.state, told.now_s)
    assert shown is not None
    line = deadline_line(shown, told.state.job.deadline_s)
    assert "slo.min_examples_per_s: 1e+300 is out of reach: 4 VMs train" in line


@pytest.mark.parametrize("left_s", [TRAIN_S + 35.0, 3 * TRAIN_S])
def test_a_budget_with_nothing_to_spare_for_a_lease_is_not_promised(
    left_s: float,
) -> None:
    told = Story(deadline_s=1000.0 + left_s, allow_on_demand=True, max_usd=1.0)
    told.start()
    weigh(told)
    assert told.state.outcome is not None
    assert told.state.outcome.exit_code == 4
    assert "raise the budget to $" in told.state.outcome.reason
