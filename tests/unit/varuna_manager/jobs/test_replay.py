"""A job's journal leads where its manager was, and nothing is decided again."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
from tests.unit.varuna_manager.story import FOUR, Story

from spottrain.eventlog.journal import JournalError
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.reporting.documents import report
from spottrain.varuna_manager.reporting.history import JobHistory, replay


def told() -> Story:
    """Training that loses a VM, goes on with the others and is not finite in the end."""
    story = Story()
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
    return told()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def test_a_journal_is_replayed_without_a_decision(
    story: Story, path: Path, no_decisions: None
) -> None:
    with closing(Journal(path)) as journal:
        journal.append(*story.steps)
        assert journal.replay() == story.state
        state, history = replay(journal)
        assert state == story.state
        assert report(state, history, True, state.now_s)["steps"] == 100


def test_what_a_command_records_is_decided_on_once(
    story: Story, path: Path, request: pytest.FixtureRequest
) -> None:
    with closing(Journal(path)) as journal:
        journal.append(*story.steps)
        ending = journal.record(e.StopRequested(at_s=story.now_s, by="a person"))
        assert ending.phase is JobPhase.ENDING, "readers see what comes of it"
        request.getfixturevalue("no_decisions")
        assert journal.replay() == ending


def test_a_crash_at_any_append_leaves_a_prefix(story: Story, path: Path) -> None:
    """The journal says what was decided up to some event: all of it, and no more."""
    with closing(Journal(path)) as journal:
        for number, one in enumerate(story.steps, 1):
            journal.append(one)
            with closing(Journal(path, read_only=True)) as reader:
                assert reader.last_seq() == number
                assert reader.replay() == one.after


def test_readers_begin_with_the_snapshot(story: Story, path: Path, no_decisions: None) -> None:
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


@pytest.mark.parametrize("state", ["{", "[]", '{"moon":1}', '{"phase":"unknown"}'])
def test_a_snapshot_of_another_version_is_not_used(story: Story, path: Path, state: str) -> None:
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
        ('{"changes":{"moon":["=",1]}}', "event 3: .*State has no field moon"),
        ('{"changes":{"fleet":{"vms":["?",{}]}}}', "is not a kind of difference"),
        ('{"changes":["=",1]}', "cannot be used"),
        ("[]", "cannot be used"),
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
    asked = [one for s in story.steps for one in Journal.asked(s.commands)]
    kinds = {one[0] for one in asked}
    assert {"LaunchVms", "StartAgent", "ComputePlan", "Send"} <= kinds
    assert ["Send", "RunGeneration", "1", *FOUR] in asked
