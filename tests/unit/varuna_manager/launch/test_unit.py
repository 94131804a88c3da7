from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.varuna_manager.stored_jobs import submit
from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch import unit


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    folder = tmp_path / "jobs of 100%" / "job"
    folder.mkdir(parents=True)
    return JobDir(folder)


def journalled(job: JobDir, story: Story) -> None:
    journal = Journal(job.journal)
    journal.append(*story.steps)
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


def test_slurm_s_commands_find_their_cluster_in_it(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm.conf")
    assert 'Environment="SLURM_CONF=/opt/slurm.conf"' in unit.unit_text(job)


def test_a_job_that_has_ended_does_not_begin_anew_with_the_machine(job: JobDir) -> None:
    assert unit.main([str(job.path)]) == 1, "there is no job"
    story = Story().training("a", "b")
    journalled(job, story)
    assert unit.main([str(job.path)]) == 0
    told = len(story.steps)
    story.tell(e.StopRequested, by="me", now=True)
    story.tell(e.VmsReturned, vm_ids=("a", "b"))
    del story.steps[:told]
    journalled(job, story)
    assert unit.main([str(job.path)]) == 1


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a stand-in for systemctl(1) is called with; it refuses what ``refused`` says."""
    runtime, programs = tmp_path / "run", tmp_path / "bin"
    (runtime / "systemd").mkdir(parents=True)
    (runtime / "systemd" / "private").touch()
    programs.mkdir()
    found, refused = tmp_path / "calls", tmp_path / "refused"
    systemctl = programs / "systemctl"
    systemctl.write_text(
        f"#!/bin/sh\necho \"$@\" >> '{found}'\n"
        f"grep -qsx \"$2\" '{refused}' || exit 0\necho 'Access denied' >&2\nexit 1\n"
    )
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return found


def test_it_is_installed_enabled_and_started(calls: Path, tmp_path: Path) -> None:
    job = submit(tmp_path, str(tmp_path / "checkpoints"))
    enabled, *_ = unit.install(job)
    path = tmp_path / "config" / "systemd" / "user" / unit.unit_name(job)
    assert enabled == f"{path} is enabled"
    assert path.read_text() == unit.unit_text(job)
    name = unit.unit_name(job)
    assert calls.read_text().splitlines() == [
        "--user daemon-reload",
        f"--user enable {name}",
        f"--user start {name}",
    ]


def test_what_systemd_refuses_is_one_line(calls: Path, tmp_path: Path) -> None:
    job = submit(tmp_path, str(tmp_path / "checkpoints"))
    (tmp_path / "refused").write_text("enable\n")
    with pytest.raises(unit.UnitError, match="systemctl --user enable: Access denied"):
        unit.install(job)
    assert "start" not in calls.read_text()


def test_without_a_systemd_it_says_what_to_do(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nothing"))
    job = submit(tmp_path, str(tmp_path / "checkpoints"))
    with pytest.raises(unit.UnitError, match="'spottrain resume demo'"):
        unit.install(job)
    assert not calls.exists()
