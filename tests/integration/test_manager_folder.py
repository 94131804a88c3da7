"""What a manager does when what it relies on in its job's folder is gone or out of use."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.test_manager_process import Job, is_training
from tests.local_cloud import inject
from tests.view import View

from spottrain.cloud.local.folder import marker
from spottrain.cloud.local.market import MarketEvent
from spottrain.cloud.process import tree
from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store

SOON_S = 240.0
"""By then a manager has ended that is to end: it waits for nothing for longer."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job that would train for ever, whose checkpoints are elsewhere."""
    home, store = tmp_path / "home", tmp_path / "store"
    made = Job(tmp_path / "0" / "job", 100_000, 2, home=home, store=store)
    yield made
    for vm_id in made.launched():
        tree.kill_all([marker("job", vm_id)])
    made.end()


def left(vm_ids: list[str]) -> frozenset[int]:
    """Return the processes that VMs have left."""
    return tree.groups([marker("job", vm_id) for vm_id in vm_ids])


def newest_step(job: Job) -> int:
    return list_checkpoints(open_store(job.store))[0].step


def test_a_manager_whose_folder_is_gone_saves_and_returns_everything(job: Job) -> None:
    manager = job.start()
    job.wait_for(is_training)
    vm_ids = job.launched()
    assert left(vm_ids)
    aside = job.dir.path.with_name("aside")
    job.dir.path.rename(aside)
    try:
        assert manager.wait(SOON_S) == 1
        assert not left(vm_ids)
        assert not job.dir.path.exists(), "what is gone was made anew"
        assert newest_step(job) >= 5
    finally:
        aside.rename(job.dir.path)
    assert job.launched() == vm_ids
    assert "deleted or moved" in job.dir.log.read_text()


@pytest.mark.parametrize("name", ["journal.sqlite", "manager.lock"])
@pytest.mark.rotated
def test_a_manager_whose_journal_or_lock_is_deleted_ends_likewise(job: Job, name: str) -> None:
    manager = job.start()
    job.wait_for(is_training)
    vm_ids = job.launched()
    kept = (job.dir.path / name).rename(job.dir.path.with_name("aside"))
    try:
        assert manager.wait(SOON_S) == 1
        assert not left(vm_ids)
        assert newest_step(job) >= 5
    finally:
        kept.rename(job.dir.path / name)


@pytest.mark.rotated
def test_a_journal_that_cannot_be_written_ends_the_job_rather_than_its_manager(
    job: Job,
) -> None:
    manager = job.start(STUB_PATIENCE_S="1.0")
    job.wait_for(is_training)
    vm_ids = job.launched()
    with closing(sqlite3.connect(job.dir.journal, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert manager.wait(SOON_S) == 1
    assert not left(vm_ids)
    assert newest_step(job) >= 5


@pytest.mark.rotated
def test_without_the_users_code_nothing_is_rented_and_the_job_ends(job: Job) -> None:
    manager = job.start(STUB_PATIENCE_S="40.0")
    job.wait_for(is_training)
    job.dir.workdir.unlink()
    job.wait_for(lambda state: bool(state.launches.folder_trouble))
    vm_ids = job.launched()
    inject(job.cloud, MarketEvent(at_s=0.0, kind="kill", zone="a", machine=0))
    assert manager.wait(SOON_S) == 1
    assert job.launched() == vm_ids
    outcome = job.state().outcome
    assert outcome is not None
    assert str(job.dir.workdir) in outcome.reason
    assert newest_step(job) >= 5


@pytest.mark.rotated
def test_code_that_cannot_be_unpacked_ends_the_job_with_the_words_of_a_vm(
    job: Job,
) -> None:
    job.dir.workdir.write_bytes(b"no archive")
    manager = job.start(STUB_PATIENCE_S="20.0")
    assert manager.wait(SOON_S) == 6
    assert len(job.launched()) <= 7
    outcome = job.state().outcome
    assert outcome is not None
    assert "workdir cannot be unpacked" in outcome.reason


@pytest.mark.rotated
def test_a_folder_that_is_read_only_for_a_moment_costs_nothing(job: Job) -> None:
    manager = job.start()
    step = View(job.wait_for(is_training)).step
    folder = str(job.dir.path)
    bind = subprocess.run(["mount", "--bind", folder, folder], check=False)
    if bind.returncode:
        pytest.skip("only root may mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        seen = job.wait_for(lambda state: bool(state.launches.folder_trouble))
        assert "read-only" in seen.launches.folder_trouble
        job.wait_for(lambda state: View(state).step > step + 5)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    job.wait_for(lambda state: not state.launches.folder_trouble)
    job.may_end()
    assert manager.wait(SOON_S) == 0
