"""Measurements taken from events: as they come, or made up for from an older journal."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs.journal import Journal, JournalWriteError
from spottrain.varuna_manager.jobs.measurements import Evaluation, Minibatch
from spottrain.varuna_manager.jobs.replay.fold import Fold
from spottrain.varuna_manager.jobs.samples import Sampler
from spottrain.wire import messages


@pytest.fixture(scope="module")
def story() -> Story:
    """Two mini-batches, a loss, and a third that the survivors adopted."""
    story = Story(journals_measurements=True)
    story.training("a", "b", "c", "d", steps=2)
    story.report("a", messages.Evaluated(generation=1, step=0, loss=9.0))
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.broken("a", "b", "c")
    story.plan("a", "b")
    story.open()
    story.begin(3)
    adopted = messages.MinibatchAdopted(generation=2, step=3, loss=0.25, grad_norm=2.0)
    story.report("a", adopted)
    return story


def written(path: Path, story: Story) -> Path:
    """Write a story as a manager that journals measurements."""
    sampler, fold = Sampler(), Fold()
    with closing(Journal(path)) as journal:
        for event in story.events:
            fold.take(event)
            journal.append(event, samples=sampler.samples(event, fold.state))
    return path


def rows(path: Path) -> tuple[list[Minibatch], list[Evaluation]]:
    with closing(Journal(path, read_only=True)) as journal:
        measurements = journal.measurements()
        return measurements.minibatches(), measurements.evaluations()


def test_reports_become_rows(story: Story, tmp_path: Path) -> None:
    minibatches, (evaluation,) = rows(written(tmp_path / "j.sqlite", story))
    assert [row.step for row in minibatches] == [1, 2, 3]
    assert [row.step_s is None for row in minibatches] == [False, False, True]
    assert [row.plan for row in minibatches] == ["2x2", "2x2", "2x2"]
    assert [row.generation for row in minibatches] == [1, 1, 1]
    assert {row.examples for row in minibatches} == {8}
    spent = [row.usd_spent for row in minibatches]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert (evaluation.step, evaluation.name, evaluation.loss) == (0, "heldout", 9.0)


def test_a_copied_journal_has_the_measurements_of_its_events(
    story: Story, tmp_path: Path
) -> None:
    source, copy = written(tmp_path / "a.sqlite", story), tmp_path / "b.sqlite"
    last = story.events.pop()
    with closing(Journal(source, read_only=True)) as journal:
        events = journal.rows(1, len(story.events))
    with closing(Journal(copy)) as journal:
        journal.take_over(events)
        journal.append(last)
    assert rows(copy) == rows(source)
    with closing(Journal(copy)) as journal:
        journal.measure()
        journal.measure()
    assert rows(copy) == rows(source)
    story.events.append(last)


def test_whatever_numbers_and_names_a_worker_reports_do_not_end_the_manager(
    story: Story, tmp_path: Path
) -> None:
    """Also a loss whose weight is not a number, as of a mask without elements."""
    nan, odd = float("nan"), messages.Metric(name="\ud800", value=float("inf"))
    sane = messages.MinibatchCommitted(
        generation=2,
        slot=0,
        step=4,
        sections=(0,),
        loss=nan,
        grad_norm=nan,
        step_s=nan,
        peak_bytes=10**30,
        weight=nan,
        learning_rate=nan,
        metrics=(odd,),
    )
    reports = (replace(sane, step=10**30), replace(sane, step=-1), sane)
    samples = [
        sample
        for report in reports
        for sample in Sampler().measured(report, story.now_s, story.state)
    ]
    samples.append(
        Evaluation(step=4, name="\ud800", generation=2, at_s=1.0, loss=nan, metrics={})
    )
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.append(*story.events, samples=samples)
    (minibatch,), (evaluation,) = rows(tmp_path / "journal.sqlite")
    assert (minibatch.step, minibatch.weight) == (4, 0.0)
    assert evaluation.name == "?"


def test_what_is_not_journalled_is_not_measured(story: Story, tmp_path: Path) -> None:
    path = written(tmp_path / "j.sqlite", story)
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DELETE FROM minibatches WHERE step = 3")
        db.executescript("DROP TABLE evaluations")
    with closing(Journal(path)) as journal:
        before = journal.last_seq()
        late = Minibatch(
            step=3,
            generation=1,
            at_s=1.0,
            loss=1.0,
            grad_norm=1.0,
            step_s=0.1,
            examples=8,
            plan="1x1",
            usd_spent=1.0,
        )
        with pytest.raises(JournalWriteError):
            journal.append(
                story.events[-1],
                samples=[
                    late,
                    Evaluation(step=3, name="", generation=1, at_s=0, loss=0),
                ],
            )
        assert journal.last_seq() == before
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT max(step) FROM minibatches").fetchone() == (2,)
