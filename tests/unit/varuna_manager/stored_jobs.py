"""Jobs whose checkpoints, and so whose journals' copies, are in a store with a URL."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.varuna_manager.story import FACTS

from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.core.model.events import Event, VmHeard
from spottrain.varuna_manager.jobs.bucket import StoredJob
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.replication import begin_replication
from spottrain.varuna_manager.jobs.trust import digest_of
from spottrain.varuna_manager.launch import submit as submission
from spottrain.varuna_manager.launch import takeover


def submit(folder: Path, place: str, name: str = "demo") -> JobDir:
    """Put a job on disk whose checkpoint.path is ``place``."""
    workdir = folder / "code"
    workdir.mkdir(exist_ok=True)
    (workdir / "train.py").write_text("")
    path = folder / "job.yaml"
    data = {
        "name": name,
        "entrypoint": "train:job",
        "workdir": "code",
        "minibatch_size": 8,
        "steps": 5,
        "checkpoint": {"path": place},
    }
    path.write_text(json.dumps(data))
    job, _ = submission.submit(load_config(path), FACTS)
    return job


def stored(job: JobDir) -> StoredJob:
    """Return the job in its store."""
    place = job.config().checkpoint.path
    assert place is not None
    return StoredJob(place, uid_of(job))


def take_over(place: str, say: Callable[[str], None] = lambda _: None) -> JobDir:
    """Take a job over, whose store is a folder, trusting what is there."""
    folders = map(JobDir, Path(place.removeprefix("file://")).glob("job/*/"))
    numbers = [digest_of(job) for job in folders if job.workdir.exists()]
    return takeover.take_over(place, say, trusted=(numbers or [""])[0])


def copy(job: JobDir) -> None:
    """Copy a job to its store, completely."""
    begun = begin_replication(job)
    assert begun is not None
    assert asyncio.run(begun.finish())
    begun.close()


def elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Be another machine from now on."""
    monkeypatch.setenv("SPOTTRAIN_HOME", str(folder / "other"))


def append(job: JobDir, count: int, vm_id: str = "vm") -> None:
    """Let ``count`` things happen."""
    with contextlib.closing(Journal(job.journal)) as journal:
        journal.record(*(VmHeard(at_s=2.0, vm_id=vm_id) for _ in range(count)))


def events(job: JobDir) -> list[Event]:
    """Return the journal."""
    with contextlib.closing(Journal(job.journal, read_only=True)) as journal:
        return [event for _, event in journal.read()]


def copied(job: JobDir) -> int:
    """Return how many events the store has, all of them the journal's own."""
    found = [row for rows in stored(job).journal(lambda _: None) for row in rows]
    with contextlib.closing(Journal(job.journal, read_only=True)) as journal:
        assert found == journal.rows(1, len(found))
    return len(found)
