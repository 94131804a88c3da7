from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.stored_jobs import append, copied, stored, submit

from spottrain.eventlog.changed import replace
from spottrain.storage.store import DeniedError
from spottrain.varuna_manager.core.allocation import epoch_of, next_intent
from spottrain.varuna_manager.core.model.parts import LaunchState
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs import follow, replication, segments
from spottrain.varuna_manager.jobs.bucket import FencedError
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import ReplicationStatus, lag_line
from spottrain.varuna_manager.jobs.replication import (
    JournalReplication,
    ReplicationError,
    begin_replication,
    check_here,
    end_replication,
)

LONG_S = 600.0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def job(tmp_path: Path, store: Path) -> JobDir:
    return submit(tmp_path, f"file://{store}")


def begin(job: JobDir, *, durable: bool = False) -> JournalReplication:
    copy = begin_replication(job, durable=durable)
    assert copy is not None
    return copy


@contextlib.asynccontextmanager
async def running(copy: JournalReplication) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(copy.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        copy.close()


def break_store(store: Path) -> None:
    """Let nothing be read or written there, not even by root."""
    store.rename(store.with_name("aside"))
    store.write_text("no folder")


def mend_store(store: Path) -> None:
    store.unlink()
    store.with_name("aside").rename(store)


def test_a_job_whose_checkpoints_are_in_a_folder_is_not_copied(tmp_path: Path) -> None:
    job = submit(tmp_path, str(tmp_path / "folder"))
    assert begin_replication(job) is None
    check_here(job)
    end_replication(job)
    assert lag_line(job, time.time()) == ""


def test_whatever_is_journalled_comes_to_the_store(job: JobDir) -> None:
    async def story() -> None:
        copy = begin(job)
        async with running(copy):
            assert await copy.reach(1, LONG_S)
            for last in (4, 7):
                append(job, 3)
                copy.wake()
                assert await copy.reach(last, LONG_S)
                assert copied(job) == last

    asyncio.run(story())


def test_no_key_and_no_token_is_in_the_store(job: JobDir, store: Path) -> None:
    secrets = ("identity.pem", "cloud", "manager.json")
    (job.path / "identity.pem").write_text("BEGIN PRIVATE KEY")
    asyncio.run(begin(job).finish())
    files = [path for path in store.rglob("*") if path.is_file()]
    assert {"config.json", "facts.json", "workdir.tar.gz", "newest.json"} <= {
        path.name for path in files
    }
    for path in files:
        assert path.name not in secrets
        assert b"PRIVATE KEY" not in path.read_bytes()


def test_the_next_manager_continues_where_the_copy_ended(job: JobDir) -> None:
    asyncio.run(begin(job).finish())
    append(job, 2)
    copy = begin(job)
    assert copy.copied == 1
    assert asyncio.run(copy.finish())
    assert copied(job) == 3


def test_many_small_pieces_become_few(job: JobDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 3)

    async def story() -> None:
        copy = begin(job)
        for _ in range(30):
            await copy.finish()
            append(job, 1)
        copy.close()

    asyncio.run(story())
    assert len(stored(job).segments()) <= 3
    assert copied(job) == 30


def test_a_store_that_is_down_is_reported_once_and_retried_until_it_is_back(
    job: JobDir, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def story() -> None:
        copy = begin(job)
        async with running(copy):
            assert await copy.reach(1, LONG_S)
            break_store(store)
            append(job, 2)
            copy.wake()
            assert not await copy.reach(3, 2.5)
            an_hour_later_s = time.time() + 3600
            told = lag_line(job, an_hour_later_s)
            assert told.startswith("journal copied up to event 1, 2 events behind: ")
            assert lag_line(job, time.time()) == ""
            mend_store(store)
            assert await copy.reach(3, LONG_S)
            assert lag_line(job, an_hour_later_s) == ""

    asyncio.run(story())
    told = [x for x in caplog.messages if x.startswith("the journal cannot be copied")]
    assert len(told) == 1
    assert any("is copied to" in x and "again" in x for x in caplog.messages)
    assert copied(job) == 3


def test_a_manager_that_was_replaced_ends_and_says_who_has_the_job(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "CHECK_S", 0.05)

    async def story() -> None:
        copy = begin(job)
        async with running(copy) as task:
            await copy.reach(1, LONG_S)
            stored(job).claim("another folder", take_over=True)
            with pytest.raises(FencedError, match="taken over"):
                await asyncio.wait_for(task, LONG_S)
            append(job, 1)

    asyncio.run(story())
    assert "taken over" in lag_line(job, time.time())
    assert copied(job) == 1
    for start in (begin, check_here, end_replication):
        with pytest.raises(FencedError, match=r"taken over by .*'spottrain resume file://"):
            start(job)


def test_a_manager_that_was_replaced_may_do_nothing_in_the_cloud(job: JobDir) -> None:
    async def story() -> None:
        copy = begin(job)
        await copy.permit()
        stored(job).claim("another folder", take_over=True)
        with pytest.raises(FencedError):
            await copy.permit()
        copy.close()

    asyncio.run(story())


def test_a_store_that_is_down_keeps_nothing_rented(job: JobDir, store: Path) -> None:
    async def story() -> None:
        copy = begin(job)
        break_store(store)
        await copy.permit()
        copy.close()

    asyncio.run(story())
    check_here(job)


def test_where_the_store_refuses_to_answer_a_launch_waits_for_a_person(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied")

    async def story() -> None:
        copy = begin(job)
        with monkeypatch.context() as patch:
            patch.setattr(io, "open", fails)
            with pytest.raises(DeniedError):
                await copy.permit(1)
            await copy.permit()
        copy.close()

    asyncio.run(story())


def test_vms_of_a_later_manager_are_proof_of_it(job: JobDir, store: Path) -> None:
    copy = begin(job)
    break_store(store)
    copy.check_intents(["intent-0", "intent-1-3", "order-9-9", ""])
    with pytest.raises(FencedError):
        copy.check_intents(["intent-0", "intent-2-0"])
    copy.close()


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_an_intent_tells_its_epoch(epoch: int, number: int) -> None:
    launches = replace(LaunchState(), takeover_epoch=epoch, next_intent=number)
    assert epoch_of(next_intent(replace(State(), launches=launches))) == epoch
    launches = replace(launches, takeover_epoch=0)
    assert epoch_of(next_intent(replace(State(), launches=launches))) == 0


def test_a_durable_copy_has_an_intent_before_it_is_acted_on(job: JobDir) -> None:
    async def story() -> None:
        copy = begin(job, durable=True)
        async with running(copy):
            for last in range(2, 6):
                append(job, 1)
                copy.wake()
                await copy.permit(last)
                assert copied(job) >= last

    asyncio.run(story())


def test_a_durable_copy_is_not_waited_for_without_end(
    job: JobDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replication, "DURABLE_S", 0.05)

    async def story() -> None:
        copy = begin(job, durable=True)  # nothing runs that would copy
        await copy.permit(1)
        copy.close()

    asyncio.run(story())
    assert "event 1 is not in the store yet" in caplog.text


def test_the_end_waits_for_the_last_piece_but_not_without_end(
    job: JobDir, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        copy = begin(job)
        append(job, 3)
        assert await copy.finish()
        append(job, 1)
        break_store(store)
        assert not await copy.finish(0.2)
        copy.close()

    asyncio.run(story())
    assert "1 events are not in" in caplog.text


def test_a_journal_older_than_its_copy_is_not_managed(job: JobDir, tmp_path: Path) -> None:
    shutil.copy(job.journal, tmp_path / "backup")
    append(job, 2)
    asyncio.run(begin(job).finish())
    shutil.copy(tmp_path / "backup", job.journal)
    for left in job.path.glob("journal.sqlite-*"):
        left.unlink()
    with pytest.raises(ReplicationError, match=r"has 1 event, its copy in .* 3"):
        begin(job)


def test_a_job_that_is_ended_is_ended_in_the_store_too(job: JobDir) -> None:
    append(job, 2)
    end_replication(job)
    assert stored(job).is_down()
    assert copied(job) == 3


def test_only_a_copy_that_is_behind_for_long_is_lag_line() -> None:
    note = ReplicationStatus(seq=5, at_s=100.0)
    soon_s, later_s = (
        100.0 + follow.BEHIND_S / 2,
        100.0 + follow.BEHIND_S,
    )
    assert note.line(5, later_s) == ""
    assert note.line(7, soon_s) == ""
    assert note.line(7, later_s) == "journal copied up to event 5, 2 events behind"


def test_the_note_is_plain_json(job: JobDir) -> None:
    asyncio.run(begin(job).finish())
    assert json.loads(job.copy_status.read_text())["seq"] == 1


def test_a_status_that_cannot_be_written_does_not_end_the_copy(job: JobDir) -> None:
    """As on a full disk."""
    job.copy_status.with_suffix(".tmp").mkdir()
    append(job, 3)

    async def story() -> None:
        copy = begin(job)
        async with running(copy) as task:
            assert await copy.reach(4, LONG_S)
            assert not task.done()

    asyncio.run(story())
    assert copied(job) == 4


def test_a_journal_that_is_gone_does_not_end_the_copy(job: JobDir) -> None:
    async def story() -> None:
        copy = begin(job)
        async with running(copy) as task:
            assert await copy.reach(1, LONG_S)
            aside = job.journal.rename(job.path / "aside")
            copy.wake()
            assert not await copy.reach(2, 1.0)
            assert not task.done()
            aside.rename(job.journal)
            append(job, 1)
            assert await copy.reach(2, LONG_S)

    asyncio.run(story())
