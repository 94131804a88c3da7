"""A job that its user interrupts, leaves alone, stops and resumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.jobs import STEPS, Answer, Job, until, weights
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.manifest import CheckpointEntry
from spottrain.wire import messages

pytestmark = pytest.mark.rotated(parts=[5])

CTRL_C = "\x03"


@dataclass(frozen=True)
class Left:
    """What a command left behind when it ended."""

    code: int
    screen: str
    processes: list[int]
    checkpoints: list[CheckpointEntry]
    step: int


@dataclass(frozen=True)
class Story:
    """What came of the job."""

    job: Job
    steps_after_hangup: int
    names_refused: list[Answer]
    stopped: Left
    interrupted: Left
    interrupted_twice: Left
    damaged: str
    """A checkpoint that was damaged before the last resume."""
    last: Answer


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("interrupts")
    with Job(folder, "interrupts", resources={"max_vms": 1}) as job:
        job.pace(0.05)
        after_hangup = hang_up(job)
        refused = [job.launch()]
        stopped = left(job, job.run("stop", job.name))
        refused.append(job.launch())
        interrupted = interrupt(job)
        interrupted_twice = interrupt(job, twice=True)
        damaged = damage_newest(job)
        job.pace(0.0)
        last = job.resume("-o", "json")
        yield Story(
            job,
            after_hangup,
            refused,
            stopped,
            interrupted,
            interrupted_twice,
            damaged,
            last,
        )


def hang_up(job: Job) -> int:
    """Launch at a terminal and close it; return the steps trained afterwards."""
    terminal = job.at_terminal("launch", str(job.file))
    job.until_trains(2)
    until("the screen tells of it", lambda: "plan" in terminal.read())
    terminal.close()
    until("the watcher ends", lambda: terminal.process.poll() is not None)
    step = View(job.state()).step
    return View(job.until_trains(step + 3)).step - step


def left(job: Job, answer: Answer) -> Left:
    """Take stock after a command."""
    return Left(
        answer.code,
        answer.err,
        job.left_over(),
        job.checkpoints(),
        View(job.state()).step,
    )


def interrupt(job: Job, *, twice: bool = False) -> Left:
    """Resume at a terminal and press Ctrl-C once the job trains."""
    step = View(job.state()).step
    terminal = job.at_terminal("resume", job.name)
    job.until_trains(step + 3)
    if twice:
        job.until_paced(1000.0)  # so that no mini-batch ends any more
    terminal.press(CTRL_C)
    if twice:
        until("the first is heard", lambda: "stopping:" in terminal.read())
        terminal.press(CTRL_C)
    code = terminal.wait()
    return left(job, Answer(code, "", terminal.read()))


def damage_newest(job: Job) -> str:
    """Change one byte of the newest checkpoint; return its name."""
    name = job.checkpoints()[0].name
    path = next((Path(job.checkpoint_root) / name).glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return name


def test_a_closed_terminal_ends_the_watching_alone(story: Story) -> None:
    assert story.steps_after_hangup >= 3


def test_a_name_in_use_is_refused(story: Story) -> None:
    running, stopped = story.names_refused
    assert running.code == stopped.code == 2
    assert running.error.startswith("error: name: ")
    assert "spottrain resume interrupts" in stopped.error


def test_stop_checkpoints_returns_all_and_says_how_to_go_on(story: Story) -> None:
    stopped = story.stopped
    assert stopped.code == 0, stopped.screen
    assert stopped.checkpoints[0].step == stopped.step > 0
    assert stopped.processes == []
    assert "spottrain resume interrupts" in stopped.screen


def test_ctrl_c_checkpoints_returns_all_and_says_how_to_go_on(story: Story) -> None:
    left = story.interrupted
    assert left.code == 130, left.screen
    assert left.checkpoints[0].step == left.step > story.stopped.step
    assert left.processes == []
    assert "spottrain resume interrupts" in left.screen


def test_ctrl_c_twice_returns_all_at_once(story: Story) -> None:
    left = story.interrupted_twice
    assert left.code == 130, left.screen
    assert left.processes == []
    assert "returning all VMs now" in left.screen
    assert left.checkpoints[0].step < left.step


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(story: Story) -> None:
    assert story.damaged in story.last.err
    last = [report for _, report in story.job.reports(messages.GenerationStarted)][-1]
    assert 0 < last.step < int(story.damaged.split("-")[1])


def test_it_ends_as_if_nothing_had_happened(story: Story, reference: Undisturbed) -> None:
    assert story.last.code == 0, story.last.err
    assert story.last.report["steps_done"] == STEPS
    assert weights(story.job.checkpoint_root) == reference.weights
    assert story.job.left_over() == []


def test_down_ends_a_running_job_for_good(tmp_path: Path) -> None:
    with Job(tmp_path, "ended", resources={"max_vms": 1}) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        job.until_trains(1)
        answer = job.run("down", job.name)
        assert answer.code == 0, answer.err
        assert job.left_over() == []
        assert job.run("report", job.name, "-o", "json").report["state"] == "down"
        resumed = job.resume()
        assert resumed.code == 2
        assert "job ended " in resumed.error
