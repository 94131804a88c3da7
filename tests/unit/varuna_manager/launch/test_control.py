"""Ending a job whose manager cannot be asked: nothing but that manager is killed."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.unit.varuna_manager.jobs.test_folder import FACTS, config_for

from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.launch import control, submit
from spottrain.varuna_manager.launch.control import ManagerUnreachableError, end_job

STARTING = """
import signal, sys
from pathlib import Path
from spottrain.varuna_manager.daemon.main import only_manager
with only_manager(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""
"""A manager that reads its journal, and answers nobody."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()
    return submit.submit(config_for(tmp_path), FACTS)[0]


@pytest.fixture
def stranger(job: JobDir) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the pid of a manager that was killed."""
    with subprocess.Popen(["sleep", "600"]) as stranger:
        address = {"pid": stranger.pid, "url": "https://127.0.0.1:9"}
        (job.path / "manager.json").write_text(json.dumps(address))
        (job.path / "manager.lock").write_text(str(stranger.pid))
        yield stranger
        stranger.kill()


def test_down_ends_a_manager_that_is_starting_and_nobody_else(
    job: JobDir, stranger: subprocess.Popen[bytes]
) -> None:
    with ExitStack() as stack:
        starting = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", STARTING, str(job.path)], stdout=subprocess.PIPE
            )
        )
        stack.callback(starting.kill)
        assert starting.stdout is not None
        assert starting.stdout.readline() == b"held\n"

        end_job(job)

        assert starting.wait() == -signal.SIGKILL
    assert job.is_down
    assert stranger.poll() is None


def test_down_kills_nobody_for_a_pid_that_the_holder_of_the_lock_did_not_write(
    job: JobDir,
    stranger: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 0.2)
    with open(job.path / "manager.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ManagerUnreachableError, match="by hand"):
            end_job(job)

    assert stranger.poll() is None
    end_job(job)
    assert job.is_down
    assert stranger.poll() is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": null, "url": 1}', "1e999"])
def test_an_address_that_is_damaged_is_none(job: JobDir, text: str) -> None:
    (job.path / "manager.json").write_text(text)

    assert job.manager() is None
