"""A job with workers that hang rather than die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.integration.jobs import STEPS, Answer, Job, weights
from tests.integration.undisturbed import Undisturbed, undisturbed

from spottrain.varuna_manager.core.model.records import Interruption
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.wire import messages
from spottrain.wire.model import Slot

pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class Story:
    """What came of the job."""

    job: Job
    slots: tuple[Slot, ...]
    """Of the plan in which workers hung, in the order of stages."""
    stopped: Interruption
    asleep: Interruption
    last: Answer


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("hangs")
    manager, vms = {"hang_s": 2.0}, {"max_vms": 2, "min_vms": 2}
    with Job(folder, "hangs", resources=vms, manager=manager) as job:
        job.pace(0.02)
        assert job.launch("--detach").code == 0
        state = job.until_trains(3)
        assert state.generation is not None
        slots = state.generation.plan.slots
        (pid,) = {
            report.pid
            for vm_id, report in job.reports(messages.GenerationStarted)
            if (vm_id, report.slot) == (slots[0].vm_id, slots[0].index)
        }
        os.kill(pid, signal.SIGSTOP)
        stopped = survived(job, 1)
        job.until_paced(1000.0)  # whoever has read that sleeps on
        job.pace(0.0)
        asleep = survived(job, 2)
        job.until("the end", lambda state: state.phase is JobPhase.ENDED)
        last = job.run("report", job.name, "-o", "json")
        yield Story(job, slots, stopped, asleep, last)


def survived(job: Job, hangs: int) -> Interruption:
    """Wait until the job goes on after so many hangs; return the newest."""

    def found(state: State) -> Interruption | None:
        hits = [hit for hit in state.interruptions if hit.interruption == "hang"]
        return hits[-1] if len(hits) >= hangs and hits[-1].cost_s is not None else None

    return job.until(f"going on after hang {hangs}", found)


def test_a_worker_that_is_stopped_is_found_and_broken_off(story: Story) -> None:
    assert story.stopped.vm_id == story.slots[0].vm_id
    assert "has been stopped for" in story.stopped.reason


def test_code_that_sleeps_for_ever_is_found_and_broken_off(story: Story) -> None:
    assert story.asleep.vm_id in {slot.vm_id for slot in story.slots}
    assert "has been at one task for" in story.asleep.reason


def test_no_mini_batch_is_lost_and_all_vms_stay(
    story: Story, reference: Undisturbed
) -> None:
    report = story.last.report
    assert report["state"] == "succeeded", story.last.err
    assert (report["steps_done"], report["minibatches_recomputed"]) == (STEPS, 0)
    assert (report["hangs"], report["worker_deaths"]) == (2, 0)
    assert len(story.job.vms()) == 2
    assert weights(story.job.checkpoint_root) == reference.weights
