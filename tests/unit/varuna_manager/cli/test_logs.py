"""``spottrain logs --follow``, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.varuna_manager.stored_jobs import submit

from spottrain.errors import SpottrainError


def test_followed_logs_show_lines_without_end_and_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
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
