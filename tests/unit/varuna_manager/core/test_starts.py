"""VMs that come up and never train cost no more than a few starts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tests.unit.varuna_manager.story import OFFER, Story

from spottrain.cloud.port.provider import VmState
from spottrain.varuna_manager.core.fleet import BOOT_BOUND_S
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.wire import messages

HOURS_S = 6 * 3600.0


def rent(story: Story, until_s: float) -> tuple[str, ...]:
    """Let time pass until VMs are rented; none if they are not, or the job ends."""
    while not story.emitted(c.LaunchVms):
        due_s = story.state.timer_at_s
        if due_s is None or due_s > until_s or story.state.phase is not JobPhase.ACTIVE:
            return ()
        story.wait(due_s - story.now_s)
    asked = story.launch()
    number = len(story.vms) + story.state.launches.next_intent
    ids = tuple(f"vm-{number}-{index}" for index in range(asked.count))
    vms = tuple(story.listed(vm_id, asked.intent, offer=asked.offer) for vm_id in ids)
    story.tell(e.VmsLaunched, intent=asked.intent, vms=vms)
    return ids


def registers(story: Story, vm_id: str) -> None:
    story.tell(e.AgentRegistered, vm_id=vm_id, num_slots=1, private_address="10.0.0.1")


def never_calls(story: Story, vm_id: str) -> None:
    story.wait(BOOT_BOUND_S)


def cannot_be_set_up(story: Story, vm_id: str) -> None:
    failed = {"command": "start_agent", "vm_ids": (vm_id,), "reason": "no route"}
    story.tell(e.CommandFailed, **failed)
    story.wait(BOOT_BOUND_S)


def falls_silent(story: Story, vm_id: str) -> None:
    registers(story, vm_id)
    story.tell(e.VmSilent, vm_id=vm_id)
    story.tell(e.ProviderAnswered, vm_id=vm_id, state=VmState.RUNNING)


def ends(story: Story, vm_id: str) -> None:
    registers(story, vm_id)
    story.tell(e.VmLost, vm_id=vm_id, reason="it has ended")


def is_unfit(story: Story, vm_id: str) -> None:
    registers(story, vm_id)
    story.report(vm_id, messages.VmUnfit(reason="no driver"))


def is_sick(story: Story, vm_id: str) -> None:
    registers(story, vm_id)
    story.report(vm_id, messages.GpuSick(reason="XID 79"))


def has_other_software(story: Story, vm_id: str) -> None:
    story.tell(e.AgentRefused, vm_id=vm_id, reason="other software")


CAUSES = [
    never_calls,
    cannot_be_set_up,
    falls_silent,
    ends,
    is_unfit,
    is_sick,
    has_other_software,
]


def gone(story: Story, *ids: str) -> None:
    """The cloud has taken back what was returned."""
    story.tell(e.VmsReturned, vm_ids=ids)


@pytest.mark.parametrize("fails", CAUSES)
def test_a_job_whose_vms_come_up_and_never_train_ends_after_a_few(
    fails: Callable[[Story, str], None],
) -> None:
    story, rented = Story(max_vms=1), 0
    story.start(OFFER)
    until_s = story.now_s + HOURS_S
    while (ids := rent(story, until_s)) and rented < 50:
        rented += len(ids)
        story.now_s += 1.0
        fails(story, *ids)
        gone(story, *ids)
    assert 3 <= rented <= 6
    outcome = story.state.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == ("failed", 6)
    words = {"cannot_be_set_up": "no route", "ends": "ended", "is_unfit": "no driver"}
    words["has_other_software"] = "other software"
    assert words.get(fails.__name__, "") in outcome.reason


@pytest.mark.parametrize("fails", CAUSES)
@pytest.mark.parametrize("learned", ["returned", "listed"])
def test_a_job_ends_with_the_last_line_of_its_last_vm_s_log(
    fails: Callable[[Story, str], None], learned: str
) -> None:
    story = Story(max_vms=1)
    story.start(OFFER)
    until_s, words = story.now_s + HOURS_S, {}
    while ids := rent(story, until_s):
        words = {ids[0]: f"OSError: {ids[0]} has no route"}
        story.now_s += 1.0
        fails(story, *ids)
        if learned == "returned":
            story.tell(e.VmsReturned, vm_ids=ids, last_words=words)
        else:
            story.now_s += 1.0
            story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(), last_words=words)
    outcome = story.state.outcome
    assert outcome is not None
    if fails is not ends:  # then it is gone before
        assert outcome.reason.endswith(f"log: {words.popitem()[1]}")


def test_a_vm_s_last_words_are_told_once() -> None:
    story = Story(max_vms=1)
    story.start(OFFER)
    (vm_id,) = rent(story, story.now_s)
    story.now_s += 1.0
    never_calls(story, vm_id)
    for _ in range(2):
        story.tell(e.VmsReturned, vm_ids=(vm_id,), last_words={vm_id: "no route"})
    failing = story.state.launches.failing
    assert failing is not None
    assert failing.reason.count("no route") == 1


def test_vms_that_are_lost_whenever_they_begin_to_train_are_not_rented_for_ever() -> None:
    story, rented = Story(max_vms=2).training("a", "b", steps=0), 2
    until_s = story.now_s + HOURS_S
    while story.state.phase is JobPhase.ACTIVE and rented < 50:
        story.now_s += 1.0
        for vm_id in tuple(story.vms):
            story.tell(e.VmLost, vm_id=vm_id, reason="the kernel ended it")
        ids: tuple[str, ...] = ()
        while len(ids) < 2 and (new := rent(story, until_s)):
            ids += new
            for vm_id in new:
                story.ready(vm_id)
        if not ids:
            break
        rented += len(ids)
        story.wait(2.0)
        story.plan(*ids)
        story.open()
        story.begin(0)
    assert rented <= 12
    assert story.state.outcome is not None
    assert "the kernel ended it" in story.state.outcome.reason


def test_after_one_failure_one_vm_is_tried_at_a_time_after_pauses_that_grow() -> None:
    story = Story(max_vms=4)
    story.start(OFFER)
    began_s = story.now_s
    times, counts = [], []
    while ids := rent(story, began_s + HOURS_S):
        times.append(story.now_s)
        counts.append(len(ids))
        story.now_s += 1.0
        for vm_id in ids:
            falls_silent(story, vm_id)
            gone(story, vm_id)
    assert counts == [4, 1, 1, 1, 1, 1]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 60.0


def test_a_vm_that_is_ready_lets_the_others_be_rented_together() -> None:
    story = Story(max_vms=4)
    story.start(OFFER)
    for vm_id in rent(story, story.now_s):
        story.now_s += 1.0
        falls_silent(story, vm_id)
    (probe,) = rent(story, story.now_s + HOURS_S)
    assert story.emitted(c.LaunchVms) == []
    story.ready(probe)
    (asked,) = story.emitted(c.LaunchVms)
    assert asked.count == 3


def failing_beside(story: Story) -> int:
    """Let every VM that is rented fail while others train; return how many there were."""
    rented, until_s = 0, story.now_s + 10 * HOURS_S
    while story.state.phase is JobPhase.ACTIVE and rented < 50:
        ids = rent(story, until_s)
        if not ids:
            break
        rented += len(ids)
        story.now_s += 1.0
        for vm_id in ids:
            falls_silent(story, vm_id)
            gone(story, vm_id)
    return rented


def test_beside_vms_that_train_more_are_tried_before_the_job_saves_and_ends() -> None:
    story = Story(max_vms=3).training("a", "b")
    assert 6 < failing_beside(story) <= 12
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 6
    assert story.state.ending_checkpoint
    assert story.current_generation is not None


def test_a_vm_that_trains_for_the_first_time_ends_the_row_of_failures() -> None:
    story = Story(max_vms=3).training("a", "b", steps=0)
    story.now_s += 1.0
    for vm_id in rent(story, story.now_s):
        falls_silent(story, vm_id)
    (probe,) = rent(story, story.now_s + HOURS_S)
    falls_silent(story, probe)
    story.now_s += 1.0
    story.commit(1)
    assert story.emitted(c.LaunchVms), story.state.activity


def test_a_vm_that_has_trained_is_replaced_at_once_however_often_it_is_taken() -> None:
    story = Story(max_vms=2).training("a", "b")
    story.tell(e.VmLost, vm_id="a", reason="taken")
    assert story.emitted(c.LaunchVms)


# --- The job's folder ------------------------------------------------------------------------


def test_nothing_is_rented_while_the_folder_cannot_be_used() -> None:
    story = Story(max_vms=2).training("a", "b")
    story.tell(e.FolderSeen, trouble="it is read-only")
    assert "read-only" in story.state.last_message
    story.tell(e.VmLost, vm_id="a", reason="taken")
    assert story.emitted(c.LaunchVms) == []
    story.tell(e.FolderSeen, trouble="")
    assert story.emitted(c.LaunchVms)


def test_a_folder_that_stays_unusable_ends_the_job_with_its_state_saved() -> None:
    story = Story(max_vms=2).training("a", "b")
    story.tell(e.FolderSeen, trouble="it is read-only")
    assert story.state.phase is JobPhase.ACTIVE
    story.wait(59.0)
    assert story.state.phase is JobPhase.ACTIVE
    story.wait(1.0)
    assert story.state.outcome is not None
    assert "read-only" in story.state.outcome.reason
    assert story.state.ending_checkpoint
    assert story.sent(messages.StopGeneration)["a"].checkpoint


def test_a_folder_that_is_gone_ends_the_job_at_once_with_its_state_saved() -> None:
    story = Story(max_vms=2).training("a", "b")
    story.tell(e.FolderSeen, trouble="it was deleted", is_gone=True)
    assert story.state.outcome is not None
    assert "deleted" in story.state.outcome.reason
    assert story.sent(messages.StopGeneration)["a"].checkpoint
