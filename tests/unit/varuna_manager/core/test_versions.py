"""A manager of another version: agents are replaced between generations, memory saved."""

from __future__ import annotations

from tests.builders import checkpoint_name, checkpoint_saved
from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import GenerationPhase, VmPhase
from spottrain.varuna_manager.core.rounds import RETRY_PAUSE_S
from spottrain.wire import messages

VMS = ("a", "b", "c", "d")


def upgraded(story: Story, version: str = "2") -> Story:
    """Let a manager of another version take the job over."""
    story.tell(e.ManagerStarted, software_version=version, pid=2)
    return story


def started_anew(story: Story) -> list[str]:
    return [command.vm_id for command in story.emitted(c.StartAgent)]


def test_a_checkpoint_hands_over_to_a_generation_of_new_agents() -> None:
    story = upgraded(Story().training(*VMS))
    assert story.generation.phase is GenerationPhase.STOPPING
    assert {stop.checkpoint for stop in story.sent(messages.StopGeneration).values()} == {True}
    assert started_anew(story) == []
    story.report("a", checkpoint_saved(3))
    story.stopped(3)
    assert started_anew(story) == list(VMS)
    assert story.emitted(c.TerminateVms) == []
    assert {vm.phase for vm in story.vms.values()} == {VmPhase.BOOTING}
    story.reports.clear()  # the new agents count from the beginning
    for vm_id in VMS[:-1]:
        story.ready(vm_id)
    assert story.current_generation is None, "the last agent may come at any moment"
    story.ready("d")
    story.open()
    assert story.generation.checkpoint == checkpoint_name(3)
    assert {vm.agent_version for vm in story.vms.values()} == {"2"}
    story.begin(3)
    assert story.minibatches_recomputed == 0


def test_a_manager_of_the_same_version_leaves_agents_alone() -> None:
    story = upgraded(Story().training(*VMS), "1")
    assert story.generation.phase is GenerationPhase.RUNNING
    assert started_anew(story) == []


def test_what_survivors_of_a_break_hold_is_saved_by_the_old_agents_alone() -> None:
    story = Story().training(*VMS)
    story.tell(e.VmLost, vm_id="d", reason="gone")
    upgraded(story)
    story.broken("a", "b", "c")
    assert started_anew(story) == []
    story.plan("a", "b")
    assert story.generation.save_only
    story.open()
    story.begin(3)
    story.report("a", checkpoint_saved(3))
    for vm_id in ("a", "b"):
        stopped = messages.GenerationStopped(
            generation=story.generation.number, slot=0, step=3, done=False
        )
        story.report(vm_id, stopped)
    assert set(started_anew(story)) == {"a", "b", "c"}
    assert story.step == 3


def test_it_is_saved_once_then_training_goes_on_from_the_checkpoint() -> None:
    story = Story().training(*VMS)
    story.tell(e.VmLost, vm_id="d", reason="gone")
    upgraded(story)
    story.broken("a", "b", "c")
    story.plan("a", "b")
    story.open()
    story.broken("a", "b")
    assert set(started_anew(story)) == {"a", "b", "c"}


def test_without_a_plan_for_what_they_hold_they_are_replaced() -> None:
    story = Story().training(*VMS)
    story.tell(e.VmLost, vm_id="d", reason="gone")
    upgraded(story)
    story.broken("a", "b", "c")
    story.plan()
    assert set(started_anew(story)) == {"a", "b", "c"}
    assert story.state.outcome is None


def test_agents_that_hold_nothing_are_replaced_at_once() -> None:
    story = Story()
    story.start()
    story.boot(*VMS)
    assert story.round is not None
    upgraded(story)
    assert started_anew(story) == list(VMS)
    assert story.round is None
    story.tell(e.CheckpointsListed, checkpoints=())
    story.reports.clear()
    for vm_id in VMS:
        story.ready(vm_id)
    story.wait(RETRY_PAUSE_S)
    story.prepare()
    story.plan(*VMS)
    assert not story.generation.save_only


def test_an_agent_that_is_being_replaced_is_not_silent() -> None:
    story = Story()
    story.start()
    story.boot(*VMS)
    upgraded(story)
    story.tell(e.VmSilent, vm_id="a")
    assert story.emitted(c.AskProvider) == []
    assert story.vm("a").silent_since_s is None
