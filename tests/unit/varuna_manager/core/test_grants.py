"""A job of a pool: it holds what it is granted, and waits where it is granted nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.builders import checkpoint_saved
from tests.unit.varuna_manager.story import FOUR, OFFER, Story

from spottrain.pricing.billing.budget import reserve_s
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.settings import PoolGrant
from spottrain.varuna_manager.core.model.state import JobPhase, held_by_kind
from spottrain.wire import messages

GRANT = PoolGrant(
    pool="lab",
    serial=1,
    vms=(("local/t", 4), ("local/u", 0)),
    until_s=1e6,
    max_microusd=10**9,
)


def grant(story: Story, vms: int, **changes: Any) -> PoolGrant:
    known = story.state.job.grant or GRANT
    serial = changes.pop("serial", known.serial + 1)
    given = replace(GRANT, serial=serial, vms=(("local/t", vms),), **changes)
    story.tell(e.GrantReceived, grant=given)
    return given


def test_fewer_vms_are_handed_over_and_returned_while_the_others_train_on() -> None:
    story = Story(grant=GRANT).training(*FOUR)
    grant(story, 2)
    going = [k for k, vm in story.vms.items() if vm.leaves_at_s is not None]
    assert len(going) == 2
    assert story.emitted(c.TerminateVms) == [], "others need what their memory holds"
    assert held_by_kind(story.state)["local/t"] == 4, "they are billed until then"
    staying = tuple(vm_id for vm_id in FOUR if vm_id not in going)
    while story.plan_asked is None:
        assert story.state.timer_at_s is not None
        story.wait(story.state.timer_at_s - story.now_s)
    story.plan(*staying)
    while not story.sent(messages.StopGeneration):
        assert story.state.timer_at_s is not None
        story.wait(story.state.timer_at_s - story.now_s)
    assert not story.sent(messages.StopGeneration)["a"].checkpoint, "a planned morph"


def test_a_job_that_is_granted_nothing_checkpoints_waits_and_goes_on_later() -> None:
    story = Story(grant=GRANT).training(*FOUR)
    grant(story, 0)
    assert story.sent(messages.StopGeneration)["a"].checkpoint
    story.report("a", checkpoint_saved(3))
    story.stopped(3)
    story.tell(e.VmsReturned, vm_ids=FOUR)
    assert story.state.phase is JobPhase.ENDED
    assert story.state.outcome is not None
    assert story.state.outcome.kind == "queued"
    story.now_s += 5000.0
    grant(story, 3)
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert story.launch().count == 3


def test_a_grant_that_is_not_renewed_ends_early_enough_for_its_vms_to_be_gone() -> None:
    story = Story(grant=GRANT).training(*FOUR)
    until_s = story.now_s + 5000.0
    grant(story, 4, until_s=until_s)
    reserved_s = reserve_s(story.state.job.spec.lease_s)
    story.wait(5000.0 - reserved_s - 1.0)
    assert story.state.phase is JobPhase.ACTIVE
    story.wait(1.0)
    assert story.state.outcome is not None
    assert story.state.outcome.kind == "queued"


def test_an_older_grant_that_comes_late_changes_nothing() -> None:
    story = Story(grant=GRANT).training(*FOUR)
    grant(story, 3, serial=7)
    grant(story, 4, serial=6)
    assert story.state.job.grant is not None
    assert story.state.job.grant.total == 3


def test_a_vm_that_leaves_is_replaced_once_it_is_gone() -> None:
    story = Story(grant=GRANT).training(*FOUR)
    story.report("a", messages.InterruptionNoticed(lead_s=100.0))
    assert story.emitted(c.LaunchVms) == [], "it may be billed still"
    story.tell(e.VmLost, vm_id="a", reason="taken")
    assert [one.count for one in story.emitted(c.LaunchVms)] == [1]


def test_only_granted_kinds_are_rented() -> None:
    other = replace(OFFER, instance_type="u", usd_per_hour=0.01)
    story = Story(grant=replace(GRANT, vms=(("local/t", 1),)))
    story.start(other, OFFER)
    (wanted,) = story.emitted(c.LaunchVms)
    assert (wanted.offer.instance_type, wanted.count) == ("t", 1)


def test_money_that_the_pool_allows_ends_as_waiting_and_its_own_as_the_budget() -> None:
    for max_usd, kind in ((None, "queued"), (3.0, "budget")):
        story = Story(max_usd=max_usd, grant=GRANT).training(*FOUR)
        grant(story, 4, max_microusd=4_000_000)
        while story.state.phase is JobPhase.ACTIVE:
            assert story.state.timer_at_s is not None
            story.wait(story.state.timer_at_s - story.now_s)
        assert story.state.outcome is not None
        assert story.state.outcome.kind == kind
