"""What keeps a manager alive, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.varuna_manager.launch.manager.test_manager_vm import config_of
from tests.unit.varuna_manager.story import SETTINGS

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.daemon.watchdog import keep
from spottrain.varuna_manager.jobs.bucket import StoredJob
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    job = JobDir(tmp_path / "far")
    job.path.mkdir()
    journal = Journal(job.journal)
    journal.record(e.JobSubmitted(at_s=1.0, settings=SETTINGS))
    journal.close()
    return job


def test_a_job_that_has_ended_needs_no_manager(job: JobDir) -> None:
    journal = Journal(job.journal)
    journal.record(
        e.StopRequested(at_s=2.0, by="x", now=True),
        e.VmsListed(at_s=3.0, asked_at_s=2.5, vms=()),
    )
    journal.close()
    assert keep(job, 60.0) == "the job has ended: stopped"
    assert not job.log.exists()


@pytest.mark.rotated
def test_a_manager_that_cannot_run_is_given_up_after_the_lease(job: JobDir) -> None:
    assert keep(job, 0.5) == "no manager could run for 0.5 s"
    assert "config.json" in job.log.read_text()


def test_a_manager_whose_job_another_machine_has_is_not_started_again(
    job: JobDir,
) -> None:
    store = (job.path / "store").as_uri()
    config = config_of("aws", checkpoint={"path": store})
    (job.path / "config.json").write_text(config.model_dump_json())
    StoredJob(store, SETTINGS.uid).claim("another machine's folder")
    assert "taken over" in keep(job, 60.0)
