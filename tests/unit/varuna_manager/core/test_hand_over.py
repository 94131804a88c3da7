"""A VM goes from one job of a pool to another: what each job's core says and asks for."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.varuna_manager.core.test_grants import FOUR, GRANT, grant
from tests.unit.varuna_manager.story import OFFER, Story

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import Vm, VmState
from spottrain.varuna_manager.core.limits import ARRIVE_S, EARLY_S
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.settings import ArrivingVm, HandOver
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.wire import messages

TO_OTHER = (HandOver(kind="local/t", to="other", number=1),)
INTENT = tags.handed("their-vm")


def come(story: Story, **changes: object) -> Vm:
    """Find a VM that another job has given."""
    vm = Vm(
        vm_id="vm-new",
        job="job",
        intent=INTENT,
        state=VmState.RUNNING,
        offer=OFFER,
        private_address="127.0.0.1",
        launched_at_s=story.now_s,
    )
    vm = replace(vm, **changes)  # type: ignore[arg-type]
    story.tell(e.VmsLaunched, intent=INTENT, vms=(vm,), refusal="")
    return vm


def waiting() -> Story:
    """Return a job that is granted one VM, which another one gives to it."""
    coming = ArrivingVm(intent=INTENT, kind="local/t", at_s=Story().now_s)
    story = Story(grant=replace(GRANT, vms=(("local/t", 1),), arriving=(coming,)))
    story.start()
    return story


def test_what_a_job_returns_at_its_end_goes_to_whom_the_pool_says() -> None:
    story = Story(grant=GRANT).training(*FOUR)
    grant(story, 4, hands=TO_OTHER)
    assert not story.state.handed
    story.tell(e.StopRequested, by="test", checkpoint=False, now=True)
    (given,) = story.emitted(c.HandOverVm)
    assert given.to == "other"
    (entry,) = story.state.handed
    assert (entry.vm_id, entry.to, entry.kind) == (given.vm_id, "other", "local/t")
    returned = {k for one in story.emitted(c.TerminateVms) for k in one.vm_ids}
    assert returned == {*FOUR} - {given.vm_id}


def test_a_hand_over_that_fails_is_a_return() -> None:
    story = Story(grant=GRANT).training(*FOUR)
    grant(story, 4, hands=TO_OTHER)
    story.tell(e.StopRequested, by="test", checkpoint=False, now=True)
    (given,) = story.emitted(c.HandOverVm)
    ids = (given.vm_id,)
    story.tell(e.CommandFailed, command="terminate_vms", vm_ids=ids, reason="down")
    story.wait(10.0)
    assert ids in [one.vm_ids for one in story.emitted(c.TerminateVms)]


def test_a_vm_that_is_lost_before_it_is_given_is_not_told_as_given() -> None:
    story = Story(grant=GRANT).training(*FOUR)
    grant(story, 3, hands=TO_OTHER)
    (entry,) = story.state.handed
    assert story.emitted(c.HandOverVm) == [], "others need what its memory holds"
    story.tell(e.VmLost, vm_id=entry.vm_id, reason="taken")
    assert story.state.handed == ()


def test_a_job_waits_for_what_another_gives_and_rents_no_other() -> None:
    story = waiting()
    assert story.emitted(c.IntendLaunch) == []
    story.wait(10.0)
    began_s = story.now_s - 5.0
    come(story, launched_at_s=began_s)
    assert [one.vm_id for one in story.emitted(c.StartAgent)] == ["vm-new"]
    line = story.state.ledger.open["vm-new"]
    assert line.from_us == round(began_s * 1e6), "from when the other's ended"
    assert story.state.received == {INTENT}
    story.wait(ARRIVE_S)
    assert story.emitted(c.IntendLaunch) == []


def test_what_does_not_come_in_time_is_rented() -> None:
    story = waiting()
    story.wait(ARRIVE_S)
    assert [one.count for one in story.emitted(c.IntendLaunch)] == [1]


def test_a_vm_that_comes_before_the_grant_waits_for_it_and_not_for_long() -> None:
    for is_granted in (True, False):
        story = Story(grant=GRANT, max_vms=5).training(*FOUR)
        come(story)
        story.wait(EARLY_S / 2)
        assert story.state.vms["vm-new"].return_reason == ""
        if is_granted:
            coming = ArrivingVm(intent=INTENT, kind="local/t", at_s=story.now_s)
            grant(story, 5, arriving=(coming,))
        story.wait(EARLY_S)
        gone = {k for one in story.emitted(c.TerminateVms) for k in one.vm_ids}
        assert ("vm-new" in gone) is not is_granted


def test_a_vm_that_ended_before_it_was_found_is_billed_once() -> None:
    story = waiting()
    assert story.state.phase is JobPhase.ACTIVE
    story.wait(30.0)
    began_s = story.now_s - 20.0
    come(
        story,
        launched_at_s=began_s,
        state=VmState.TERMINATED,
        ended_at_s=began_s + 10.0,
    )
    assert story.state.ledger.spent(story.now_s).microusd == 2778
    assert story.state.received == {INTENT}
    assert not story.sent(messages.Initialise)
