"""Jobs whose disk is full, whose journal is damaged, whose manager is dead for good."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoints import verify
from tests.integration.jobs import Job, weights
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.storage.open import open_store

pytestmark = pytest.mark.nightly

DISK_BYTES = 2_000_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is soon full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "spottrain", str(folder)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Use up all room; return the file that does."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    with pytest.raises(OSError, match=f"Errno {errno.ENOSPC}"):
        (folder / "more").write_bytes(b"\0" * 8192)
    (folder / "more").unlink()
    return ballast


def test_a_full_disk_costs_a_checkpoint_but_not_the_job(
    tmp_path: Path, small_disk: Path, reference: Undisturbed
) -> None:
    checkpoint = {"path": str(small_disk), "every_steps": 10}
    with Job(tmp_path, "full", checkpoint=checkpoint, resources={"max_vms": 1}) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        job.until_trains(1)
        ballast = fill(small_disk)
        error = job.until("the disk is full", lambda state: View(state).checkpoint_error)
        assert os.strerror(errno.ENOSPC) in error
        shown = job.run("report", job.name, "-o", "json").out
        assert os.strerror(errno.ENOSPC) in shown
        before = job.checkpoints()[0]
        verify(open_store(small_disk), before.name)
        ballast.unlink()
        job.until(
            "a checkpoint after it",
            lambda state: any(c.step > before.step for c in View(state).checkpoints),
        )
        job.pace(0.0)
        state = job.until("the end", lambda s: s if s.outcome else None)
        assert state.outcome is not None
        assert state.outcome.kind == "succeeded"
        assert View(state).checkpoint_error == ""
        assert weights(small_disk) == reference.weights


def test_a_job_with_a_dead_manager_and_a_damaged_journal_can_be_ended(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, "broken", resources={"max_vms": 1}) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        job.until_trains(1)
        job.kill_manager()
        assert len(job.processes()) > 3
        for path in job.dir.path.glob("journal.sqlite*"):
            path.write_bytes(b"not a journal" * 1000)
        commands = ("status", "report", "events", "resume", "resume --detach")
        for command in map(str.split, commands):
            answer = job.run(*command, job.name)
            assert answer.code == 1, (command, answer.err)
            assert "journal" in answer.error
            assert "Traceback" not in answer.err
        answer = job.run("down", job.name)
        assert answer.code == 0, answer.err
        assert job.left_over() == []
        assert job.checkpoints()
