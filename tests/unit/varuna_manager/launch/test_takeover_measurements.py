"""A takeover has all events at once; what was measured comes while the job runs."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.unit.varuna_manager.stored_jobs import copy, stored, submit, take_over
from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs import replication, segments
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Cursor, Measurements, Sample
from spottrain.varuna_manager.jobs.replication import (
    JournalReplication,
    backfill,
    begin_replication,
)
from spottrain.varuna_manager.jobs.samples import Sampler, samples_of
from spottrain.varuna_manager.jobs.vm_history import vm_lives
from spottrain.wire import messages

STEPS = 4
"""In a block of measurements."""


@pytest.fixture
def place(place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(replication, "STEPS", STEPS)
    monkeypatch.setattr(replication, "_PART", 2)
    return place


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
        at += samples_of(event)
        return commands

    def report(self, vm_id: str, report: messages.Report) -> tuple[c.Command, ...]:
        if isinstance(report, messages.Measurement):
            samples = self._sampler.measured(report, self.now_s, self.state)
            self.samples.setdefault(len(self.steps), []).extend(samples)
        return super().report(vm_id, report)


def told(uid: str) -> MeasuredStory:
    """Training that is evaluated, loses a VM, repeats two mini-batches and goes on."""
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
    story.tell(e.VmHeard, vm_id="a")
    story.tell(e.VmLost, vm_id="c", reason="gone")
    return story


@pytest.fixture
def job(tmp_path: Path, place: str) -> JobDir:
    """A job that was copied in its middle and at its end."""
    job = submit(tmp_path, place)
    story = told(uid_of(job))
    job.journal.unlink()
    with (
        closing(Journal(job.journal)) as journal,
        closing(Measurements(job.measurements)) as measured,
    ):
        for at, one in enumerate(story.steps):
            measured.write(story.samples.get(at, ()))
            journal.append(one)
            if at in (len(story.steps) // 2, len(story.steps) - 1):
                copy(job)
    return job


def begun(job: JobDir) -> JournalReplication:
    copying = begin_replication(job)
    assert copying is not None
    return copying


def files(job: JobDir, kind: str) -> list[Path]:
    return sorted(Path(stored(job).url.removeprefix("file://")).glob(f"job/*/{kind}/*"))


@pytest.fixture
def other(job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """The job on another machine."""
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "other"))
    return take_over(place)


def contents(job: JobDir) -> dict[str, Any]:
    """Return what a job's files say."""
    with (
        closing(Journal(job.journal, read_only=True)) as journal,
        closing(Measurements(job.measurements, read_only=True)) as measured,
    ):
        return {
            "rows": journal.rows(1, 1 << 60),
            "minibatches": measured.minibatches(),
            "evaluations": measured.evaluations(),
            "lives": [(life.vm_id, life.from_s) for life in vm_lives(journal)],
        }


def test_a_takeover_has_all_events_and_says_what_is_to_come(
    job: JobDir, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(job)
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "other"))
    said: list[str] = []
    after = contents(take_over(place, said.append))
    assert any("follow while the job runs" in line for line in said)
    *rows, moved = after["rows"]
    assert (rows, moved.kind) == (before["rows"], "JobMoved")
    assert after["evaluations"] == before["evaluations"], "they are told by events"
    assert after["minibatches"] == []


@pytest.mark.parametrize("parts", range(0, 12, 2))
def test_measurements_are_filled_in_whenever_a_manager_dies(
    job: JobDir, other: JobDir, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, left = contents(job), parts

    class Dying(Measurements):
        def fill(self, *part: Any, **more: Any) -> None:
            nonlocal left
            if not left:
                raise InterruptedError
            left -= 1
            super().fill(*part, **more)

    copying = begun(other)
    with (
        closing(Dying(other.measurements)) as measured,
        contextlib.suppress(InterruptedError),
    ):
        asyncio.run(backfill(measured, copying))
    with closing(Measurements(other.measurements)) as again:
        asyncio.run(backfill(again, copying))
        assert not again.pending()
    copying.close()
    after = contents(other)
    for what in ("minibatches", "evaluations", "lives"):
        assert after[what] == before[what]


def test_a_damaged_block_is_passed_over(
    job: JobDir, other: JobDir, caplog: pytest.LogCaptureFixture
) -> None:
    first = [one for one in files(job, "measurements") if one.name.startswith("000000000000-")]
    for damaged in first:
        damaged.write_bytes(damaged.read_bytes()[:-9])
    copying = begun(other)
    with closing(Measurements(other.measurements)) as measured:
        asyncio.run(backfill(measured, copying))
        assert not measured.pending()
    copying.close()
    assert f"{first[-1].name} is damaged" in caplog.text
    rows = [row for row in contents(job)["minibatches"] if row.step >= STEPS]
    assert contents(other)["minibatches"] == rows


def test_followers_of_measurements_read_them_all_in_the_end(other: JobDir) -> None:
    copying = begun(other)
    with closing(Measurements(other.measurements)) as measured:
        page = measured.changes(Cursor())
        asyncio.run(backfill(measured, copying))
        again = measured.changes(page.cursor)
        assert again.rewound_to == 0
        evaluated = [row.step for row in measured.evaluations()]
        steps = [row.step for row in again.rows]
        assert steps == sorted([*range(1, 13), *evaluated])
    copying.close()


def test_many_segments_become_one_that_a_takeover_reads(
    job: JobDir,
    other: JobDir,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(files(job, "journal")) == 3
    monkeypatch.setattr(segments, "MAX_SEGMENTS", 3)
    copying = begun(other)
    with closing(Journal(other.journal)) as journal:
        journal.record(e.VmHeard(at_s=2000.0, vm_id="a"))
        last = journal.last_seq()
    assert asyncio.run(copying.finish())
    copying.close()
    (whole,) = files(job, "journal")
    assert whole.name.startswith(f"{1:012d}-{last:012d}-")
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "third"))
    assert contents(take_over(place))["rows"][:-1] == contents(other)["rows"]
