"""What the core writes into the ledger."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import section_facts
from tests.unit.varuna_manager.story import FOUR, OFFER, ON_DEMAND, SPEC, Story

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import Offer, Vm, VmState
from spottrain.manifest import CheckpointEntry
from spottrain.pricing.billing.money import ceil_us
from spottrain.units import HOUR_S
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    budget,
    rate_usd_per_hour,
    spent_usd,
)
from spottrain.varuna_manager.reporting.documents import status


def test_boot_time_is_billed_apart() -> None:
    story = Story()
    story.start()
    (intent,) = story.intents
    story.tell(e.VmsLaunched, intent=intent, vms=(story.listed("a", intent),))
    story.now_s += 36.0
    story.ready("a")
    story.now_s += 36.0
    spending = story.ledger.spending(story.now_s)
    assert (spending.boot.usd, spending.spot.usd) == (0.01, 0.02)


def test_the_cloud_decides_when_the_billing_of_a_vm_ended() -> None:
    story = Story().training(*FOUR)
    launched_s = story.vm("a").launched_at_s
    story.now_s = launched_s + 3600.0
    story.tell(e.VmLost, vm_id="a", reason="killed")
    assert story.ledger.unconfirmed == {"a"}
    gone = story.listed(
        "a",
        launched_at_s=launched_s,
        state=VmState.TERMINATED,
        ended_at_s=launched_s + 1800.0,
    )
    rest = tuple(story.listed(vm_id, launched_at_s=launched_s) for vm_id in "bcd")
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(gone, *rest))
    assert spent_usd(story.state, story.now_s) == 3.5
    assert story.ledger.unconfirmed == frozenset()


def test_what_is_returned_is_billed_until_the_cloud_ended_it() -> None:
    story = Story().training(*FOUR)
    story.now_s = 1000.0 + 1800.0
    story.tell(e.StopRequested, by="x", now=True)
    story.now_s += 60.0
    vms = tuple(
        story.listed(
            vm_id,
            launched_at_s=1000.0,
            state=VmState.TERMINATED,
            ended_at_s=1000.0 + 1800,
        )
        for vm_id in FOUR
    )
    story.tell(e.VmsReturned, vm_ids=FOUR, vms=vms)
    assert spent_usd(story.state, story.now_s) == 2.0


def test_a_vm_that_started_and_ended_between_two_polls_is_billed() -> None:
    story = Story()
    story.start()
    (intent,) = story.intents
    dead = story.listed("a", intent, state=VmState.TERMINATED, ended_at_s=story.now_s + 36.0)
    story.now_s += 100.0
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(dead,))
    assert spent_usd(story.state, story.now_s) == 0.01
    assert story.vms == {}


def test_an_orphan_is_billed_from_its_launch_but_not_from_before_the_job() -> None:
    story = Story()
    story.start()
    story.now_s += 3600.0
    orphan = story.listed("x", "intent-9", launched_at_s=0.0)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(orphan,))
    assert spent_usd(story.state, story.now_s) == 1.0


def test_a_vm_that_was_believed_gone_is_never_billed_twice() -> None:
    story = Story().training(*FOUR)
    story.now_s = 1000.0 + 1800.0
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert story.vms == {}
    back = story.listed("a", launched_at_s=1000.0)
    story.now_s += 1800.0
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(back,))
    assert spent_usd(story.state, story.now_s) == 3 * 0.5 + 1.0


@pytest.mark.parametrize("price", [math.nan, -1.0, math.inf])
def test_a_vm_without_a_price_is_billed_at_the_highest_known(price: float) -> None:
    story = Story()
    story.start()
    (intent,) = story.intents
    vm = story.listed("a", intent, offer=replace(OFFER, usd_per_hour=price))
    story.tell(e.VmsLaunched, intent=intent, vms=(vm,))
    story.now_s += 3600.0
    assert spent_usd(story.state, story.now_s) == ON_DEMAND.usd_per_hour


@pytest.mark.parametrize("price", [math.nan, -1.0, math.inf])
def test_an_offer_without_a_price_is_not_rented(price: float) -> None:
    story = Story()
    story.start(replace(OFFER, usd_per_hour=price))
    assert story.intents == {}


def test_a_price_change_is_billed_where_the_cloud_follows_the_market() -> None:
    offer = replace(OFFER, cloud="aws")
    story = Story()
    story.start(offer)
    (intent,) = story.intents
    story.tell(e.VmsLaunched, intent=intent, vms=(story.listed("a", intent, offer=offer),))
    story.now_s += 3600.0
    story.tell(e.OffersSeen, offers=(replace(offer, usd_per_hour=2.0),))
    story.now_s += 3600.0
    assert spent_usd(story.state, story.now_s) == 3.0
    assert story.ledger.rate.usd_per_hour == 2.0


def test_a_price_change_while_a_launch_was_open_is_billed() -> None:
    offer = replace(OFFER, cloud="aws")
    story = Story()
    story.start(offer)
    (intent,) = story.intents
    story.now_s += 1.0
    story.tell(e.OffersSeen, offers=(replace(offer, usd_per_hour=3.0),))
    story.now_s += 1.0
    story.tell(e.VmsLaunched, intent=intent, vms=(story.listed("a", intent, offer=offer),))
    story.now_s += 3600.0
    assert spent_usd(story.state, story.now_s) == 3.0


def test_a_price_that_falls_back_while_time_stands_still_is_seen_again() -> None:
    offer = replace(OFFER, cloud="aws")
    story = Story()
    story.start(offer)
    (intent,) = story.intents
    story.tell(e.VmsLaunched, intent=intent, vms=(story.listed("a", intent, offer=offer),))
    for usd_per_hour in (3.0, 1.0):
        offers = (replace(offer, usd_per_hour=usd_per_hour),)
        story.tell(e.OffersSeen, offers=offers)
    story.now_s += 1.0
    story.tell(e.OffersSeen, offers=offers)
    assert story.ledger.rate.usd_per_hour == 1.0


def test_storage_that_is_freed_while_time_stands_still_costs_no_more() -> None:
    section = section_facts(param_bytes=10**9, optimizer_bytes=0)
    facts = replace(Story().state.job.facts, sections=(section,))
    story = Story(storage_usd_per_gb_month=730.0, facts=facts)
    story.start()
    refs = tuple(CheckpointEntry(name=f"step-{n}", step=n) for n in (2, 1))
    story.tell(e.CheckpointsListed, checkpoints=refs)
    story.tell(e.CheckpointsListed, checkpoints=refs[:1])
    assert story.ledger.storage_rate.usd_per_hour == 2.0
    story.now_s += 3.6
    story.tell(e.TimerFired)
    assert story.ledger.storage_rate.usd_per_hour == 1.0
    assert story.ledger.spending(story.now_s + 3600.0).storage.usd == 1.002


def test_checkpoints_that_are_kept_cost_by_their_size() -> None:
    section = section_facts(param_bytes=10**9, optimizer_bytes=2 * 10**9)
    story = Story()
    facts = replace(story.state.job.facts, sections=(section,))
    story = Story(storage_usd_per_gb_month=730.0, facts=facts)
    story.start()
    assert story.ledger.spending(story.now_s).storage.usd == 0.0
    refs = tuple(CheckpointEntry(name=f"step-{n}", step=n) for n in (2, 1))
    story.tell(e.CheckpointsListed, checkpoints=refs)
    story.now_s += 3600.0
    assert story.ledger.spending(story.now_s).storage.usd == 6.0


def apart(here: Offer, there: Offer, **settings: Any) -> Story:
    """Two replicas of a model of 1 GB in a place each, which train.

    Two rings of two, each with 1 GB there and back, make 4 GB a mini-batch.
    """
    section = section_facts(param_bytes=10**9, optimizer_bytes=0, activation_bytes=10**6)
    facts = replace(Story().state.job.facts, sections=(section, section))
    story = Story(facts=facts, span="any", **settings)
    story.start(here)
    (intent,) = story.intents
    vms = [story.listed(v, intent, offer=there if v in "cd" else here) for v in ("abcd")]
    story.tell(e.VmsLaunched, intent=intent, vms=tuple(vms))
    for vm_id in FOUR:
        story.ready(vm_id)
    story.prepare()
    story.plan(*FOUR)
    story.open()
    story.begin(0)
    return story


@pytest.mark.parametrize(
    ("here", "there", "usd_per_gb"),
    [
        ({"cloud": "aws"}, {"cloud": "aws", "zone": "y"}, 0.02),
        ({"cloud": "gcp"}, {"cloud": "gcp", "zone": "y"}, 0.01),
        ({"cloud": "azure"}, {"cloud": "azure", "zone": "y"}, 0.0),
        ({"cloud": "gcp"}, {"cloud": "gcp", "zone": "y", "region": "s"}, 0.02),
        ({"cloud": "azure"}, {"cloud": "azure", "zone": "y", "region": "s"}, 0.02),
        ({"cloud": "aws"}, {"cloud": "gcp"}, 0.09),
        ({"cloud": "aws"}, {"cloud": "azure", "zone": "y", "region": "s"}, 0.09),
    ],
)
def test_egress_costs_depend_on_both_ends(
    here: dict[str, Any], there: dict[str, Any], usd_per_gb: float
) -> None:
    story = apart(replace(OFFER, **here), replace(OFFER, **there))
    story.commit(1)
    story.commit(2)
    story.tell(e.TimerFired)
    spent = story.ledger.spending(story.now_s).egress.usd
    assert spent == pytest.approx(8 * usd_per_gb)


def test_the_price_between_zones_that_is_given_counts_within_a_region_alone() -> None:
    other = replace(OFFER, zone="y")
    for there, usd in ((other, 0.2), (replace(other, cloud="aws"), 0.36)):
        story = apart(OFFER, there, zone_usd_per_gb=0.05)
        assert story.generation.egress.usd == usd


def test_the_egress_of_the_plan_is_reserved_and_ends_the_job_in_time() -> None:
    aws = replace(OFFER, cloud="aws")
    spec = replace(SPEC, lease_s=60.0, steps=1000)
    story = apart(aws, replace(aws, zone="y"), max_usd=60.0, spec=spec)
    money = budget(story.state)
    # 0.08 USD a mini-batch of half a second are 576 USD/h; four VMs cost 4.
    assert money.side_rate.usd_per_hour == 576.0
    assert money.reserve.usd == pytest.approx(580.0 * money.reserve_s / 3600)
    left_s = money.lasts_s
    assert left_s is not None
    assert story.state.timer_at_s is not None
    assert story.state.timer_at_s <= story.now_s + left_s
    assert money.cap is not None
    while story.state.outcome is None:
        story.commit(story.step + 1)
        story.wait(1.0)  # mini-batches are told to take a second
    assert story.state.outcome.kind == "budget"
    spent = story.ledger.spent(story.now_s)
    pace = story.ledger.rate.usd_per_hour + 0.08 * 3600
    rest_usd = pace * money.reserve_s / 3600
    assert spent.usd + rest_usd == pytest.approx(60.0, abs=0.2)


CORPUS = {"aws": 1e12, "gcp": 5e11}


@pytest.mark.parametrize(("cloud", "usd"), [("aws", 45.0), ("azure", 135.0), ("local", 0.0)])
def test_what_a_vm_fetches_from_other_clouds_is_billed_when_it_boots(
    cloud: str, usd: float
) -> None:
    story = Story(data_bytes=CORPUS, max_usd=1000.0)
    story.start(replace(OFFER, cloud=cloud))
    (intent,) = story.intents
    assert budget(story.state).pending.usd == usd * story.intents[intent].count
    offer = replace(OFFER, cloud=cloud)
    vms = tuple(story.listed(vm_id, intent, offer=offer) for vm_id in "ab")
    story.tell(e.VmsLaunched, intent=intent, vms=vms)
    assert story.ledger.spending(story.now_s).egress.usd == 0.0
    assert budget(story.state).pending.usd == 2 * usd
    story.ready("a")
    story.ready("b")
    assert budget(story.state).pending.usd == 0.0
    story.tell(e.VmLost, vm_id="b", reason="killed")
    assert story.ledger.spending(story.now_s).egress.usd == 2 * usd


def test_no_more_vms_are_rented_than_the_budget_can_fetch_data_for() -> None:
    story = Story(data_bytes=CORPUS, max_usd=300.0)
    story.start(replace(OFFER, cloud="azure"))
    assert story.launch().count == 2


def manager_vm(story: Story, **what: Any) -> Vm:
    offer = replace(OFFER, spot=False, usd_per_hour=0.5, gpus=0, gpu_memory_bytes=0)
    return story.listed("m", tags.MANAGER, launched_at_s=1000.0, offer=offer, **what)


def test_the_managers_vm_is_billed_but_never_trains_or_is_returned() -> None:
    story = Story().training("a", "b")
    own = manager_vm(story)
    rest = tuple(story.listed(vm_id) for vm_id in "ab")
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(own, *rest))
    assert set(story.vms) == {"a", "b"}
    assert not story.emitted(c.TerminateVms)
    line = story.ledger.open["m"]
    assert not line.trains
    assert line.cost(ceil_us(1000.0 + 3600)).usd == 0.5
    assert line.spending(ceil_us(1000.0 + 3600)).boot.usd == 0.0
    assert budget(story.state).rate.usd_per_hour == 2.5
    story.now_s += 5.0
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=rest)
    assert "m" not in story.ledger.open  # another machine manages now
    story.now_s += 5.0
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(own, *rest))
    assert "m" in story.ledger.open


def test_the_managers_vm_ends_with_the_job_as_its_cloud_reports_later() -> None:
    story = Story().training("a", "b")
    rest = tuple(story.listed(vm_id) for vm_id in "ab")
    own = (manager_vm(story), *rest)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=own)
    story.tell(e.StopRequested, by="x", now=True)
    story.tell(e.VmsReturned, vm_ids=("a", "b"))
    assert story.state.phase is JobPhase.ENDED
    assert not story.ledger.open
    ended_at_s = story.now_s + 60.0
    story.now_s += 100.0
    told = manager_vm(story, state=VmState.TERMINATED, ended_at_s=ended_at_s)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(told,))
    assert story.ledger.closed["m"].ended_us == ceil_us(ended_at_s)
    assert story.state.phase is JobPhase.ENDED


@given(jump_s=st.floats(0.0, 1e6), later_s=st.floats(0.0, 1e6))
def test_a_jump_that_is_not_confirmed_is_shown_and_decides_nothing(
    jump_s: float, later_s: float
) -> None:
    """The core goes on from the journal's time; whoever asks is shown the bill at his own."""
    story = Story(max_usd=40.0).training("a", "b")
    state, decided = story.state, budget(story.state).spent
    shown = status(state, True, state.now_s + jump_s)["usd_spent"]
    higher = decided.usd + jump_s / HOUR_S * rate_usd_per_hour(state)
    assert shown == pytest.approx(higher, abs=2e-6)
    assert budget(state).spent == decided
    # Only what is told to the core moves its bill, and never back.
    story.now_s += min(jump_s, later_s)
    story.tell(e.TimerFired)
    assert decided <= budget(story.state).spent
    assert budget(story.state).spent.usd <= shown + 2e-6
