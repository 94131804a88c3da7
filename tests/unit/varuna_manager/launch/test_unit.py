from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch.systemd import unit


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    folder = tmp_path / "jobs of 100%" / "job"
    folder.mkdir(parents=True)
    return JobDir(folder)


def journalled(job: JobDir, story: Story) -> None:
    journal = Journal(job.journal)
    journal.append(*story.events)
    journal.close()


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_accepts_the_unit(job: JobDir, tmp_path: Path) -> None:
    path = tmp_path / unit.unit_name(job)
    path.write_text(unit.unit_text(job))
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    ours = [line for line in done.stderr.splitlines() if path.name in line]
    assert ours == []
    assert done.returncode == 0, done.stderr


def test_it_starts_the_manager_of_this_job_again_but_leaves_its_vms(
    job: JobDir,
) -> None:
    text = unit.unit_text(job)
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    service = parser["Service"]
    assert f'"{sys.executable}"' in service["ExecStart"]
    assert service["ExecStart"].endswith(f'"{job.path}"'.replace("%", "%%"))
    assert service["KillMode"] == "process"
    assert service["Restart"] == "on-failure"
    assert parser["Install"]["WantedBy"] == "default.target"


def test_a_job_that_has_ended_does_not_begin_anew_with_the_machine(job: JobDir) -> None:
    assert unit.main([str(job.path)]) == 1, "there is no job"
    story = Story().training("a", "b")
    journalled(job, story)
    assert unit.main([str(job.path)]) == 0
    told = len(story.events)
    story.tell(e.StopRequested, by="me", now=True)
    story.tell(e.VmsReturned, vm_ids=("a", "b"))
    del story.events[:told]
    journalled(job, story)
    assert unit.main([str(job.path)]) == 1
