"""A job whose machine burns down: another one goes on from the checkpoint store alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.object_store import CREDENTIALS, S3, serve_s3
from tests.integration.jobs import Job, until, weights
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.varuna_manager.core.model.events import (
    JobMoved,
    JobSubmitted,
    ManagerStarted,
)
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.trust import digest_of

pytestmark = pytest.mark.rotated(parts=[2])


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with serve_s3() as server:
        yield server


def has_saved(state: State) -> bool:
    return state.newest_checkpoint is not None and state.newest_checkpoint.step > 0


def copied(job: Job) -> int:
    """Return how many events the store holds, as the manager says."""
    note = job.dir.copy_status
    return int(json.loads(note.read_text())["seq"]) if note.exists() else 0


def test_a_job_goes_on_from_its_store_after_its_machine_has_burnt_down(
    tmp_path: Path, s3: S3, reference: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    url = s3.url("runs/moved")
    checkpoint = {"path": url, "every_steps": 10}
    with Job(tmp_path, "moved", checkpoint=checkpoint, resources={"max_vms": 2}) as job:
        # The machine burns down before the next checkpoint: what was measured between two
        # is copied to the store with the second.
        job.pace(0.3)
        assert job.launch("--detach").code == 0
        before = job.until("a checkpoint", lambda s: s if has_saved(s) else None)
        job.until_paced(1000.0)
        known = len(job.events())
        until("the copy of what is known", lambda: copied(job) >= known)
        job.kill_everything()
        number = digest_of(job.dir)
        lost = len(job.events())
        shutil.rmtree(tmp_path / "home")
        job.pace(0.0)

        last = job.run("resume", url, "--trust", number, "-o", "json")

        assert last.code == 0, last.err
        assert "keys" in last.err
        assert weights(url) == reference.weights
        assert dict(job.losses()) == pytest.approx(dict(reference.losses))
        events = job.events()
        assert isinstance(events[0], JobSubmitted)
        moved = next(i for i, e in enumerate(events) if isinstance(e, JobMoved))
        assert known <= moved <= lost
        assert len([e for e in events if isinstance(e, ManagerStarted)]) == 2
        ledger = View(job.state()).ledger
        assert View(before).vms.keys() <= ledger.closed.keys()
        # What the second machine did is in the store as well, to the last event.
        assert copied(job) == len(events)
