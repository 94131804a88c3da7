"""Files in a store may be damaged or malicious."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.varuna_manager.stored_jobs import (
    append,
    copy,
    elsewhere,
    events,
    stored,
    submit,
    take_over,
)

from spottrain.errors import ConfigError
from spottrain.storage.store import StorageError
from spottrain.varuna_manager.jobs.bucket import StoredJobError, find_stored
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.replication import begin_replication
from spottrain.varuna_manager.launch import takeover


@pytest.fixture
def job(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """A job of four events that is copied; this is another machine now."""
    job = submit(tmp_path, place)
    append(job, 3)
    copy(job)
    elsewhere(monkeypatch, tmp_path)
    return job


def kept(job: JobDir, name: str) -> Path:
    """Return a file of a job in its store."""
    return Path(stored(job).url.removeprefix("file://"), "job", uid_of(job), name)


def refused(place: str) -> str:
    with pytest.raises(StoredJobError) as error:
        take_over(place)
    assert "\n" not in str(error.value)
    assert not list(job_dir("demo").path.parent.glob("*"))
    return str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "../../../precious"},
        {"name": "other"},
        {"name": 5},
        {"name": None},
        {"uid": "../../precious"},
        {"uid": ["a"]},
    ],
)
def test_whose_a_place_is_leads_nowhere_but_to_the_jobs_folder(
    job: JobDir, place: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    told = kept(job, "../newest.json")
    told.write_text(json.dumps({**json.loads(told.read_text()), **changes}))
    refused(place)
    assert list(precious.iterdir()) == []


@pytest.mark.parametrize("key", ["name", "uid"])
def test_a_store_must_name_its_job_completely(job: JobDir, place: str, key: str) -> None:
    told = kept(job, "../newest.json")
    content = json.loads(told.read_text())
    del content[key]
    told.write_text(json.dumps(content))
    told_of = refused(place)
    assert "job/newest.json is damaged" in told_of
    assert key in told_of


def test_a_journal_of_another_id_is_not_this_jobs(job: JobDir, place: str) -> None:
    other = "0" * 32
    folder = kept(job, "")
    told = folder.with_name("newest.json")
    folder.rename(told.with_name(other))
    newest = {"schema_version": 1, "name": "demo", "uid": other, "code": ""}
    told.write_text(json.dumps(newest))
    assert "not all belong to job demo" in refused(place)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # of the sum that gzip ends with
    path.write_bytes(data)


def drop_a_key(path: Path) -> None:
    content = json.loads(path.read_text())
    content.popitem()
    path.write_text(json.dumps({**content, "odd": 1}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", cut),
        ("config.json", drop_a_key),
        ("facts.json", cut),
        ("workdir.tar.gz", cut),
        ("workdir.tar.gz", flip),
    ],
)
def test_what_does_not_change_is_checked_before_the_job_is_claimed(
    job: JobDir, place: str, name: str, damage: Callable[[Path], None]
) -> None:
    damage(kept(job, name))
    assert name in refused(place)
    assert stored(job).newest_claim()[0] == 1


def test_a_claim_may_have_more_fields_than_known_but_not_fewer(job: JobDir, place: str) -> None:
    claim = kept(job, "manager/000001.json")
    content = json.loads(claim.read_text())
    claim.write_text(json.dumps({**content, "new": 1}))
    assert stored(job).newest_claim()[0] == 1
    del content["host"]
    claim.write_text(json.dumps(content))
    assert "manager/000001.json" in refused(place)


@pytest.mark.parametrize("url", ["s3://[::1", "s3://[::1/job"])
def test_what_is_no_url_is_said_in_one_line(job: JobDir, url: str) -> None:
    with pytest.raises(StorageError, match="must be"):
        take_over(url)


def test_an_unknown_event_ends_what_is_used(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
    append(job, 2)
    with contextlib.closing(sqlite3.connect(job.journal)) as journal, journal:
        journal.execute("UPDATE events SET kind = 'Marvel' WHERE seq = 6")
    begun = begin_replication(job)
    assert begun is not None
    assert asyncio.run(begun.finish())
    begun.close()
    elsewhere(monkeypatch, tmp_path)
    told: list[str] = []
    found = take_over(place, told.append)
    assert len(events(found)) == 4 + 1
    (line,) = (line for line in told if line.startswith("warning: "))
    assert "000000000005-000000000006-000002.json.gz: event 6 is not a valid Marvel" in line
    assert str(tmp_path / "other") not in line


def test_of_two_at_once_on_one_machine_the_later_finds_the_job_here(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_checked, second_there = threading.Event(), threading.Event()
    taken, refusals = [], []
    take_journal, find = takeover._restore_journal, find_stored

    def found(url: str) -> object:
        if first_checked.is_set():
            second_there.set()
        return find(url)

    def read_slowly(*args: object) -> object:
        first_checked.set()
        assert second_there.wait(600)
        return take_journal(*args)  # type: ignore[arg-type]

    def second() -> None:
        assert first_checked.wait(600)
        try:
            taken.append(take_over(place))
        except ConfigError as error:
            refusals.append(str(error))

    monkeypatch.setattr(takeover, "find_stored", found)
    monkeypatch.setattr(takeover, "_restore_journal", read_slowly)
    thread = threading.Thread(target=second)
    thread.start()
    here = take_over(place)
    thread.join()
    assert (taken, len(refusals)) == ([], 1)
    assert "spottrain resume demo" in refusals[0]
    assert not here.is_down
    assert stored(here).newest_claim()[0] == 2
    assert not here.path.with_name("demo.1").exists()
