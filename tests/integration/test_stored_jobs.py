"""Jobs that an earlier spottrain wrote down can be looked at, and go on.

What they are and which one wrote them: ``stored/README.md``.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Answer, Job
from tests.integration.stored_jobs import (
    STEPS,
    STORED,
    check_same,
    numbers,
    tensors,
    unpacked,
)
from tests.view import View

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored jobs, for tests that only look."""
    return unpacked(tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module", params=["finished", "stopped", "killed"])
def job(stored: Path, request: pytest.FixtureRequest) -> Job:
    """One of them."""
    return Job(stored, request.param)


def test_all_jobs_are_listed(stored: Path) -> None:
    answer = Job(stored, "lists").run("status", "-o", "json")
    assert answer.code == 0, answer.err
    jobs: list[dict[str, Any]] = json.loads(answer.out)
    told = {job["name"]: job for job in jobs}
    assert {name: job["state"] for name, job in told.items()} == {
        "finished": "succeeded",
        "stopped": "stopped",
        "killed": "unmanaged",
        "moved": "unmanaged",
    }
    for name in ("finished", "stopped"):
        check_told(told[name], answers()[name]["status"])
    for name, vms in (("killed", 2), ("moved", 1)):
        assert 4 <= told[name]["step"] < told[name]["steps"] == STEPS
        assert [vm["phase"] for vm in told[name]["fleet"]] == ["ready"] * vms


@pytest.mark.parametrize("command", ["report", "cost"])
def test_a_job_is_told_of_as_it_was(job: Job, command: str) -> None:
    answer = job.run(command, job.name, "-o", "json")
    assert answer.code == 0, answer.err
    if job.name == "killed":  # its VMs cost money until somebody looks for them
        assert answer.report["state"] == "unmanaged"
        assert answer.report["usd_spent"] > 0
    else:
        check_told(answer.report, answers()[job.name][command])


def test_every_event_is_told(stored: Path) -> None:
    answer = Job(stored, "asks").run("events", "killed", "-o", "json")
    assert answer.code == 0, answer.err
    events: list[dict[str, Any]] = json.loads(answer.out)
    journal_file = stored / "home" / "jobs" / "killed" / "journal.sqlite"
    with closing(sqlite3.connect(journal_file)) as journal:
        rows = journal.execute("SELECT seq, at_s FROM events ORDER BY seq").fetchall()
    assert [(event["seq"], event["at_s"]) for event in events] == rows


def test_what_happened_is_told_line_by_line(stored: Path) -> None:
    answer = Job(stored, "reads").run("events", "stopped")
    assert answer.code == 0, answer.err
    for news in ("submitted", "generation 1 trains", "checkpoint step-4-"):
        assert news in answer.out


@pytest.mark.parametrize("name", ["stopped", "killed", "moved"])
def test_a_job_goes_on_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, name: str
) -> None:
    folder = unpacked(tmp_path)
    settings = {"checkpoint": {"path": f"file://{folder}/bucket"}}
    with Job(folder, name, **(settings if name == "moved" else {})) as job:
        before = View(job.state()).step

        last = job.resume("-o", "json")

        check_end(job, last, before)


def test_a_job_goes_on_from_its_store_alone(tmp_path: Path) -> None:
    folder = unpacked(tmp_path)
    url = f"file://{folder}/bucket"
    with Job(folder, "moved", checkpoint={"path": url}) as job:
        before = View(job.state()).step
        shutil.rmtree(job.dir.path)

        last = job.run("resume", url, "-o", "json")

        check_end(job, last, before)
        assert "events found in" in last.err


def answers() -> dict[str, dict[str, Any]]:
    """Return what was said of the jobs that are over, by job and command."""
    told: dict[str, dict[str, Any]] = json.loads((STORED / "answers.json").read_text())
    return told


def check_told(now: dict[str, Any], then: dict[str, Any]) -> None:
    """Check that an answer has all the numbers that it had: words may change."""
    assert now["state"] == then["state"]
    found, wanted = dict(numbers(now)), dict(numbers(then))
    assert {place: found.get(place) for place in wanted} == pytest.approx(wanted)


def check_end(job: Job, last: Answer, before: int) -> None:
    """Check that a job has done the steps that it lacked, with the weights they make."""
    assert last.code == 0, last.err
    report = last.report
    assert 4 <= before < STEPS
    assert (report["state"], report["steps_done"]) == ("succeeded", STEPS)
    assert report["minibatches_recomputed"] < before
    undisturbed = tensors(job.dir.path.parent / "finished" / "checkpoints")
    check_same(tensors(job.checkpoint_root), undisturbed)
    assert job.left_over() == []
    with (
        pytest.MonkeyPatch.context() as patched
    ):  # the first manager has decided on all facts
        patched.delattr("spottrain.varuna_manager.core.step.step")
        assert View(job.state()).step == STEPS
