"""``launch --manager-vm`` on Kubernetes: the manager is a pod; the machine that launched may go."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.aws import CREDENTIALS
from tests.fakes.kubernetes import FakeCluster, FakePod, a_cluster
from tests.fakes.object_store import serve_s3
from tests.integration.jobs import Job, until
from tests.integration.kubernetes_jobs import kubernetes_job

pytestmark = pytest.mark.nightly


def manager_of(cluster: FakeCluster) -> FakePod:
    (pod,) = (p for name, p in cluster.pods.items() if name.startswith("spottrain-manager-"))
    return pod


def status_of(job: Job) -> dict[str, Any]:
    answer = job.run("status", job.name, "-o", "json")
    assert answer.code == 0, answer.err
    return answer.report


@contextlib.contextmanager
def launched(folder: Path) -> Iterator[tuple[FakeCluster, Job]]:
    """Yield a cluster, and a job that trains there whose manager is a pod."""
    with (
        serve_s3() as s3,
        a_cluster(folder / "cluster") as cluster,
        kubernetes_job(folder, cluster) as job,
    ):
        job.environment["PATH"] = f"{cluster.programs()}:{job.environment['PATH']}"
        job.environment |= CREDENTIALS | {"A_SECRET": "hunter2"}
        job.settings["checkpoint"]["path"] = s3.url(job.name)
        job.settings["env"] |= CREDENTIALS
        job.settings["secrets"] = ["A_SECRET"]
        job.settings["manager_vm"] = {"identity": "spottrain-manager"}
        job.file.write_text(json.dumps(job.settings))
        job.pace(1.0)
        answer = job.launch("--manager-vm", "--detach")
        assert answer.code == 0, answer.err
        until("it trains", lambda: status_of(job)["step"] > 2)
        yield cluster, job


def test_the_manager_is_a_pod_and_when_it_is_lost_the_job_goes_on_here(tmp_path: Path) -> None:
    with launched(tmp_path) as (cluster, job):
        pod = manager_of(cluster)
        assert pod.object["spec"]["serviceAccountName"] == "spottrain-manager"
        assert not job.dir.is_managed(), "not here"
        assert "agent of kubernetes." in job.run("logs", job.name).out
        cluster.evict(pod.name)
        until("it is gone", lambda: pod.is_over)
        job.pace(0.0)
        lost = job.run("status", job.name, "-o", "json")
        assert "the VM of its manager is gone" in lost.err
        resumed = job.resume()
        assert resumed.code == 0, resumed.err
        assert job.run("down", job.name).code == 0
        assert [name for name, one in cluster.pods.items() if not one.is_over] == []


def test_a_job_whose_manager_is_a_pod_can_be_stopped_and_ended_for_good(tmp_path: Path) -> None:
    with launched(tmp_path) as (cluster, job):
        stopped = job.run("stop", job.name)
        assert stopped.code == 0, stopped.err
        assert not job.dir.remote_manager_file.exists()
        assert job.run("down", job.name).code == 0
        assert cluster.pods == {}
