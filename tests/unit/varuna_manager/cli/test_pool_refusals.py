"""What ``spottrain pool`` and ``launch --pool`` refuse, in one line, and warn of; exit codes.

Those of jobs that a pool cannot promise anything are in ``pool/test_requests.py``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from spottrain.varuna_manager.config.pool import parse_pool
from spottrain.varuna_manager.pool.core.model import (
    JobRequest,
    JobRequested,
    PoolCreated,
)
from spottrain.varuna_manager.pool.store.folder import create_pool
from spottrain.varuna_manager.pool.store.journal import PoolJournal
from spottrain.varuna_manager.pool.store.settings import settings_of, supplies_of
from tests.commands import Run

POOL: dict[str, Any] = {"name": "lab", "max_vms": 4, "teams": {"vision": {}}}
JOB: dict[str, Any] = {
    "name": "job",
    "entrypoint": "train:job",
    "minibatch_size": 8,
    "steps": 10,
}
Refused = Callable[..., str]


def write(file: str, content: dict[str, Any]) -> None:
    Path(file).write_text(json.dumps(content))


@pytest.fixture
def refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> Refused:
    """Run a command beside a pool with a job, and without its daemon."""
    monkeypatch.chdir(tmp_path)
    config = parse_pool(POOL, "lab.yaml")
    supplies = supplies_of(config, {"local/cpu": 0.1})
    created = PoolCreated(at_s=0.0, settings=settings_of(config), supplies=supplies)
    pool = create_pool(config, created)
    table = ((1, 1.0), (2, 2.0))
    request = JobRequest(name="job", throughputs=(table,), examples=80.0)
    with closing(PoolJournal(pool.journal)) as journal:
        journal.record(JobRequested(at_s=1.0, request=request))
    write("job.yaml", JOB)

    def answer(*arguments: str, code: int = 2) -> str:
        ended, _, err = run(*arguments)
        error = err.strip()
        assert ended == code, error
        return error if code == 0 else error.splitlines()[-1]

    return answer


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("pool status poets", "no pool poets on this machine; those in "),
        ("launch job.yaml --pool poets", "no pool poets on this machine"),
        ("plan job.yaml --pool poets", "no pool poets on this machine"),
        (
            "launch job.yaml --pool lab --priority 0",
            "--priority: must be a number from 0.001",
        ),
        ("launch job.yaml --pool lab --manager-vm", "--manager-vm: a pool starts"),
        ("pool set lab max_vms", "must be KEY=VALUE, such as max_vms=8"),
        ("pool down lab", "jobs that have not ended: job; --yes ends them"),
    ],
)
def test_a_wrong_command_is_refused(refused: Refused, command: str, error: str) -> None:
    assert error in refused(*command.split())


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": "new", "teams": {"vision": {"weight": 0}}}, "got 0"),
        ({"name": "new", "teams": {"vision": {"max_vms": 9}}}, "at most the pool's, 4"),
        ({"name": "new", "kinds": {"a100": 1}}, "unknown instance type: got a100"),
        ({}, "lab"),
    ],
)
def test_a_wrong_pool_is_not_created(refused: Refused, changes: dict[str, Any], error: str) -> None:
    write("new.yaml", {**POOL, **changes})
    assert error in refused("pool", "create", "new.yaml")


@pytest.mark.rotated
def test_a_second_pool_on_a_quota_is_warned_of_and_created(refused: Refused) -> None:
    write("new.yaml", {**POOL, "name": "new"})
    # Its daemon is no child of this process.
    command = [sys.executable, "-m", "spottrain.varuna_manager.cli.main"]
    created = subprocess.run(
        [*command, "pool", "create", "new.yaml", "-o", "json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        assert created.returncode == 0, created.stderr
        assert "warning: pool lab rents from local too" in created.stderr
        assert "name" in refused("pool", "create", "new.yaml"), "it has its name"
        assert not refused("pool", "status", "new", "-o", "json", code=0)
    finally:
        ended = refused("pool", "down", "new", code=0)
    assert "pool new has ended; jobs ended with it: 0" in ended


@pytest.mark.rotated
def test_ctrl_c_while_jobs_are_submitted_leaves_the_pool_and_says_so(
    refused: Refused,
) -> None:
    write("new.yaml", {**POOL, "name": "new", "jobs": [{"file": "job.yaml"}]})
    Path("train.py").write_text("import time\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "spottrain.varuna_manager.cli.main"]
    with subprocess.Popen(
        [*command, "pool", "create", "new.yaml", "--until-done"],
        stderr=subprocess.PIPE,
        text=True,
    ) as creating:
        assert creating.stderr is not None
        while "inspecting" not in creating.stderr.readline():
            assert creating.poll() is None
        creating.send_signal(signal.SIGINT)
        said = creating.stderr.read()
    ended = refused("pool", "down", "new", code=0)
    assert creating.returncode == 130
    assert "pool new goes on, with 0 of the 1 job of its file" in said
    assert "pool new " in ended


@pytest.mark.parametrize("name", ["a" * 300, "../jobs/x", ".."])
def test_a_name_that_no_folder_has_is_one_line(refused: Refused, name: str) -> None:
    assert f"no pool {name} " in refused("pool", "status", name)
    assert f"no job {name} " in refused("status", name)


def test_a_job_larger_than_the_pool_is_refused(refused: Refused) -> None:
    write("job.yaml", {**JOB, "resources": {"min_vms": 9}})
    error = refused("launch", "job.yaml", "--pool", "lab")
    assert "min_vms: must be at most the VMs of pool lab, 4: got 9" in error


def test_a_pool_without_its_daemon_says_how_to_start_it(refused: Refused) -> None:
    error = refused("launch", "job.yaml", "--pool", "lab", code=1)
    assert "'spottrain pool resume lab' starts it again" in error
