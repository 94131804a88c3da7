"""The manager process, started as the command line starts it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.unit.varuna_manager.stored_jobs import submit
from tests.view import settings_with

from spottrain.eventlog.process import bound
from spottrain.varuna_manager.core.model.events import LimitsChanged
from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.daemon.main import logs_of
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal, Step


def test_an_internal_error_is_logged_with_its_cause_and_story(tmp_path: Path) -> None:
    job = submit(tmp_path, f"file://{tmp_path}/store")
    limit = Limit(name="max_usd", value=-1.0)
    with contextlib.closing(Journal(job.journal)) as journal:
        before = journal.replay()
        settings = settings_with(before.job, max_usd=limit.value)
        changed = LimitsChanged(at_s=2.0, by="me", limits=(limit,))
        # Such as a bug decides it: no bill can be compared with that.
        journal.append(Step(before, changed, replace(before, settings=settings)))
    main = "spottrain.varuna_manager.daemon.main"
    ended = subprocess.run(
        [sys.executable, "-P", "-m", main, str(job.path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == 1
    log = ended.stderr.splitlines()
    assert "this is a bug of spottrain, please report it" in log[0]
    assert any("MoneyError: must be dollars" in line for line in log), "the traceback of the cause"
    story = log.index("The last events:")
    assert "event 1, JobSubmitted" in log[story + 1]
    assert "event 2, LimitsChanged" in log[story + 2]
    assert "error: internal: " in log[-1]
    assert "at event 3, ManagerStarted; the job is active" in log[-1]


def test_all_logs_of_a_manager_are_bounded(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    job.cloud.mkdir()
    (tmp_path / "tracking").mkdir()
    logs = [job.log, job.cloud / "cloud.log", tmp_path / "tracking" / "wandb.log"]
    for turn in ("first", "second", "third"):
        for log in logs:
            log.write_text(f"the {turn}")
        bound(logs_of(job), max_bytes=5)
    for log in logs:
        assert log.read_text() == ""
        assert log.with_name(f"{log.stem}.1.log").read_text() == "the third"
    assert not list(tmp_path.rglob("*.1.1.log"))
