"""A job that keeps its checkpoints in a bucket: stopped, resumed, bit for bit the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.fakes.object_store import bucket
from tests.integration.jobs import STEPS, Job, weights
from tests.integration.tiny_job import Tiny
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.storage.open import open_store

pytestmark = pytest.mark.rotated(parts=[1])


def test_a_job_stops_and_resumes_from_a_bucket_with_the_weights_of_the_undisturbed_one(
    tmp_path: Path, reference: Undisturbed
) -> None:
    with bucket() as s3:
        checkpoint = {"path": s3.url("jobs/bucket"), "every_steps": 40, "keep": 2}
        resources = {"max_vms": 1}
        with Job(tmp_path, "b", checkpoint=checkpoint, resources=resources) as job:
            job.pace(0.05)
            assert job.launch("--detach").code == 0
            job.until_trains(1)
            stopped = job.run("stop", job.name)
            assert stopped.code == 0, stopped.err
            step = View(job.state()).step
            assert job.checkpoints()[0].step == step < STEPS
            assert not job.dir.checkpoints.exists()

            job.pace(0.0)
            resumed = job.resume()
            assert resumed.code == 0, resumed.err
            assert [entry.step for entry in job.checkpoints()] == [STEPS, STEPS - 40]
            assert weights(job.checkpoint_root) == reference.weights

            copy = open_store(s3.url("jobs/bucket")).get("metrics.jsonl")
            assert copy == (job.dir.path / "metrics.jsonl").read_bytes()
            assert dict(job.losses()) == pytest.approx(dict(reference.losses))

            url, to = s3.url("jobs/bucket"), tmp_path / "export"
            exported = job.run("export", url, "--to", str(to), "-o", "json")
            assert exported.code == 0, exported.err
            assert exported.report["step"] == STEPS
            Tiny().load_state_dict(load_file(to / "model.safetensors"))
            assert job.left_over() == []
