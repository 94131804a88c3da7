"""What holds for a job on any cluster with a queue, whatever befell it; a module with a fixture
``story`` imports these tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from tests.integration.jobs import STEPS, Answer, Job, trained_on, trains, until, weights
from tests.integration.undisturbed import undisturbed
from tests.view import View

from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import State


@dataclass
class Story:
    """What came of a job.

    Args:
        job: The job.
        launched: How its launch ended.
        noticed: How many of its VMs were told of their end.
    """

    job: Job
    launched: Answer
    noticed: int
    waiting: set[str] = field(default_factory=set)
    """The VMs that waited in the queue when its status was asked for."""
    status: Answer | None = None
    end: State | None = None
    left: list[str] = field(default_factory=list)
    """What was on the cluster after its end."""

    def goes_to_its_end(self, left: Callable[[], list[str]]) -> None:
        """Let the job train to its end, undisturbed."""
        job = self.job
        job.pace(0.0)
        until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
        self.end, self.left = job.state(), left()


def ready(state: State, count: int) -> set[str]:
    """Return the VMs that are ready if they are so many and some of them train, else none."""
    vms = {k for k, vm in View(state).vms.items() if vm.phase is VmPhase.READY}
    return vms if len(vms) == count and trains(state) and trained_on(state) <= vms else set()


def test_it_trains_to_its_end_bit_for_bit(
    story: Story, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert story.end is not None
    assert story.end.outcome is not None
    assert story.end.outcome.kind == "succeeded", story.end.outcome
    assert story.job.checkpoints()[0].step == STEPS
    assert weights(story.job.checkpoint_root) == undisturbed(tmp_path_factory).weights


def test_those_that_are_told_of_their_end_give_their_state_away_in_time(story: Story) -> None:
    assert story.end is not None
    assert View(story.end).tally.preemptions_noticed == story.noticed


def test_a_lost_node_is_replaced(story: Story) -> None:
    assert story.end is not None
    assert View(story.end).tally.preemptions_unnoticed == 1


def test_a_successor_is_shown_as_queued_until_it_starts(story: Story) -> None:
    assert story.status is not None
    assert story.waiting
    assert story.waiting <= story.status.report["queued"].keys()


def test_nothing_is_left_on_the_cluster(story: Story) -> None:
    assert story.left == []
