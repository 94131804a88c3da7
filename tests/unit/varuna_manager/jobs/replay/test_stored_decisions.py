"""Decisions of format 1, when states were flat, lead where they led; readers say the same.

The journal is in ``tests/integration/stored``, whose README tells what wrote it.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.view import View

from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.deadline_state import DeadlineState
from spottrain.varuna_manager.core.model.parts import FIELDS
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.journal import Journal, StoredSnapshot
from spottrain.varuna_manager.jobs.replay.codec import to_data
from spottrain.varuna_manager.jobs.replay.fold import Step, parts_of
from spottrain.varuna_manager.reporting import documents
from spottrain.varuna_manager.reporting.explain.document import explanation
from spottrain.varuna_manager.reporting.history import replay

STORED = Path(__file__).parents[4] / "integration" / "stored" / "format-1.json.gz"
KEPT: dict[str, Any] = json.loads(gzip.decompress(STORED.read_bytes()))
LAST = len(KEPT["rows"])
PARTS = FIELDS.keys() - {DeadlineState}
"""Those that were no part in format 1."""

LATER: dict[str, Any] = {
    "orders": {},
    "is_clearing": False,
    "kept_at_s": None,
    "is_part": False,
    "learning_rates": None,
}
"""Fields that states have got since, with their defaults."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobDir:
    """The job, without its snapshot."""
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path))
    job = job_dir("job")
    job.path.mkdir(parents=True)
    with closing(Journal(job.journal)):
        pass
    with closing(sqlite3.connect(job.journal)) as db, db:
        db.executemany(
            "INSERT INTO events (at_s, kind, body, decision) VALUES (?, ?, ?, ?)",
            KEPT["rows"],
        )
    return job


def with_snapshot(job: JobDir) -> None:
    snapshot = StoredSnapshot(*KEPT["snapshot"])
    with closing(sqlite3.connect(job.journal)) as db, db:
        db.execute("INSERT INTO snapshots VALUES (?, ?, ?)", snapshot)
        db.execute("UPDATE events SET decision = 'x' WHERE seq <= ?", (snapshot.seq,))


def flat(state: State) -> dict[str, Any]:
    """Return a state as format 1 has it."""
    data: dict[str, Any] = json.loads(json.dumps(to_data(state)))
    for part in PARTS:
        data |= data.pop(FIELDS[part])
    without_later(data)
    if data["settings"] is not None:  # what jobs could not ask for yet
        assert data["settings"]["spec"].pop("semantics") == "synchronous"
    return data


def without_later(data: Any) -> None:
    """Remove fields that came later, as long as they have their defaults."""
    if isinstance(data, list):
        for each in data:
            without_later(each)
    elif isinstance(data, dict):
        for name, default in LATER.items():
            if name in data and data[name] == default:
                del data[name]
        for each in data.values():
            without_later(each)


def told(journal: Journal) -> dict[str, Any]:
    """Return what readers say of the events that are stored."""
    state, history = replay(journal)
    at_s = state.now_s
    return {
        "status": documents.status(state, False, at_s),
        "report": documents.report(state, history, False, at_s),
        "events": news(journal),
    }


def news(journal: Journal) -> list[list[Any]]:
    return [[seq, line] for seq, _, line in journal.story() if line and seq <= LAST]


def explained(job: JobDir) -> dict[str, Any]:
    return {
        about: explanation(job, None if about == "now" else about)
        for about in KEPT["told"]["explain"]
    }


@pytest.fixture
def no_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("spottrain.varuna_manager.core.step.step")


@pytest.mark.usefixtures("no_decisions")
def test_they_lead_to_the_states_to_which_they_led(job: JobDir) -> None:
    with closing(Journal(job.journal, read_only=True)) as journal:
        for seq, state in KEPT["states"].items():
            assert flat(journal.replay(int(seq))) == state
    with_snapshot(job)
    with closing(Journal(job.journal, read_only=True)) as journal:
        assert flat(journal.replay()) == KEPT["states"][str(LAST)]


@pytest.mark.usefixtures("no_decisions")
def test_readers_say_what_they_said(job: JobDir) -> None:
    kept = dict(KEPT["told"])
    assert explained(job) == kept.pop("explain")
    with closing(Journal(job.journal, read_only=True)) as journal:
        now = told(journal)
    for vm in now["status"]["fleet"]:
        del vm["spare"]  # which was not told yet
    assert now == kept


def test_a_manager_goes_on_from_them(
    job: JobDir, request: pytest.FixtureRequest
) -> None:
    with closing(Journal(job.journal)) as journal:
        state = journal.replay()
        at_s, vm_id = state.now_s, next(iter(View(state).vms))
        for event in (
            e.ManagerStarted(at_s=at_s, software_version="2", pid=1),
            e.VmsListed(at_s=at_s, asked_at_s=at_s, vms=()),
            e.StopRequested(at_s=at_s, by="a person"),
        ):
            before = state
            state, commands = step.step(before, event)
            journal.append(Step(before, event, state, commands))
    request.getfixturevalue("no_decisions")
    with closing(Journal(job.journal, read_only=True)) as journal:
        assert journal.replay() == replay(journal)[0] == state
        assert news(journal) == KEPT["told"]["events"]
        status = told(journal)["status"]
    assert status["reason"] == "stopped by a person"
    newest = explanation(job, None)["chain"][-1]
    assert newest["seq"] == LAST + 3
    assert [link["seq"] for link in explanation(job, vm_id)["chain"]][-1] == LAST + 2
    with closing(sqlite3.connect(job.journal)) as db:
        decisions = db.execute("SELECT decision FROM events ORDER BY seq").fetchall()
    formats = [json.loads(one)["format"] for (one,) in decisions]
    assert formats == [1] * LAST + [2] * 3
    assert not any("state" in parts_of(one) for (one,) in decisions[1:])
