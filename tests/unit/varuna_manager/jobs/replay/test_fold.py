"""A journal leads to the same state, whether it has measurements among its events or not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NoReturn

import pytest
from tests.unit.varuna_manager.story import Story
from tests.view import View, changed

from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.journal import Journal, JournalError
from spottrain.varuna_manager.jobs.replay.fold import Fold, Step, asked_for
from spottrain.varuna_manager.reporting.documents import report
from spottrain.varuna_manager.reporting.history import JobHistory, replay
from spottrain.wire import messages

FOUR = ("a", "b", "c", "d")


def told(*, journals_measurements: bool) -> Story:
    """Training that loses a VM, goes on with the others and is not finite in the end."""
    story = Story(journals_measurements=journals_measurements)
    story.training(*FOUR)
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.broken("a", "b", "c")
    story.plan("a", "b")
    story.open()
    story.begin(2)
    for number in range(3, 6):
        story.now_s += 1.0
        story.commit(number, skipped="" if number < 5 else "loss")
    return story


def comparable(state: State) -> State:
    """Return a state without the numbers of reports."""
    vms = {k: replace(vm, reports_received=0) for k, vm in View(state).vms.items()}
    return changed(state, vms=vms)


def fold(story: Story) -> State:
    result = Fold()
    for event in story.events:
        result.take(event)
    return result.state


def test_measurements_that_were_journalled_lead_where_progress_does() -> None:
    now, then = told(journals_measurements=False), told(journals_measurements=True)
    kinds = {type(event) for event in then.events}
    assert e.ProgressMade not in kinds
    committed = messages.MinibatchCommitted
    assert not any(
        isinstance(event, e.ReportReceived) and isinstance(event.report, committed)
        for event in now.events
    )
    assert fold(now) == now.state
    assert comparable(fold(then)) == comparable(now.state)
    assert View(fold(then)).progress.nonfinite_steps == 1


def test_a_measurement_that_was_journalled_twice_counts_once() -> None:
    story = told(journals_measurements=True)
    once = fold(story)
    story.events.append(story.events[-1])
    assert comparable(fold(story)) == comparable(once)


# --- Nothing is decided twice ---------------------------------------------------------


@pytest.fixture
def no_decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let nothing be decided any more."""

    def step(state: State, event: e.Event) -> NoReturn:
        raise AssertionError(f"a replay decides on {event}")

    with monkeypatch.context() as patched:
        patched.setattr("spottrain.varuna_manager.core.step.step", step)
        yield


@pytest.fixture(scope="module")
def story() -> Story:
    return told(journals_measurements=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def news(journal: Journal) -> list[str]:
    return [line for _, _, line in journal.story() if line]


@pytest.mark.parametrize("undecided", [0, 1, 20])
def test_a_journal_is_replayed_without_a_decision(
    story: Story, path: Path, undecided: int, request: pytest.FixtureRequest
) -> None:
    with closing(Journal(path)) as journal:
        journal.append(*story.events[:undecided])
        journal.append(*story.steps[undecided:])
        said = news(journal)
        request.getfixturevalue("no_decisions")
        assert journal.replay() == story.state
        if not undecided:
            state, history = replay(journal)
            assert state == story.state
            assert report(state, history, True, state.now_s)["steps"] == 100
            assert news(journal) == said
    changed = [s.after.last_news for s in story.steps if s.after.last_news]
    assert said == [line for line, _ in groupby(changed)]


def test_the_story_is_the_same_with_and_without_decisions(
    story: Story, tmp_path: Path
) -> None:
    stories = []
    for number, cut in enumerate((0, 7, 15, len(story.events))):
        with closing(Journal(tmp_path / f"{number}.sqlite")) as journal:
            journal.append(*story.steps[:cut])
            journal.append(*story.events[cut:])
            stories.append(list(journal.story()))
            assert journal.replay() == story.state
    assert all(one == stories[0] for one in stories)


def test_facts_that_wait_for_a_manager_are_decided_on_once(
    story: Story, path: Path, request: pytest.FixtureRequest
) -> None:
    with closing(Journal(path)) as journal:
        journal.append(*story.steps)
        journal.append(e.StopRequested(at_s=story.now_s, by="a person"))
        before = journal.replay()
        assert before.phase is JobPhase.ENDING, "readers see what will come of it"
        event = e.TimerFired(at_s=story.now_s)
        after, commands = step.step(before, event)
        journal.append(Step(before, event, after, commands))
        request.getfixturevalue("no_decisions")
        assert journal.replay() == after


def test_readers_begin_with_the_snapshot(
    story: Story, path: Path, no_decisions: None
) -> None:
    half = len(story.steps) // 2
    with closing(Journal(path)) as journal:
        journal.append(*story.steps[:half])
        state, history = replay(journal)
        journal.save_snapshot(half, state, history.snapshot())
        journal.append(*story.steps[half:])
        whole = JobHistory()
        for one in story.steps:
            whole.note(one.before, one.event, one.after)
        assert replay(journal) == (story.state, whole)
        assert journal.replay(half - 1) == story.steps[half - 2].after
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE events SET decision = '{}' WHERE seq <= ?", (half,))
    with closing(Journal(path, read_only=True)) as journal:
        assert replay(journal) == (story.state, whole), "they are not read"


@pytest.mark.parametrize(
    "state", ["{}", '{"format":9,"state":{}}', '{"format":1,"state":{"moon":1}}']
)
def test_a_snapshot_of_another_version_is_not_used(
    story: Story, path: Path, state: str
) -> None:
    with closing(Journal(path)) as journal:
        journal.append(*story.steps)
        journal.save_snapshot(len(story.steps), State(), '["another version", {}]')
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE snapshots SET state = ?", (state,))
    with closing(Journal(path, read_only=True)) as journal:
        assert journal.replay() == replay(journal)[0] == story.state


@pytest.mark.parametrize("history", ["", "[", "[]", "0", '["\0'])
def test_a_damaged_snapshot_is_not_used(story: Story, path: Path, history: str) -> None:
    half = len(story.steps) // 2
    with closing(Journal(path)) as journal:
        journal.append(*story.steps)
        whole = replay(journal)
        journal.save_snapshot(half, story.steps[half - 1].after, history)
        assert replay(journal) == whole


@pytest.mark.parametrize(
    ("decision", "says"),
    [
        ('{"format":9}', "event 3: .* newer version"),
        ('{"format":1,"changes":{"moon":["=",1]}}', "State has no field moon"),
        ('{"format":2,"changes":{"vms":["=",{}]}}', "State has no field vms"),
        ('{"format":1,"changes":["=",1]}', "damaged"),
        ("{", "damaged"),
    ],
)
def test_a_decision_of_another_version_is_refused(
    story: Story, path: Path, decision: str, says: str
) -> None:
    with closing(Journal(path)) as journal:
        journal.append(*story.steps)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE events SET decision = ? WHERE seq = 3", (decision,))
    with (
        closing(Journal(path, read_only=True)) as journal,
        pytest.raises(JournalError, match=says),
    ):
        journal.replay()


def test_a_decision_names_what_it_asks_for(story: Story) -> None:
    asked = [one for s in story.steps for one in asked_for(s.commands)]
    kinds = {one[0] for one in asked}
    assert {"IntendLaunch", "LaunchVms", "StartAgent", "ComputePlan", "Send"} <= kinds
    assert ["Send", "RunGeneration", "1", *FOUR] in asked
