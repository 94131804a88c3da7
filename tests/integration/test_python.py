"""``import spottrain`` drives a job of real processes, as a notebook does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.jobs import Job

import spottrain


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with Job(tmp_path, "tiny", resources={"max_vms": 1}, steps=500) as job:
        for name in job.environment.keys() - os.environ.keys():
            monkeypatch.setenv(name, job.environment[name])
        monkeypatch.setenv("SPOTTRAIN_HOME", job.environment["SPOTTRAIN_HOME"])
        yield job


def test_a_job_file_is_launched_beside_an_event_loop_and_read_to_its_end(tiny: Job) -> None:
    async def in_a_notebook() -> spottrain.Job:
        return await asyncio.to_thread(
            spottrain.launch, tiny.file, steps=12, env={"OF_THE_JOB": 1e-3}, budget={"max_usd": 5}
        )

    before = dict(os.environ)
    job = asyncio.run(in_a_notebook())
    assert dict(os.environ) == before, "the environment is the job's during the launch alone"
    assert [one.name for one in spottrain.jobs()] == [job.name] == ["tiny"]
    status = job.wait()
    assert (status["state"], status["step"], status["usd_budget"]) == ("succeeded", 12, 5)
    assert job.wait() == {**status, "wall_s": job.status()["wall_s"]}, "it has ended for good"
    metrics = spottrain.job("tiny").metrics()
    assert list(metrics["step"]) == list(range(1, 13))
    assert metrics["loss"].iloc[-1] == status["newest"]["loss"]
    assert set(job.evaluations()["set"]) == {"heldout"}
    assert job.events()[0]["kind"] == "JobSubmitted"
    assert job.cost()["usd_spent"] == job.report()["usd_spent"]
    assert repr(job) == "<spottrain.Job tiny: succeeded, step 12 of 12>"
    assert "tiny" in job._repr_html_()
