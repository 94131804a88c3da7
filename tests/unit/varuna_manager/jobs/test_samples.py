"""Measurements taken from reports and from events."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.varuna_manager.measured_jobs import store
from tests.unit.varuna_manager.story import Story

from spottrain.eventlog.journal import JournalWriteError
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs.measurements import Evaluation, Measurements
from spottrain.varuna_manager.jobs.samples import Sampler, samples_of
from spottrain.wire import messages


class MeasuredStory(Story):
    """One whose measurements are written."""

    def __init__(self) -> None:
        self.measured, self._sampler = store(), Sampler()
        super().__init__()

    def take(self, event: e.Event) -> tuple[c.Command, ...]:
        self.measured.write(samples_of(event))
        return super().take(event)

    def report(self, vm_id: str, report: messages.Report) -> tuple[c.Command, ...]:
        if isinstance(report, messages.Measurement):
            now_s, state = self.now_s, self.state
            self.measured.write(self._sampler.measured(report, now_s, state))
        return super().report(vm_id, report)


@pytest.fixture
def story() -> MeasuredStory:
    """Two mini-batches, a loss, and a third that the survivors adopted."""
    story = MeasuredStory()
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


def test_reports_become_rows(story: MeasuredStory) -> None:
    minibatches = story.measured.minibatches()
    (evaluation,) = story.measured.evaluations()
    assert [row.step for row in minibatches] == [1, 2, 3]
    assert [row.step_s is None for row in minibatches] == [False, False, True]
    assert [row.plan for row in minibatches] == ["2x2", "2x2", "2x2"]
    assert [row.generation for row in minibatches] == [1, 1, 1]
    assert {row.examples for row in minibatches} == {8}
    spent = [row.usd_spent for row in minibatches]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert (evaluation.step, evaluation.name, evaluation.loss) == (0, "heldout", 9.0)


def test_whatever_numbers_and_names_a_worker_reports_do_not_end_the_manager(
    story: MeasuredStory,
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
    samples.append(Evaluation(step=4, name="\ud800", generation=2, at_s=1.0, loss=nan, metrics={}))
    measured = store()
    measured.write(samples)
    (minibatch,), (evaluation,) = measured.minibatches(), measured.evaluations()
    assert (minibatch.step, minibatch.weight) == (4, 0.0)
    assert evaluation.name == "?"


def test_what_is_refused_adds_nothing(story: MeasuredStory, tmp_path: Path) -> None:
    path = tmp_path / "measurements.sqlite"
    with closing(Measurements(path)) as measured:
        with closing(sqlite3.connect(path)) as db:
            db.executescript("DROP TABLE evaluations")
        rows = story.measured.minibatches()
        with pytest.raises(JournalWriteError):
            measured.write([*rows, *story.measured.evaluations()])
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM minibatches").fetchone() == (0,)
