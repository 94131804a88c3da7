"""A takeover begins with a snapshot; the rest comes while the job runs."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.varuna_manager.stored_jobs import stored, submit, take_over
from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs import blocks, bucket, segments
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.journal import Journal, JournalError
from spottrain.varuna_manager.jobs.measurements import Cursor, Sample
from spottrain.varuna_manager.jobs.replay.fold import Step
from spottrain.varuna_manager.jobs.replication import (
    JournalReplication,
    begin_replication,
    fill_in,
)
from spottrain.varuna_manager.jobs.samples import Sampler
from spottrain.varuna_manager.jobs.segments import Segment
from spottrain.varuna_manager.jobs.snapshots import CopiedSnapshot, that_count
from spottrain.varuna_manager.jobs.vm_history import vm_lives
from spottrain.varuna_manager.reporting import history
from spottrain.varuna_manager.reporting.history import replay
from spottrain.wire import messages

STEPS = 4
"""In a block of measurements."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(blocks, "STEPS", STEPS)
    monkeypatch.setattr(bucket, "_PART", 2)
    return f"file://{tmp_path}/store"


class MeasuredStory(Story):
    """One that keeps what is measured."""

    def __init__(self, **settings: Any) -> None:
        self.samples: dict[int, list[Sample]] = {}
        """By the number of steps before."""
        self._sampler = Sampler()
        super().__init__(**settings)

    def take(self, event: e.Event) -> tuple[c.Command, ...]:
        at = self.samples.setdefault(len(self.steps), [])
        commands = super().take(event)
        at += self._sampler.samples(event, self.state)
        return commands

    def report(self, vm_id: str, report: messages.Report) -> tuple[c.Command, ...]:
        if isinstance(report, messages.Measurement):
            samples = self._sampler.measured(report, self.now_s, self.state)
            self.samples.setdefault(len(self.steps), []).extend(samples)
        return super().report(vm_id, report)


def told(uid: str) -> tuple[MeasuredStory, int]:
    """Training that is evaluated, loses a VM, repeats two mini-batches and goes on; and how
    many events had happened when a snapshot was saved."""
    story = MeasuredStory(uid=uid)
    story.training("a", "b", "c", "d", steps=7)
    for at in (5, 7):
        report = messages.Evaluated(
            generation=1, step=at, name="held-out", loss=float(at), metrics=()
        )
        story.fact("a", report)
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.broken("a", "b", "c")
    story.plan("a", "b")
    story.open()
    story.begin(5)
    for number in range(6, 13):
        story.now_s += 1.0
        story.commit(number)
    saved = len(story.steps)
    story.tell(e.VmHeard, vm_id="a")
    story.tell(e.VmLost, vm_id="c", reason="gone")
    return story, saved


@pytest.fixture
def job(tmp_path: Path, place: str) -> JobDir:
    """A job that was copied before and after its manager had saved a snapshot."""
    job = submit(tmp_path, place)
    story, saved = told(uid_of(job))
    job.journal.unlink()
    with closing(Journal(job.journal)) as journal:
        for first, end in ((0, saved - 3), (saved - 3, len(story.steps))):
            for at in range(first, end):
                samples = story.samples.get(at, [])
                last = journal.append(story.steps[at], samples=samples)
                if last == saved:
                    state, past = replay(journal)
                    journal.save_snapshot(last, state, past.snapshot())
            copy(job)
    return job


def begun(job: JobDir) -> JournalReplication:
    copying = begin_replication(job)
    assert copying is not None
    return copying


def copy(job: JobDir) -> None:
    copying = begun(job)
    assert asyncio.run(copying.finish())
    copying.close()


def files(job: JobDir, kind: str) -> list[Path]:
    return sorted(Path(stored(job).url.removeprefix("file://")).glob(f"job/*/{kind}/*"))


@pytest.fixture
def other(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> JobDir:
    """The job on another machine."""
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "other"))
    return take_over(place)


def contents(job: JobDir) -> dict[str, Any]:
    """Return what a journal says."""
    with closing(Journal(job.journal, read_only=True)) as journal:
        measured = journal.measurements()
        return {
            "rows": journal.rows(1, 1 << 60),
            "minibatches": measured.minibatches(),
            "evaluations": measured.evaluations(),
            "replay": replay(journal),
            "lives": [(life.vm_id, life.from_s) for life in vm_lives(journal)],
        }


def test_a_takeover_reads_nothing_from_before_the_snapshot(
    job: JobDir,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = contents(job)
    first, *_ = files(job, "journal")
    first.unlink()
    for block in files(job, "measurements")[:-1]:
        block.unlink()
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "other"))
    said: list[str] = []
    found = take_over(place, said.append)
    assert any("still in the job's bucket; they follow" in line for line in said)
    with closing(Journal(found.journal, read_only=True)) as journal:
        moved = journal.last_seq()
        assert journal.replay(moved - 1) == before["replay"][0]
        rows = journal.rows(2, moved - 1)
        assert before["rows"][-len(rows) :] == rows
        assert 1 < len(rows) < moved // 2
        some = journal.measurements().minibatches()
        assert before["minibatches"][-len(some) :] == some
        assert 0 < len(some) <= STEPS
        with pytest.raises(JournalError, match="still in the job's bucket"):
            journal.replay(5)
        with pytest.raises(JournalError, match="bucket"):
            vm_lives(journal)


