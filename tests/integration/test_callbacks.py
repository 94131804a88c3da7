"""A job whose callbacks are called, by processes that its manager starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import HERE, Job, until

from spottrain.varuna_manager.core.model.events import CommandFailed


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(
        tmp_path,
        "called",
        entrypoint="callback_jobs:job",
        resources={"max_vms": 1},
        steps=20,
        evaluation={"every_steps": 10},
    ) as job:
        shutil.copy(HERE / "callback_jobs.py", job.folder / "workdir")
        job.environment["TOLD"] = str(tmp_path)
        yield job


def told(job: Job, name: str) -> list[dict[str, Any]]:
    file = Path(job.environment["TOLD"], name)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.rotated(parts=[8])
def test_callbacks_are_told_of_a_job_whose_manager_is_killed_and_one_that_raises_ends_nothing(
    job: Job,
) -> None:
    job.pace(0.3)  # what is measured before takes as long
    job.launch("--detach")
    job.until_trains()
    job.pace(5.0)  # a call is a process of its own, that may take long to start
    until("the first call", lambda: told(job, "on_evaluate"))
    job.kill_manager()
    job.pace(0.0)
    answer = job.resume("-o", "json")
    assert answer.code == 0, answer.err
    assert answer.report["state"] == "succeeded"
    evaluated = told(job, "on_evaluate")
    steps = [one["step"] for one in evaluated]
    assert set(steps) <= {0, 10, 20}
    assert steps == sorted(steps)
    losses = of_evaluations(job)
    assert [one["metrics"] for one in evaluated] == [losses[step] for step in steps]
    last = {"job": "called", "step": 20, "metrics": losses[20]}
    assert evaluated[-1] == {**last, "folder": None, "outcome": ""}
    weights = {**last, "folder": ["model.safetensors"]}
    assert told(job, "on_checkpoint")[-1] == {**weights, "outcome": ""}
    assert told(job, "on_best")[-1] == {**weights, "outcome": ""}
    assert told(job, "on_end") == [{**weights, "outcome": "succeeded"}]
    trouble = job.run("status", "called", "-o", "json").report["tracking"]["callbacks"]
    assert trouble == "on_best of step 20: on_best raised ValueError: the Hub does not answer"
    assert "evaluated step 20\n" in (job.dir.path / "tracking" / "callbacks.log").read_text()
    assert not (job.dir.path / "callbacks").exists()
    assert job.left_over() == []
    failed = [event for event in job.events() if isinstance(event, CommandFailed)]
    assert {event.command for event in failed} <= {"callback"}


def of_evaluations(job: Job) -> dict[int, dict[str, float]]:
    lines = (job.dir.path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = [row for row in rows if row["kind"] == "evaluation"]
    return {row["step"]: {f"{row['set']}/loss": row["loss"]} for row in found}
