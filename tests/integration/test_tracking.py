"""Measurements of a job whose manager and whose trackers are killed on the way."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.integration.test_manager_process import (
    END_S,
    ENDLESS,
    Job,
    assert_ended_well,
)
from tests.view import View

from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.measurements import Measurements, Row
from spottrain.varuna_manager.tracking.lines import as_line


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "job", ENDLESS, 1)
    config = {"checkpoint": {"path": None}, "track": {"mlflow": None}}
    (job.dir.path / "config.json").write_text(json.dumps(config))
    yield job
    job.end()


def trackers(job: Job) -> list[int]:
    """Return the processes that write the job's lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            if {os.fsencode(job.dir.path), b"metrics.jsonl"} <= set(argv):
                found.append(int(entry.name))
    return found


def steps_written(job: Job) -> int:
    with suppress(FileNotFoundError):
        return (job.dir.path / "metrics.jsonl").read_bytes().count(b'"minibatch"')
    return 0


def wait_for_lines(job: Job, count: int) -> None:
    give_up_at_s = time.monotonic() + END_S
    while steps_written(job) < count:
        assert time.monotonic() < give_up_at_s, job.dir.log.read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.rotated(parts=[8])
def test_every_step_is_written_once_whoever_is_killed(job: Job) -> None:
    manager = job.start()
    wait_for_lines(job, 20)
    (tracker,) = trackers(job)
    os.kill(tracker, signal.SIGKILL)

    def trains_on(state: State) -> bool:
        return View(state).step >= 80

    job.wait_for(trains_on)
    manager.kill()
    manager.wait()
    manager = job.start()
    resumed_at = job.progress()
    job.wait_for(lambda now: View(now).step > resumed_at)
    job.may_end()
    state = assert_ended_well(job, manager)
    with closing(Measurements(job.dir.measurements, read_only=True)) as measurements:
        minibatches, evaluations = (
            measurements.minibatches(),
            measurements.evaluations(),
        )
    steps = [*range(1, len(minibatches)), ENDLESS]
    assert [row.step for row in minibatches] == steps
    assert [row.loss for row in minibatches] == [1 / step for step in steps]
    assert [row.step for row in evaluations] == [0, ENDLESS]
    rows: list[Row] = [*minibatches, *evaluations]
    rows.sort(key=lambda row: row.position)
    written = (job.dir.path / "metrics.jsonl").read_text()
    assert written == "".join(map(as_line, rows))
    assert trackers(job) == []
    assert View(state).minibatches_recomputed == 0


def test_a_tracker_that_fails_is_told_once_and_ends_no_job(job: Job) -> None:
    manager = job.start()
    wait_for_lines(job, 20)
    job.may_end()
    assert_ended_well(job, manager)
    log = job.dir.log.read_text()
    assert log.count("mlflow: ") == 1
    (line,) = [line for line in log.splitlines() if "mlflow: " in line]
    assert line.endswith("(exit 1); the job goes on")
    status = json.loads(job.dir.tracking_status.read_text())
    assert list(status) == ["mlflow"]
    with closing(Measurements(job.dir.measurements, read_only=True)) as measurements:
        assert steps_written(job) == len(measurements.minibatches())
