"""What is wrong is said in one line, before anything starts; what fails loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Answer, Job

BAD_JOBS = """
import dataclasses
import torch
from tiny_job import job as tiny_job
from torch import nn

class Flagging(nn.Embedding):
    def __init__(self):
        super().__init__(32, 32)
        self.register_buffer("called", torch.zeros((), dtype=torch.bool))

    def forward(self, tokens):
        self.called.fill_(True)
        return super().forward(tokens)

def flagging_job():
    return dataclasses.replace(tiny_job(), model=Flagging)

def raising_job():
    raise ValueError("no data here")

def wrong_job():
    return "a model"
"""

BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"minbatch_size": 8}, 2, "minbatch_size: unknown key; did you mean minibatch"),
    ({"resources": {"max_vm": 2}}, 2, "resources.max_vm: unknown key; did you mean"),
    ({"steps": "many"}, 2, "steps: must be a valid integer: got 'many'"),
    ({"minibatch_size": 9}, 2, "must be a multiple of microbatch_size: got 9 and 2"),
    ({"workdir": "elsewhere"}, 2, "workdir: is not a folder"),
    ({"entrypoint": "tiny_job"}, 2, "entrypoint: must be module:function"),
    ({"slo": {"deadline": "2020-01-01T00:00:00Z"}}, 2, "deadline: is in the past"),
    ({"slo": {"deadline": "2100-01-01T00:00:00"}}, 2, "must have a time zone"),
    ({"budget": {"max_usd": 1e-6}}, 4, "is less than one step costs"),
    ({"budget": {"max_usd_per_hour": 0.01}}, 4, "does not pay for one machine"),
    ({"checkpoint": {"path": "/dev/null/here"}}, 2, "checkpoint.path: cannot write"),
    ({"entrypoint": "nowhere:job"}, 3, "nowhere"),
    ({"entrypoint": "bad_jobs:no_job"}, 3, "no_job"),
    ({"entrypoint": "bad_jobs:raising_job"}, 3, "no data here"),
    ({"entrypoint": "bad_jobs:wrong_job"}, 3, "must return a spottrain.TrainingJob"),
    ({"entrypoint": "bad_jobs:flagging_job"}, 3, "model changes its buffer called in forward"),
]


@pytest.mark.rotated
@pytest.mark.parametrize(("settings", "code", "words"), BAD, ids=[b[2] for b in BAD])
def test_what_is_wrong_is_one_line_and_nothing_starts(
    tmp_path: Path, settings: dict[str, Any], code: int, words: str
) -> None:
    with Job(tmp_path, "bad", **settings) as job:
        (job.folder / "workdir" / "bad_jobs.py").write_text(BAD_JOBS)
        answer = job.launch("-o", "json")
        assert answer.code == code, answer.err
        assert words in answer.error
        assert answer.out == ""
        assert not job.dir.path.parent.exists()
        assert job.left_over() == []
        assert ("Traceback" in answer.err) == ("raising" in str(settings))


@dataclass(frozen=True)
class Failed:
    """What came of a job whose code raises."""

    answer: Answer
    processes_left: list[int]
    saved_steps: list[int]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failed]:
    folder = tmp_path_factory.mktemp("raising")
    settings = {"entrypoint": "tiny_job:raising_job", "resources": {"max_vms": 1}}
    with Job(folder, "raising", **settings) as job:
        answer = job.launch("-o", "json")
        saved = [entry.step for entry in job.checkpoints()]
        yield Failed(answer, job.left_over(), saved)


def test_code_that_raises_ends_the_job_with_3_and_its_traceback(
    failed: Failed,
) -> None:
    assert failed.answer.code == 3, failed.answer.err
    assert "RuntimeError: " in failed.answer.err
    assert 'tiny_job.py", line' in failed.answer.err
    assert "no loss in mini-batch 7" in failed.answer.error


def test_code_that_raises_is_told_in_the_report(failed: Failed) -> None:
    report = failed.answer.report
    assert report["state"] == "failed"
    assert report["exit_code"] == 3
    assert report["steps_done"] == 6


def test_what_was_committed_before_code_raised_is_saved(failed: Failed) -> None:
    assert failed.saved_steps == [6, 0]


def test_code_that_raises_leaves_no_vm(failed: Failed) -> None:
    assert failed.processes_left == []