@pytest.mark.parametrize("parts", [0, 1, 7, 19, 20, 21, 23, 26, 28])
def test_the_rest_is_filled_in_whenever_a_manager_dies(
    job: JobDir, other: JobDir, parts: int
) -> None:
    before = contents(job)
    copying = begun(other)

    async def story() -> None:
        with closing(Journal(other.journal)) as journal:
            absent = journal.absent()
            assert absent is not None
            left = parts
            async for part in copying.past(absent):
                if not left:
                    break
                left -= 1
                journal.fill(*part)
        with closing(Journal(other.journal)) as journal:
            assert await fill_in(journal, copying)
            assert journal.absent() is None

    asyncio.run(story())
    copying.close()
    after = contents(other)
    *rows, moved = after["rows"]
    assert (rows, moved.kind) == (before["rows"], "JobMoved")
    for what in ("minibatches", "evaluations", "lives"):
        assert after[what] == before[what]


def test_followers_of_measurements_read_them_all_in_the_end(other: JobDir) -> None:
    with closing(Journal(other.journal, read_only=True)) as journal:
        page = journal.measurements().changes(Cursor())
    copying = begun(other)

    async def story() -> None:
        with closing(Journal(other.journal)) as journal:
            await fill_in(journal, copying)
            again = journal.measurements().changes(page.cursor)
            assert again.rewound_to == 0
            assert [row.step for row in again.rows] == sorted(
                [
                    *range(1, 13),
                    *(row.step for row in journal.measurements().evaluations()),
                ]
            )

    asyncio.run(story())
    copying.close()


def test_segments_are_merged_again_once_the_journal_is_whole(
    job: JobDir,
    other: JobDir,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "FANOUT", 2)
    copying = begun(other)
    assert asyncio.run(copying.finish())
    assert len(files(job, "journal")) == 3

    async def story() -> None:
        with closing(Journal(other.journal)) as journal:
            await fill_in(journal, copying)
            journal.append(e.VmHeard(at_s=2000.0, vm_id="a"))
        await copying.finish()

    asyncio.run(story())
    copying.close()
    assert len(files(job, "journal")) < 4
    for path in files(job, "snapshots"):
        path.unlink()
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "third"))
    found = take_over(place)
    assert contents(found)["rows"][:-1] == contents(other)["rows"]


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _change(path: Path, **changes: Any) -> None:
    what = json.loads(gzip.decompress(path.read_bytes()))
    seq, state, history = what["snapshot"]
    kept = {"seq": seq, "state": state, "history": history} | changes
    what["snapshot"] = list(kept.values())
    path.write_bytes(gzip.compress(json.dumps(what).encode()))


def _of_the_future(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"schema_version": 9}'))


def _of_another_state(path: Path) -> None:
    _change(path, state='{"format":1,"state":{"moon":1}}')


def _of_another_event(path: Path) -> None:
    _change(path, seq=3)


def _beyond_the_journal(path: Path) -> None:
    path.rename(path.with_name(CopiedSnapshot(9999, 1).name))


def _fenced(path: Path) -> None:
    path.rename(path.with_name(CopiedSnapshot(int(path.name[:12]), 0).name))


@pytest.mark.parametrize(
    "spoil",
    [
        _damage,
        _of_the_future,
        _of_another_state,
        _of_another_event,
        _beyond_the_journal,
        _fenced,
    ],
)
def test_a_snapshot_that_cannot_be_used_is_passed_over(
    job: JobDir,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path], None],
) -> None:
    before = contents(job)
    (path,) = files(job, "snapshots")
    spoil(path)
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "other"))
    after = contents(take_over(place))
    assert after["rows"][:-1] == before["rows"]
    assert after["minibatches"] == before["minibatches"]
    assert after["evaluations"] == before["evaluations"]


def test_a_journal_in_part_is_read_by_other_code_from_the_next_whole_state(
    other: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Journal(other.journal)) as journal:
        before = journal.replay()
        event = e.ManagerStarted(at_s=3000.0, software_version="1.0", pid=1)
        after, commands = step.step(before, event)
        journal.append(Step(before, event, after, commands))
        monkeypatch.setattr(history, "_version", lambda: "other code")
        assert not history.can_begin_with_snapshot(journal)
        assert replay(journal)[0] == journal.replay() == after


def test_a_snapshot_of_a_manager_that_was_replaced_does_not_count() -> None:
    parts = [Segment(1, 10, 1), Segment(11, 20, 1), Segment(15, 16, 2)]
    counts = [CopiedSnapshot(14, 1), CopiedSnapshot(16, 2)]
    late = [CopiedSnapshot(15, 1), CopiedSnapshot(20, 1)]
    assert that_count([*counts, *late], parts) == counts[::-1]


def test_the_store_keeps_two_snapshots(job: JobDir) -> None:
    for _ in range(3):
        with closing(Journal(job.journal)) as journal:
            journal.append(e.VmHeard(at_s=2000.0, vm_id="a"))
            state, past = replay(journal)
            journal.save_snapshot(journal.last_seq(), state, past.snapshot())
        copy(job)
    last = contents(job)["rows"][-1].seq
    names = [int(path.name[:12]) for path in files(job, "snapshots")]
    assert names == [last - 1, last]
