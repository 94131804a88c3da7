"""A job whose worker, then manager, then everything is killed with SIGKILL.

In between its manager is replaced by one of a newer version.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import STEPS, Answer, Job, trains, until, weights
from tests.integration.undisturbed import Undisturbed
from tests.view import View

import spottrain
from spottrain import __version__
from spottrain.varuna_manager.core.model.events import ManagerStarted
from spottrain.varuna_manager.core.model.state import State
from spottrain.wire import messages

pytestmark = pytest.mark.rotated(parts=[8])

NEWER = "99.0.0"
PACKAGE = Path(spottrain.__file__).parent


@dataclass(frozen=True)
class Story:
    """What came of the job."""

    job: Job
    launched: list[list[str]]
    """Names of all VMs ever launched: before the manager's death, and after."""
    steps_alone: int
    """Mini-batches trained without a manager."""
    generations: list[int]
    """All that had begun before the upgrade."""
    upgraded: State
    """Training under a manager of a newer version."""
    older: Answer
    """What the older version said when it was to go on."""
    restored_step: int
    """Of the newest checkpoint when everything was killed."""
    last: Answer
    processes_left: list[int]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("death")
    with Job(folder, "death", resources={"max_vms": 2}) as job:
        job.pace(0.1)
        assert job.launch("--detach").code == 0
        job.until_trains(3)
        os.kill(job.reports(messages.GenerationStarted)[0][1].pid, signal.SIGKILL)
        job.until("training without it", lambda s: View(s).tally.worker_deaths and trains(s))
        step = View(job.state()).step
        job.kill_manager()
        launched = [vm_names(job)]
        step = max(step, View(job.state()).step)
        alone = until("a checkpoint", lambda: newest_step(job, after=step + 10))
        assert job.resume("--detach").code == 0
        # Slow enough for everything to die some mini-batches after a checkpoint.
        job.pace(0.3)
        job.until(
            "all that was missed, and more than is saved",
            lambda s: View(s).step > max(alone, newest_step(job) + 2),
        )
        launched.append(vm_names(job))
        started = job.reports(messages.GenerationStarted)
        ours = dict(job.environment)
        upgraded = upgrade(job, folder / "newer")
        job.kill_everything()
        restored = newest_step(job)
        theirs, job.environment = job.environment, ours
        older = job.resume("--detach")
        job.environment = theirs
        job.pace(0.0)
        last = job.resume("-o", "json")
        yield Story(
            job,
            launched,
            alone - step,
            sorted({report.generation for _, report in started}),
            upgraded,
            older,
            restored,
            last,
            job.left_over(),
        )


def upgrade(job: Job, folder: Path) -> State:
    """Replace the manager by one of a newer version; return once that trains."""
    job.kill_manager()
    job.environment["PYTHONPATH"] = str(newer_version(folder))
    assert job.resume("--detach").code == 0

    def found(state: State) -> State | None:
        more = View(state).step > newest_step(job) + 2
        is_new = View(state).next_generation > 3
        return state if is_new and trains(state) and more else None

    return job.until("training with new agents, and more than is saved", found)


def newer_version(folder: Path) -> Path:
    """Return a folder with a copy of our package that is of a later release."""
    shutil.copytree(PACKAGE, folder / "spottrain")
    package = folder / "spottrain/__init__.py"
    text = package.read_text()
    assert f'"{__version__}"' in text
    package.write_text(text.replace(f'"{__version__}"', f'"{NEWER}"'))
    return folder


def vm_names(job: Job) -> list[str]:
    return sorted(vm.vm_id for vm in job.vms())


def newest_step(job: Job, after: int = 0) -> int:
    """Return the step of the newest checkpoint, 0 if it is not above ``after``."""
    step = job.checkpoints()[0].step
    return step if step > after else 0


def test_a_killed_worker_costs_no_vm_and_no_memory(story: Story) -> None:
    started = story.job.reports(messages.GenerationStarted)
    pids = {number: {vm: r.pid for vm, r in started if r.generation == number} for number in (1, 2)}
    assert pids[1].keys() == pids[2].keys()
    assert sum(pids[1][vm] != pids[2][vm] for vm in pids[1]) == 1
    assert {r.sections_loaded for _, r in started if r.generation == 2} == {0}
    assert story.last.report["worker_deaths"] == 1


def test_workers_train_on_without_a_manager(story: Story) -> None:
    assert story.steps_alone > 0


def test_the_next_manager_finds_the_vms_and_starts_none_twice(story: Story) -> None:
    before, after = story.launched
    assert len(before) == 2
    assert before == after


def test_the_generation_goes_on_under_the_next_manager(story: Story) -> None:
    assert story.generations == [1, 2]


def test_a_newer_manager_starts_agents_of_its_version_on_the_same_vms(
    story: Story,
) -> None:
    upgraded = View(story.upgraded)
    versions = {vm.agent_version for vm in upgraded.vms.values()}
    (version,) = versions
    assert version.startswith(f"{NEWER}+")
    assert sorted(upgraded.vms) == story.launched[0]
    handed_over, first = upgraded.generations[-1], upgraded.generation
    assert handed_over.ended_by == f"the manager is of version {version} now"
    assert first.from_step == handed_over.to_step
    assert upgraded.minibatches_recomputed == 0


def test_an_older_manager_is_refused(story: Story) -> None:
    assert story.older.code != 0
    assert f"was managed by spottrain {NEWER}+" in story.older.err


def test_after_the_death_of_everything_it_goes_on_from_the_newest_checkpoint(
    story: Story,
) -> None:
    restored = [r for _, r in story.job.reports(messages.GenerationStarted)][-1]
    assert story.restored_step > 0
    assert restored.step == story.restored_step
    assert restored.sections_loaded > 0


def test_it_ends_as_if_nothing_had_happened(story: Story, reference: Undisturbed) -> None:
    assert story.last.code == 0, story.last.err
    assert story.last.report["steps_done"] == STEPS
    assert story.last.report["minibatches_lost"] == 0
    assert weights(story.job.checkpoint_root) == reference.weights


def test_the_report_tells_what_was_computed_again(story: Story) -> None:
    report: dict[str, Any] = story.last.report
    assert report["minibatches_recomputed"] > 0
    assert report["vms_launched"] == 4
    managers = [e for e in story.job.events() if isinstance(e, ManagerStarted)]
    assert len(managers) == 4


def test_every_minibatch_is_measured_once_in_order(story: Story, reference: Undisturbed) -> None:
    assert [step for step, _ in story.job.losses()] == [*range(1, STEPS + 1)]
    assert dict(story.job.losses()) == pytest.approx(dict(reference.losses))


def test_nothing_is_left_of_it(story: Story) -> None:
    assert story.processes_left == []
