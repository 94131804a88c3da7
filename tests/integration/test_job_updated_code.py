"""A job whose code fails, is mended, and goes on; and one that trains further."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.jobs import Answer, Job, weights

from spottrain.pipeline.model.order import example_index
from spottrain.varuna_manager.core.model.events import CodeUpdated, StepsChanged

pytestmark = pytest.mark.nightly

LENGTH, FAILS_AT, STEPS, MORE_STEPS = 200, 9, 12, 14
SETTINGS = {
    "entrypoint": "own:job",
    "steps": STEPS,
    "checkpoint": {"every_steps": 100},
    "resources": {"max_vms": 1},
}
UNREADABLE = example_index(1, range(LENGTH), (FAILS_AT - 1) * 8)
"""Index of the first example of the mini-batch that fails, counted from 1."""
OWN = f"""
import dataclasses
import torch, tiny_job

class Tokens(tiny_job.Tokens):
    def __getitem__(self, index):
        if index == {UNREADABLE}:
            raise OSError("example cannot be read")  # broken
        return super().__getitem__(index)

def job():
    return dataclasses.replace(tiny_job.job(), dataset=Tokens({LENGTH}))
"""
MENDED = OWN.replace('raise OSError("example cannot be read")  # broken', "pass")
OTHER_MODEL = MENDED + "\ntiny_job.WIDTH = 8\n"


def write_code(job: Job, text: str) -> None:
    (job.folder / "workdir" / "own.py").write_text(text)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Answer]]:
    with Job(tmp_path_factory.mktemp("updated"), "updated", **SETTINGS) as job:
        write_code(job, OWN)
        yield job, job.launch("-o", "json")


def test_code_that_fails_is_mended_and_the_job_goes_on_and_further(
    failed: tuple[Job, Answer], tmp_path: Path
) -> None:
    job, answer = failed
    assert answer.code == 3, answer.err
    assert [entry.step for entry in job.checkpoints()] == [FAILS_AT - 1, 0]
    assert f"step {FAILS_AT - 1} " in answer.err
    assert "resume updated --update-code" in answer.err

    write_code(job, OTHER_MODEL)
    refused = job.resume("--update-code")
    assert refused.code == 2, refused.err
    assert "embedding.weight" in refused.error
    assert "init_from" in refused.error

    write_code(job, MENDED)
    finished = job.resume("--update-code", "-o", "json")
    assert finished.code == 0, finished.err
    assert finished.report["steps_done"] == STEPS
    assert "own.py changed" in finished.err

    again = job.resume()
    assert again.code == 2
    further = job.resume("--steps", str(MORE_STEPS), "-o", "json")
    assert further.code == 0, further.err
    assert further.report["steps_done"] == MORE_STEPS
    assert f"{MORE_STEPS} steps instead of {STEPS}" in further.err

    updates = [e for e in job.events() if isinstance(e, CodeUpdated | StepsChanged)]
    assert [type(event) for event in updates] == [CodeUpdated, StepsChanged]
    assert "code updated" in job.run("events", job.name).out
    with Job(tmp_path, "whole", **{**SETTINGS, "steps": MORE_STEPS}) as whole:
        write_code(whole, MENDED)
        assert whole.launch().code == 0
        assert weights(whole.checkpoint_root) == weights(job.checkpoint_root)
