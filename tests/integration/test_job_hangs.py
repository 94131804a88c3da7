"""A job with workers that hang rather than die, twice on the same VM."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.integration.jobs import STEPS, Answer, Job, weights
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.varuna_manager.core.model.records import Interruption
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.wire import messages

pytestmark = pytest.mark.rotated(parts=[0])


@dataclass(frozen=True)
class Story:
    """What came of the job."""

    job: Job
    asleep: Interruption
    stopped: Interruption
    after: tuple[str, ...]
    """VMs of the plan after the second time."""
    last: Answer


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("hangs")
    with Job(
        folder,
        "hangs",
        entrypoint="tiny_job:sleeping_job",
        resources={"max_vms": 2},
        manager={"hang_s": 2.0},
    ) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        job.until("both VMs train", lambda state: trains_on(state, 2))
        job.let_one_sleep()
        asleep, _ = survived(job, 1)
        os.kill(newest_worker(job, asleep.vm_id), signal.SIGSTOP)
        stopped, after = survived(job, 2)
        job.pace(0.0)
        job.until("the end", lambda state: state.phase is JobPhase.ENDED)
        last = job.run("report", job.name, "-o", "json")
        yield Story(job, asleep, stopped, after, last)


def trains_on(state: State, vms: int) -> bool:
    now = View(state).current_generation
    return now is not None and now.committed and len(now.plan.slots) == vms


def newest_worker(job: Job, vm_id: str) -> int:
    """Return the pid of the worker that trains on a VM."""
    started = job.reports(messages.GenerationStarted)
    return [report.pid for on, report in started if on == vm_id][-1]


def survived(job: Job, hangs: int) -> tuple[Interruption, tuple[str, ...]]:
    """Wait until the job goes on after so many hangs; return the newest, and the VMs."""

    def found(state: State) -> tuple[Interruption, tuple[str, ...]] | None:
        hits = [hit for hit in View(state).interruptions if hit.interruption == "hang"]
        if len(hits) < hangs or hits[-1].cost_s is None or View(state).current_generation is None:
            return None
        return hits[-1], tuple(slot.vm_id for slot in View(state).generation.plan.slots)

    return job.until(f"going on after hang {hangs}", found)


def test_code_that_sleeps_for_ever_is_found_and_broken_off(story: Story) -> None:
    assert "has been at one task for" in story.asleep.reason


def test_a_worker_that_is_stopped_is_found_and_its_vm_replaced(story: Story) -> None:
    assert "has been stopped for" in story.stopped.reason
    assert story.stopped.vm_id == story.asleep.vm_id
    assert story.after
    assert story.stopped.vm_id not in story.after
    assert len(story.job.vms()) == 3


def test_no_mini_batch_is_lost(story: Story, reference: Undisturbed) -> None:
    report = story.last.report
    assert report["state"] == "succeeded", story.last.err
    assert (report["steps_done"], report["minibatches_recomputed"]) == (STEPS, 0)
    assert (report["hangs"], report["worker_deaths"]) == (2, 0)
    assert weights(story.job.checkpoint_root) == reference.weights
