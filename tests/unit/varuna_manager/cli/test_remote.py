"""Commands about a job whose manager was on a VM of its own, against AWS's fake."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_launch
from tests.fakes.aws import FakeAws
from tests.unit.varuna_manager.cli.test_main_clouds import job_file
from tests.unit.varuna_manager.story import FACTS

from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import SshTarget
from spottrain.cloud.ssh.transport.hosts import UnfitHostError
from spottrain.varuna_manager.cli.remote import launching
from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs import manager_location
from spottrain.varuna_manager.jobs.bucket import folder_mark
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.manager_location import RemoteManager
from spottrain.varuna_manager.jobs.replication import begin_replication
from spottrain.varuna_manager.launch.submit import check_name, submit
from tests.commands import Run, runs

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs OpenSSH's client")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return runs(monkeypatch, capfd)


@pytest.fixture
def job(aws: FakeAws, tmp_path: Path) -> JobDir:
    """A job whose manager runs on a VM that does not answer."""
    (tmp_path / "train.py").write_text("")
    store = (tmp_path / "store").as_uri()
    file = job_file(
        aws,
        tmp_path,
        checkpoint={"path": store},
        manager_vm={"identity": "manager"},
    )
    job, _ = submit(load_config(file), FACTS)
    provider = aws.provider(uid=uid_of(job))
    (offer,) = (one for one in provider.offers() if one.spot)
    request = a_launch(replace(offer, spot=False), token="t", intent=tags.MANAGER, lease_s=60.0)
    (vm,) = provider.launch(request).vms
    nobody = SshTarget(host="127.0.0.1", user="u", host_keys=("ssh-ed25519 A",), port=9)
    there = RemoteManager(requests=(request,), networks=(), vm_id=vm.vm_id, target=nobody)
    manager_location.write(job, replace(there, started=True))
    return job


def copied(job: JobDir, folder: Path, *events: e.Event) -> None:
    """Let its manager have written down more, and copied it into the store."""
    folder_mark(job)
    there = JobDir(folder / "job")
    shutil.copytree(job.path, there.path)
    journal = Journal(there.journal)
    journal.record(*events)
    journal.close()

    async def copy() -> None:
        made = begin_replication(there)
        assert made is not None
        assert await made.finish()
        made.close()

    asyncio.run(copy())


STOPPED: tuple[Any, ...] = (
    e.StopRequested(at_s=2e9, by="somebody", now=True),
    e.VmsListed(at_s=2e9 + 1, asked_at_s=2e9, vms=()),
    e.JobReleased(at_s=2e9 + 2),
)


def end_all(aws: FakeAws, job: JobDir) -> None:
    """End the VMs of a job, as a person does in the console."""
    provider = aws.provider(uid=uid_of(job))
    provider.terminate([vm.vm_id for vm in provider.list_vms("job")])


def test_while_its_vm_runs_a_job_is_there_though_it_does_not_answer(job: JobDir, run: Run) -> None:
    code, out, err = run("status", "job")
    assert (code, out) == (1, "")
    assert "its manager's VM (aws.i-" in err
    assert "runs but does not answer" in err
    assert job.remote_manager_file.exists()


def test_when_its_vm_is_gone_the_user_learns_once_how_to_continue(
    aws: FakeAws, job: JobDir, run: Run, tmp_path: Path
) -> None:
    copied(job, tmp_path, e.TimerFired(at_s=2e9))
    end_all(aws, job)
    code, out, err = run("status", "job", "-o", "json")
    assert code == 0
    assert json.loads(out)["state"] == "unmanaged"
    (line,) = (x for x in err.splitlines() if "is gone" in x)
    assert f"'spottrain resume {(tmp_path / 'store').as_uri()}' on any machine" in line
    assert not job.remote_manager_file.exists()
    journal = Journal(job.journal, read_only=True)
    assert journal.last_seq() == 2  # what it wrote down there
    journal.close()
    assert "is gone" not in run("status", "job", "-o", "json")[2]


def test_a_job_that_is_over_is_reclaimed_and_leaves_nothing_behind(
    aws: FakeAws, job: JobDir, run: Run, tmp_path: Path
) -> None:
    copied(job, tmp_path, *STOPPED)
    assert aws.ask("left") != []
    end_all(aws, job)
    code, out, _ = run("status", "job", "-o", "json")
    assert code == 0
    assert json.loads(out)["state"] == "stopped"
    assert aws.ask("left") == []


def test_down_ends_the_vm_of_the_manager_as_well(aws: FakeAws, job: JobDir, run: Run) -> None:
    code, _, err = run("down", "job")
    assert code == 0, err
    assert "VMs returned after its manager ended: 1" in err
    assert aws.ask("left") == []
    assert job.is_down


def test_a_launch_that_did_not_finish_is_gone_on_with_or_returned(
    aws: FakeAws, job: JobDir, run: Run
) -> None:
    known = manager_location.read(job)
    assert known is not None
    manager_location.write(job, replace(known, started=False))
    code, _, err = run("status", "job")
    assert code == 2
    assert "'spottrain resume job' continues it, 'spottrain down job' returns" in err
    assert run("down", "job")[0] == 0
    assert aws.ask("left") == []


def test_a_vm_that_cannot_be_used_is_returned_and_its_job_can_be_launched_anew(
    aws: FakeAws, job: JobDir, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnfitHostError), launching(job):
        raise UnfitHostError("host i-1: needs Python 3.11 or newer")
    assert "job job: its VM cannot be used and was returned" in capfd.readouterr().err
    assert aws.ask("left") == []
    assert (job.is_down, job.remote_manager_file.exists()) == (True, False)
    check_name("job")


def test_a_launch_that_fails_half_way_says_how_to_go_on_and_how_to_end(
    aws: FakeAws, job: JobDir, run: Run
) -> None:
    known = manager_location.read(job)
    assert known is not None
    aws.provider().terminate([known.vm_id])
    manager_location.write(job, replace(known, started=False))
    code, _, err = run("resume", "job")
    assert code == 6
    told, error = err.splitlines()[-2:]
    assert "'spottrain resume job'" in told
    assert error.startswith("error: ")
    assert (job.is_down, job.remote_manager_file.exists()) == (False, True)


def test_gc_says_that_a_vm_is_a_manager_and_returns_it_only_by_name(
    aws: FakeAws, job: JobDir, run: Run, tmp_path: Path
) -> None:
    file = str(tmp_path / "job.yaml")
    _, out, err = run("gc", file)
    assert "job (manager)" in out
    assert "job job has its manager on a VM of its own and is no orphan" in err
    assert "0 VMs without a manager here" in err
    run("gc", file, "--yes")
    assert aws.ask("left") != []
    run("gc", file, "--yes", "--job", "job")
    assert aws.ask("left") == []
