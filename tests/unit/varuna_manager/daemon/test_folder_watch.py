"""What is seen of a job's folder while its manager runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from spottrain.varuna_manager.daemon.folder_watch import KEPT, FolderSight, FolderWatch
from spottrain.varuna_manager.jobs.folder import JobDir


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    made = JobDir(tmp_path / "jobs" / "job")
    made.path.mkdir(parents=True)
    for file in (made.journal, made.lock, made.workdir):
        file.write_text("x")
    return made


def test_a_folder_as_it_should_be_is_no_trouble(job: JobDir) -> None:
    assert FolderWatch(job).look() == FolderSight()


def _replaced(job: JobDir) -> None:
    shutil.move(job.path, job.path.with_name("aside"))
    job.path.mkdir()


GONE: list[Callable[[JobDir], object]] = [
    lambda job: shutil.rmtree(job.path),
    lambda job: shutil.rmtree(job.path.parent),
    _replaced,
    lambda job: job.journal.unlink(),
    lambda job: job.lock.unlink(),
]


@pytest.mark.parametrize("act", GONE)
def test_what_was_deleted_or_replaced_is_gone_for_good(
    job: JobDir, act: Callable[[JobDir], object]
) -> None:
    watch = FolderWatch(job)
    act(job)
    found = watch.look()
    assert found.is_gone
    assert "deleted" in found.trouble


def test_what_commands_and_agents_need_is_written_again(job: JobDir) -> None:
    for name in KEPT:
        (job.path / name).write_text(name)
    watch = FolderWatch(job)
    assert watch.restore() == []
    for name in KEPT:
        (job.path / name).unlink()
    assert watch.restore() == list(KEPT)
    assert watch.look() == FolderSight()
    for name in KEPT:
        assert (job.path / name).read_text() == name
        assert (job.path / name).stat().st_mode & 0o777 == 0o600
    shutil.rmtree(job.path)
    assert watch.restore() == []
    assert not job.path.exists()


def test_the_users_code_that_cannot_be_read_may_come_back(job: JobDir) -> None:
    watch = FolderWatch(job)
    aside = job.workdir.rename(job.path / "aside")
    trouble, is_gone = watch.look()
    assert str(job.workdir) in trouble
    assert not is_gone
    aside.rename(job.workdir)
    assert watch.look() == FolderSight()


def mount(*arguments: str) -> None:
    if subprocess.run(["mount", *arguments], check=False).returncode:
        pytest.skip("only root may mount")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_file_system_that_was_unmounted_may_come_back(job: JobDir, depth: int) -> None:
    root = (job.path, *job.path.parents)[depth]
    shutil.rmtree(root)
    root.mkdir()
    mount("-t", "tmpfs", "spottrain", str(root))
    try:
        job.path.mkdir(exist_ok=True)
        for file in (job.journal, job.lock, job.workdir):
            file.write_text("x")
        watch = FolderWatch(job)
        assert watch.look() == FolderSight()
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)
    trouble, is_gone = watch.look()
    assert "not mounted" in trouble
    assert not is_gone


def test_a_folder_that_is_read_only_is_seen(job: JobDir) -> None:
    watch, folder = FolderWatch(job), str(job.path)
    mount("--bind", folder, folder)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        assert "read-only" in watch.look().trouble
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert watch.look() == FolderSight()
