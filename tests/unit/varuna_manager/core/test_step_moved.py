"""A job that continues on another machine: the commands that the core emits."""

from __future__ import annotations

from tests.unit.varuna_manager.story import FOUR, Story

from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.step import step


def take_over(story: Story, epoch: int) -> None:
    moved = e.JobMoved(at_s=story.now_s, epoch=epoch, host="elsewhere")
    story.state, _ = step(story.state, moved, rents=False)


def move(story: Story) -> None:
    """The next machine reads the journal, notes that it is there, and starts."""
    take_over(story, epoch=2)
    story.tell(e.ManagerStarted, software_version="1", pid=2)


def test_vms_that_trust_keys_of_another_machine_are_returned() -> None:
    story = Story()
    story.start()
    story.boot(*FOUR)
    move(story)
    asked = [vm_id for command in story.emitted(c.TerminateVms) for vm_id in command.vm_ids]
    assert sorted(asked) == list(FOUR)
    story.tell(e.VmsReturned, vm_ids=FOUR)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert story.vms == {}
    assert story.tally.preemptions_unnoticed == 0
    assert story.emitted(c.LaunchVms)[0].count == 4


def test_a_launch_begun_on_another_machine_is_not_repeated_but_its_vms_returned() -> None:
    story = Story()
    story.start()
    lost = story.launch()
    move(story)
    assert story.emitted(c.LaunchVms) == []
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(story.listed("x", lost.intent),))
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("x",))]


def test_launches_after_a_move_have_names_that_the_lost_end_of_a_journal_has_not() -> None:
    story = Story()
    story.start()
    lost = story.launch()
    again = Story()
    again.start()
    move(again)
    again.tell(e.VmsListed, asked_at_s=again.now_s, vms=(again.listed("x", lost.intent),))
    command = again.launch()
    assert command.intent == "intent-2-1"
    assert command.token not in (lost.token, "uid-intent-0")
    assert again.vm("x").phase is VmPhase.RETURNING


def test_a_stopped_job_that_has_moved_continues_under_new_names() -> None:
    story = Story()
    story.start()
    story.tell(e.StopRequested, by="a person", now=True)
    take_over(story, epoch=3)
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert story.launch().intent == "intent-3-1"
