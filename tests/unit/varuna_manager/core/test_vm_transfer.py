"""VMs from one job of a pool to another: what each job's core says and asks for."""

from __future__ import annotations

from dataclasses import replace

from tests.builders import a_vm
from tests.unit.varuna_manager.core.test_grants import GRANT, grant
from tests.unit.varuna_manager.story import FOUR, OFFER, Story

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import Vm, VmState
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import OrderPhase
from spottrain.varuna_manager.core.model.settings import VmOrder
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.core.vm_transfer import GIVE_UP_S

KEEPS = replace(GRANT, reservation_s=15.0)
ORDER = VmOrder(name="2-theirs", vm_id="theirs", kind="local/t", by="other", until_s=1030.0)
ONE = replace(GRANT, vms=(("local/t", 1),), orders=(ORDER,))


def stopped() -> Story:
    """Return a job whose grant says to keep VMs, right after it was stopped."""
    story = Story(grant=KEEPS).training(*FOUR)
    story.tell(e.StopRequested, by="test", checkpoint=False, now=True)
    return story


def waiting() -> Story:
    """Return a job that may have nothing but one VM of another one."""
    story = Story(grant=ONE)
    story.start()
    return story


def come(story: Story, **changes: object) -> Vm:
    """Have the ordered VM come."""
    vm = a_vm(
        "theirs.1",
        OFFER,
        intent=tags.ordered(ORDER.name),
        private_address="127.0.0.1",
        launched_at_s=story.now_s,
    )
    vm = replace(vm, **changes)  # type: ignore[arg-type]
    story.tell(e.OrderAnswered, order=ORDER.name, vm=vm)
    return vm


def returned(story: Story) -> set[str]:
    return {k for one in story.emitted(c.TerminateVms) for k in one.vm_ids}


def test_vms_are_cleared_kept_for_a_while_and_returned() -> None:
    story = stopped()
    assert {one.vm_id for one in story.emitted(c.ReserveVm)} == {*FOUR}
    assert returned(story) == set()
    story.tell(e.VmReserved, vm_id="a")
    assert story.vm("a").reserved_at_s == story.now_s
    assert story.ledger.open.keys() == {*FOUR}
    story.wait(15.0)
    assert returned(story) == {"a"}
    story.tell(e.VmsReturned, vm_ids=FOUR)
    assert story.state.phase is JobPhase.ENDED


def test_a_vm_that_another_job_takes_is_billed_until_then() -> None:
    story = stopped()
    for vm_id in FOUR:
        story.tell(e.VmReserved, vm_id=vm_id)
    story.now_s += 3.0
    taken = story.listed("a", state=VmState.TERMINATED, ended_at_s=story.now_s - 1.0)
    others = tuple(story.listed(vm_id) for vm_id in FOUR[1:])
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(taken, *others))
    assert "a" not in story.vms
    line = story.ledger.closed["a"]
    assert line.ended_us == round((story.now_s - 1.0) * 1e6)
    assert story.interruptions == ()


def test_what_cannot_be_cleared_is_returned() -> None:
    story = stopped()
    story.tell(e.CommandFailed, command="reserve_vm", vm_ids=("a",), reason="left")
    assert story.state.timer_at_s is not None
    story.wait(story.state.timer_at_s - story.now_s)
    assert "a" in returned(story)


def test_a_manager_that_starts_clears_vms_again_and_waits_on_for_those_that_are() -> None:
    story = stopped()
    story.tell(e.VmReserved, vm_id="a")
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert {one.vm_id for one in story.emitted(c.ReserveVm)} == {*FOUR} - {"a"}
    assert "a" not in returned(story)


def test_kept_vms_go_back_at_once_when_nobody_has_use_for_them() -> None:
    story = stopped()
    story.tell(e.VmReserved, vm_id="a")
    grant(story, 0, reservation_s=0.0)
    assert returned(story) == {"a"}


def test_a_place_of_an_order_is_for_that_vm_alone() -> None:
    story = waiting()
    assert story.emitted(c.LaunchVms) == []
    assert story.orders[ORDER.name].phase is OrderPhase.ASKED
    story.tell(e.OrderAnswered, order=ORDER.name, reason="it has ended")
    assert story.orders[ORDER.name].phase is OrderPhase.FAILED
    assert story.emitted(c.LaunchVms) == [], "the pool has to say so first"
    grant(story, 1)
    assert [one.count for one in story.emitted(c.LaunchVms)] == [1]
    assert story.orders == {}


def test_a_vm_that_comes_gets_this_jobs_agent_and_is_billed_from_then() -> None:
    story = waiting()
    vm = come(story)
    assert [one.vm_id for one in story.emitted(c.StartAgent)] == [vm.vm_id]
    assert story.ledger.open[vm.vm_id].from_us == round(story.now_s * 1e6)
    assert story.orders[ORDER.name].phase is OrderPhase.TAKEN
    story.tell(e.VmLost, vm_id=vm.vm_id, reason="taken")
    assert story.state.timer_at_s is not None
    story.wait(story.state.timer_at_s - story.now_s)  # it never trained
    assert [one.count for one in story.emitted(c.LaunchVms)] == [1]


def test_a_vm_that_is_listed_before_the_answer_comes_once() -> None:
    story = waiting()
    vm = story.listed("theirs.1", tags.ordered(ORDER.name))
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(vm,))
    assert [one.vm_id for one in story.emitted(c.StartAgent)] == [vm.vm_id]
    come(story)
    assert story.emitted(c.StartAgent) == []
    assert [*story.vms] == [vm.vm_id]


def test_a_vm_that_had_ended_before_it_was_found_is_billed() -> None:
    story = waiting()
    ended_s = story.now_s + 10.0
    story.now_s += 20.0
    come(
        story,
        launched_at_s=ended_s - 10.0,
        state=VmState.TERMINATED,
        ended_at_s=ended_s,
    )
    assert story.vms == {}
    assert story.ledger.spent(story.now_s).microusd == 2778


def test_a_job_asks_again_until_it_is_answered_and_does_not_end_before() -> None:
    story = waiting()
    story.tell(e.CommandFailed, command="take_vm", vm_ids=(ORDER.name,), reason="down")
    story.tell(e.StopRequested, by="test", checkpoint=False)
    assert story.state.phase is JobPhase.ENDING
    story.wait(5.0)
    assert [one.order for one in story.emitted(c.AcquireVm)] == [ORDER]
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert [one.order for one in story.emitted(c.AcquireVm)] == [ORDER]
    story.tell(e.StopRequested, by="test", checkpoint=False)
    come(story)
    assert returned(story) == {"theirs.1"}, "nobody has use for it"


def test_a_cloud_that_never_answers_is_given_up_once_nothing_can_come() -> None:
    story = waiting()
    for late_s, phase in ((0.0, OrderPhase.ASKED), (GIVE_UP_S, OrderPhase.FAILED)):
        story.now_s = ORDER.until_s + late_s
        story.tell(e.CommandFailed, command="take_vm", vm_ids=(ORDER.name,), reason="down")
        assert story.orders[ORDER.name].phase is phase


def test_nobody_asks_for_an_order_that_is_late() -> None:
    story = Story(grant=replace(ONE, orders=(replace(ORDER, until_s=999.0),)))
    story.start()
    assert story.orders == {}
