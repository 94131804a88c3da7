"""VMs that wait in a cloud's queue: not yet VMs, and no refusal either."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.varuna_manager.core.test_grants import GRANT, grant
from tests.unit.varuna_manager.story import OFFER, Story

from spottrain.cloud.port.provider import Vm, VmState
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import queued, rate_usd_per_hour


def waiting(story: Story, *ids: str, why: str = "Resources") -> list[Vm]:
    """What the cloud lists of VMs of the first intent that wait."""
    return [story.listed(one, state=VmState.QUEUED, launched_at_s=0.0, why=why) for one in ids]


def begun(*ids: str, **settings: object) -> Story:
    """A job whose first VMs all wait in the queue."""
    story = Story(**settings)
    story.start(OFFER)
    listing(story, *waiting(story, *ids))
    return story


def listing(story: Story, *vms: Vm) -> None:
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=vms)


def test_what_waits_is_told_counts_as_asked_for_and_costs_nothing() -> None:
    story = begun("a", "b", "c", "d")
    story.tell(e.LaunchRefused, intent="intent-0", reason="it waits", refusal="queued")
    assert queued(story.state) == dict.fromkeys("abcd", "Resources")
    assert not story.vms
    assert rate_usd_per_hour(story.state) == 0.0
    assert story.emitted(c.LaunchVms) == [], "it is asked for already, and nothing cools down"
    assert not story.state.launches.cooldowns
    assert "(4 in the queue: Resources)" in story.state.activity


def test_the_same_launch_is_asked_for_again_after_a_while() -> None:
    story = begun("a")
    refusal = {"reason": "it waits", "refusal": "queued", "retry_after_s": 30.0}
    story.tell(e.LaunchRefused, intent="intent-0", **refusal)
    story.wait(29.0)
    assert story.emitted(c.LaunchVms) == []
    story.wait(1.0)
    assert story.launch().intent == "intent-0"


def test_one_that_starts_is_a_vm_from_then_on() -> None:
    story = begun("a", "b", "c", "d")
    story.now_s += 5000.0
    listing(story, story.listed("a"), *waiting(story, "b", "c", "d"))
    assert story.vms["a"].launched_at_s == story.now_s
    assert story.vms["a"].phase is VmPhase.BOOTING
    assert queued(story.state).keys() == {"b", "c", "d"}


def test_training_does_not_wait_for_what_waits() -> None:
    story = begun("a", "b", "c", "d")
    listing(story, story.listed("a"), *waiting(story, "b", "c", "d"))
    story.ready("a")
    story.write_first_weights()
    assert story.round is not None, "it is measured at once"


def test_what_no_open_launch_wants_is_taken_out_of_the_queue() -> None:
    story = begun()
    stray = replace(waiting(story, "x")[0], intent="intent-of-nobody")
    listing(story, stray)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("x",))]


def test_a_list_that_is_older_than_a_vm_does_not_end_it() -> None:
    story = begun()
    story.boot("a", "b", "c", "d")
    listing(story, *waiting(story, "a", "b", "c", "d"))
    assert story.emitted(c.TerminateVms) == []


def test_what_a_smaller_grant_does_not_allow_is_taken_out_of_the_queue() -> None:
    story = begun("a", "b", "c", "d", grant=GRANT)
    grant(story, 2)
    (ended,) = story.emitted(c.TerminateVms)
    assert ended.vm_ids == ("a", "b", "c", "d")
    assert story.launch().count == 2


def test_a_job_that_is_stopped_leaves_nothing_in_the_queue() -> None:
    story = begun("a", "b", "c", "d")
    story.tell(e.StopRequested, checkpoint=False, now=True, by="somebody")
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("a", "b", "c", "d"))]
    assert not story.intents


def test_why_a_vm_ended_is_taken_over_when_the_cloud_says_so_later() -> None:
    story = begun()
    story.boot("a", "b", "c", "d")
    rest = [story.listed(one) for one in "bcd"]
    listing(story, story.listed("a", state=VmState.STOPPING, why="it is ending"), *rest)
    assert story.state.history.interruptions[-1].reason == "it is ending"
    gone = story.listed("a", state=VmState.TERMINATED, why="its node failed")
    listing(story, gone, *rest)
    (only,) = story.state.history.interruptions
    assert only.reason == "its node failed"


def test_what_the_cloud_says_of_the_end_of_a_vm_is_the_reason() -> None:
    story = begun()
    story.boot("a", "b", "c", "d")
    gone = story.listed("a", state=VmState.TERMINATED, why="its node failed")
    listing(story, gone, *(story.listed(one) for one in "bcd"))
    assert "a" not in story.vms
    assert story.state.history.interruptions[-1].reason == "its node failed"
