"""``spottrain logs``: what it leaves out, and ``--follow`` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.varuna_manager.stored_jobs import submit
from typer.testing import CliRunner

from spottrain.errors import ConfigError, SpottrainError
from spottrain.varuna_manager.cli.main import app


def test_followed_logs_show_lines_without_end_and_only_what_is_new(tmp_path: Path) -> None:
    job = submit(tmp_path, f"file://{tmp_path}/store")
    vm_log = job.cloud / "vms" / "vm-1" / "supervisor.log"
    vm_log.parent.mkdir(parents=True)
    name = vm_log.relative_to(job.path)
    job.log.write_bytes(b"first\nunfinis")
    argv = [sys.executable, "-m", "spottrain.varuna_manager.cli.main", "logs", job.name, "-f"]
    with contextlib.ExitStack() as manager:
        manager.enter_context(job.locked(SpottrainError("it is managed")))
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            lines = iter(following.stdout.readline, "")
            assert [next(lines), next(lines)] == [
                "manager.log: first\n",
                "manager.log: unfinis\n",
            ]
            # The end of a log, as a VM far away sends it, again and as long as before.
            numbers = [f"{number}\n" for number in range(1000, 1202)]
            vm_log.write_text("".join(numbers[:200]))
            assert [next(lines) for _ in range(200)][-1] == f"{name}: 1199\n"
            vm_log.write_text("".join(numbers[2:]))
            assert [next(lines), next(lines)] == [f"{name}: 1200\n", f"{name}: 1201\n"]
            manager.close()
            assert list(lines) == []
    assert following.returncode == 0


@pytest.fixture
def logged(tmp_path: Path) -> Callable[..., str]:
    """Show the logs of a job with two VMs; the older part of a log is that of one."""
    job = submit(tmp_path, f"file://{tmp_path}/store")
    logs = {
        "vm-1/agent.1.log": "2026-01-01T10:00:00.000+00:00 begins\nwith a second line\n",
        "vm-1/agent.log": "2026-01-01T12:00:00.000+00:00 goes on\n2026-01-01T15:00:00.000+02:00 ends\n",
        "vm-1/supervisor.log": "[rank 1] one\n[rank 11] eleven\n[measuring, rank 1] first\nplain\n",
        "vm-2/supervisor.log": "[rank 2] two\n",
    }
    job.log.write_text("2026-01-01T11:30:00.000+00:00 managed\n")
    for name, text in logs.items():
        path = job.cloud / "vms" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    os.utime(job.cloud / "vms" / "vm-1" / "supervisor.log", (0, 0))

    def show(*options: str) -> str:
        result = CliRunner().invoke(app, ["logs", job.name, *options])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.stdout.replace("cloud/vms/", "")

    return show


def test_logs_of_a_vm_and_a_rank_are_told_apart(logged: Callable[..., str]) -> None:
    assert logged("--vm", "vm-2") == "vm-2/supervisor.log: [rank 2] two\n"
    assert logged("--rank", "1").splitlines() == [
        "vm-1/supervisor.log: [rank 1] one",
        "vm-1/supervisor.log: [measuring, rank 1] first",
    ]
    with pytest.raises(ConfigError, match=r"has no logs of VM wm-1; did you mean vm-1\?"):
        logged("--vm", "wm-1")


def test_the_last_lines_of_a_log_may_be_in_its_older_part(logged: Callable[..., str]) -> None:
    lines = logged("--vm", "vm-1", "--tail", "3").splitlines()
    assert lines[:3] == [
        "vm-1/agent.1.log: with a second line",
        "vm-1/agent.log: 2026-01-01T12:00:00.000+00:00 goes on",
        "vm-1/agent.log: 2026-01-01T15:00:00.000+02:00 ends",
    ]
    assert len(lines) == 6
    assert logged("--tail", "0") == ""


def test_lines_without_a_time_have_that_of_the_line_before_or_of_the_log(
    logged: Callable[..., str],
) -> None:
    assert logged("--since", "2026-01-01T12:30:00+00:00").splitlines() == [
        "vm-1/agent.log: 2026-01-01T15:00:00.000+02:00 ends",
        "vm-2/supervisor.log: [rank 2] two",
    ]
    assert logged("--since", "1d") == "vm-2/supervisor.log: [rank 2] two\n"
    with pytest.raises(ConfigError, match=r"--since: must be 90s, .*: got yesterday"):
        logged("--since", "yesterday")
