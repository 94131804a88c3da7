from __future__ import annotations

import asyncio
import json
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.varuna_manager.stored_jobs import (
    append,
    copied,
    copy,
    elsewhere,
    events,
    stored,
    submit,
    take_over,
)

from spottrain.errors import ConfigError
from spottrain.manifest import hash_file
from spottrain.varuna_manager.core.model.events import (
    CodeUpdated,
    JobMoved,
    StopRequested,
)
from spottrain.varuna_manager.jobs.bucket import (
    FencedError,
    StoredJob,
    StoredJobError,
)
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements, Minibatch
from spottrain.varuna_manager.jobs.replication import backfill, begin_replication
from spottrain.varuna_manager.jobs.trust import digest_of
from spottrain.varuna_manager.launch import takeover
from spottrain.varuna_manager.launch.workdir import pack, packed_files


@pytest.fixture
def job(tmp_path: Path, place: str) -> JobDir:
    """A job of four events that is copied, as far as this machine is concerned."""
    job = submit(tmp_path, place)
    append(job, 3)
    copy(job)
    return job


def segments(job: JobDir) -> list[Path]:
    folder = Path(stored(job).url.removeprefix("file://"))
    return sorted(folder.glob("job/*/journal/*"))


@pytest.mark.parametrize("end", ["", "/", "/job", "/job/"])
def test_another_machine_has_the_whole_job(
    job: JobDir,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    before = events(job)
    elsewhere(monkeypatch, tmp_path)
    told: list[str] = []
    found = takeover.take_over(place + end, told.append, trusted=digest_of(job))
    assert found == job_dir("demo")
    assert found.path != job.path
    assert (found.config(), found.facts()) == (job.config(), job.facts())
    assert found.workdir.read_bytes() == job.workdir.read_bytes()
    *same, moved = events(found)
    assert same == before
    assert isinstance(moved, JobMoved)
    assert moved.epoch == 2
    assert copied(found) == 5
    assert told[0].startswith(f"4 events found in {place}")
    assert "0 of 5 mini-batches" in told[1]
    assert "keys are on the other machine" in told[2]
    copy(found)


EVIL = {"PYTHONPATH": "evil", "TERM": "\x1b]0;x\x07"}


def test_nothing_is_taken_over_that_the_user_has_not_seen(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write the store could run code on the machine that resumes."""
    (stored_config,) = (tmp_path / "store").glob("job/*/config.json")
    config = json.loads(stored_config.read_bytes())
    config["env"] = EVIL
    config["notify"]["command"] = ["/bin/sh", "-c", "echo taken"]
    launched = digest_of(job)
    stored_config.write_text(json.dumps(config))
    elsewhere(monkeypatch, tmp_path)

    told: list[str] = []
    with pytest.raises(ConfigError, match=r"--trust [0-9a-f]{32}'$") as refused:
        takeover.take_over(place, told.append)
    assert "  env: PYTHONPATH=evil, TERM=" in told
    assert "  notify.command: /bin/sh -c 'echo taken'" in told
    assert "  code: train:job in workdir.tar.gz" in told
    with pytest.raises(ConfigError, match=f"not {launched}: it was changed since"):
        takeover.take_over(place, told.append, trusted=launched)
    assert not list((tmp_path / "other" / "jobs").iterdir())
    assert stored(job).newest_claim()[0] == 1  # the manager there goes on

    number = str(refused.value).rpartition("--trust ")[2].strip("'")
    assert takeover.take_over(place, told.append, trusted=number).config().env == EVIL


@pytest.mark.parametrize("name", ["facts.json", "workdir.tar.gz"])
def test_code_and_facts_count_too(
    job: JobDir,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    (path,) = (tmp_path / "store").glob(f"job/*/{name}")
    content = path.read_bytes()
    path.write_bytes(content + b"\n" * (name != "workdir.tar.gz"))
    if name == "workdir.tar.gz":
        (tmp_path / "code" / "train.py").write_text("evil")
        pack(tmp_path / "code", packed_files(tmp_path / "code"), path)
    elsewhere(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="it was changed since"):
        takeover.take_over(place, lambda _: None, trusted=digest_of(job))


def test_a_machine_that_has_the_job_knows_what_it_runs(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    elsewhere(monkeypatch, tmp_path)
    copy(take_over(place))
    monkeypatch.setenv("SPOTTRAIN_HOME", str(home))
    assert takeover.take_over(place, lambda _: None) == job


def test_what_was_measured_moves_too(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Minibatch(
        step=1,
        generation=1,
        at_s=1.0,
        loss=0.5,
        grad_norm=1.0,
        step_s=0.1,
        examples=8,
        plan="1x1",
        usd_spent=0.0,
    )
    with closing(Measurements(job.measurements)) as measured:
        measured.write([row])
    copy(job)
    elsewhere(monkeypatch, tmp_path)
    found = take_over(place)
    with closing(Measurements(found.measurements)) as measured:
        copying = begin_replication(found)
        assert copying is not None
        asyncio.run(backfill(measured, copying))
        copying.close()
        assert measured.minibatches() == [row]


def test_the_machine_before_has_to_let_go(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = begin_replication(job)
    assert old is not None
    elsewhere(monkeypatch, tmp_path)
    found = take_over(place)
    append(job, 2, "late")

    async def story() -> None:
        assert old is not None
        with pytest.raises(FencedError):
            await old.permit()
        with pytest.raises(FencedError):
            await old.finish()
        old.close()

    asyncio.run(story())
    with pytest.raises(FencedError):
        begin_replication(job)
    assert copied(found) == 5


def test_the_machine_before_can_have_it_back(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = job.path.parent
    elsewhere(monkeypatch, tmp_path)
    copy(take_over(place))
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
    again = take_over(place)
    assert again.path == job.path
    assert JobDir(home / "demo.1").is_down
    assert [e.epoch for e in events(again) if isinstance(e, JobMoved)] == [2, 4]
    copy(again)


def test_a_job_without_a_newer_copy_is_resumed_by_name(job: JobDir, place: str) -> None:
    with pytest.raises(ConfigError, match="continue it with 'spottrain resume demo'"):
        take_over(place)
    assert copied(job) == 4


def test_another_job_of_that_name_is_not_overwritten(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(monkeypatch, tmp_path)
    other = submit(tmp_path, f"file://{tmp_path}/other-store")
    with pytest.raises(ConfigError, match="'spottrain resume demo'"):
        take_over(place)
    other.mark_down()
    assert take_over(place) == other
    assert JobDir(other.path.with_name("demo.1")).is_down


def test_a_job_that_is_over_is_not_taken_over(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(job).mark_down()
    elsewhere(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="has ended; launch it again"):
        take_over(place)
    assert not job_dir("demo").path.exists()


def test_a_stopped_job_is_resumed_on_another_machine(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(job.journal)
    journal.record(StopRequested(at_s=3.0, by="a person", now=True))
    journal.close()
    copy(job)
    elsewhere(monkeypatch, tmp_path)
    found = take_over(place)
    outcome = read_state(found).outcome
    assert outcome is not None
    assert outcome.kind == "stopped"


def test_a_place_without_a_job_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no job found; give the"):
        take_over(f"file://{tmp_path}/nothing")


def test_a_job_that_was_never_copied_is_not_there(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(tmp_path, place)
    elsewhere(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(place)):
        take_over(place)


def test_what_is_damaged_is_named_and_the_rest_used(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(job, 2)
    copy(job)
    append(job, 2)
    copy(job)
    half = segments(job)[1]
    half.write_bytes(half.read_bytes()[:-5])
    elsewhere(monkeypatch, tmp_path)
    told: list[str] = []
    found = take_over(place, told.append)
    assert len(events(found)) == 4 + 1
    warnings = [line for line in told if line.startswith("warning: ")]
    assert half.name in warnings[0]
    assert "events 5 to 6" in warnings[1]
    assert len(warnings) == 2
    copy(found)


def test_a_journal_without_a_beginning_ends_no_manager_that_works(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = begin_replication(job)
    assert old is not None
    for segment in segments(job):
        segment.write_bytes(b"")
    elsewhere(monkeypatch, tmp_path)
    with pytest.raises(StoredJobError, match=r"cannot be used: .*"):
        take_over(place)
    assert not list((tmp_path / "other" / "jobs").iterdir())
    asyncio.run(old.permit())
    old.close()


def test_a_store_of_a_newer_version_is_refused(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = tmp_path / "store" / "job" / "newest.json"
    newest.write_text('{"schema_version": 9, "uid": "x", "name": "demo"}')
    elsewhere(monkeypatch, tmp_path)
    with pytest.raises(StoredJobError, match="schema_version must be 1: got 9"):
        take_over(place)


def test_of_two_who_take_a_job_over_one_has_it(job: JobDir, place: str) -> None:
    one, other = stored(job), StoredJob(place, stored(job).uid)
    epoch, _ = one.newest_claim()
    assert one.claim("one", take_over=True) == epoch + 1
    with pytest.raises(FencedError):
        one.claim("two")
    assert other.claim("two", take_over=True) == epoch + 2
    with pytest.raises(FencedError):
        one.check(epoch + 1)
    other.check(epoch + 2)


def test_the_folder_left_behind_can_be_removed(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(job.path)
    elsewhere(monkeypatch, tmp_path)
    assert copied(take_over(place)) == 5


@pytest.mark.parametrize("is_published", [True, False])
def test_updated_code_goes_with_the_job(
    job: JobDir,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_published: bool,
) -> None:
    workdir = tmp_path / "mended"
    workdir.mkdir()
    (workdir / "own.py").write_text("mended = True")
    package = job.workdir if is_published else tmp_path / "package"
    pack(workdir, packed_files(workdir), package)
    update = CodeUpdated(at_s=2000.0, by="me", sha256=hash_file(package), facts=job.facts())
    with closing(Journal(job.journal)) as journal:
        journal.record(update)
    copy(job)
    elsewhere(monkeypatch, tmp_path)
    told: list[str] = []
    found = take_over(place, told.append)
    assert found.workdir.read_bytes() == job.workdir.read_bytes()
    assert read_state(found).code_sha256 == update.sha256
    warned = any(line.startswith("warning: the code in the store") for line in told)
    assert warned != is_published
