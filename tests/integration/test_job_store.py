"""Jobs whose store is away for a while, or another job's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Job, until
from tests.view import View

from spottrain.manifest import OWNER_FILE
from spottrain.varuna_manager.core.model.state import State

pytestmark = pytest.mark.nightly


def ended(job: Job) -> State:
    """Wait until a job's manager has ended; not for an outcome, which a stop was before."""
    job.pace(0.0)
    until("the end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
    return job.state()


def test_a_store_that_is_away_is_waited_for_and_nothing_begins_again(
    tmp_path: Path,
) -> None:
    place, away = tmp_path / "store", tmp_path / "elsewhere"
    checkpoint = {"path": str(place), "every_steps": 10}
    with Job(tmp_path, "away", checkpoint=checkpoint, resources={"max_vms": 1}) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        job.until_trains(12)
        assert job.run("stop", job.name).code == 0
        saved = job.checkpoints()[0].step
        place.rename(away)
        place.mkdir()  # as the folder that a disk is mounted on
        assert job.resume("--detach").code == 0
        told = job.until("it is told", lambda state: View(state).store_error)
        assert "mount or restore" in told
        place.rmdir()
        away.rename(place)
        state = ended(job)
        assert state.outcome is not None
        assert state.outcome.kind == "succeeded"
        resumed = View(state).generations[1:]
        assert resumed[0].from_step == saved
        assert View(state).minibatches_recomputed == 0


def test_a_job_whose_checkpoints_are_all_gone_begins_again_only_if_told(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, "gone", resources={"max_vms": 1}) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        job.until_trains(12)
        assert job.run("stop", job.name).code == 0
        for folder in job.dir.checkpoints.glob("step-*"):
            folder.rename(tmp_path / folder.name)
        answer = job.resume()
        assert answer.code == 1, answer.err
        assert "--from-scratch" in answer.error
        assert job.checkpoints() == []
        job.pace(0.0)
        answer = job.resume("--from-scratch")
        assert answer.code == 0, answer.err
        assert job.state().history.generations[-1].from_step == 0


def test_a_store_of_another_job_is_refused_unless_it_is_adopted(tmp_path: Path) -> None:
    place = tmp_path / "store"
    settings: dict[str, Any] = {
        "checkpoint": {"path": str(place), "every_steps": 10, "keep": 1},
        "resources": {"max_vms": 1},
    }
    with Job(tmp_path, "first", steps=20, **settings) as first:
        assert first.launch().code == 0
        (mine,) = first.checkpoints()
    with Job(tmp_path, "second", steps=30, **{**settings, "seed": 2}) as second:
        refused = second.launch()
        assert refused.code == 2
        assert "job first" in refused.error
        assert "--adopt" in refused.error
        assert not second.dir.path.exists()
        refused = second.launch("--adopt")
        assert refused.code == 2
        assert "seed: 1" in refused.error
        assert first.checkpoints() == [mine]

        second.settings["seed"] = 1
        second.save()
        mark = (place / OWNER_FILE).read_text()
        assert "first" in mark
        done = second.launch("--adopt")
        assert done.code == 0, done.err
        assert second.state().history.generations[0].from_step == 20
        assert [entry.step for entry in second.checkpoints()] == [30]
