"""``launch --manager-vm`` on Slurm: the manager is a batch job, found again wherever it runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.aws import CREDENTIALS
from tests.fakes.object_store import serve_s3
from tests.fakes.slurm import LOGIN, NODES, WHY_NO_SLURM, Slurm, a_login_node, a_slurm
from tests.fakes.sshd import WHY_NOT
from tests.integration.jobs import Job, trained_on, trains, until, weights
from tests.integration.slurm_jobs import slurm_job
from tests.integration.undisturbed import undisturbed
from tests.view import View

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NO_SLURM), reason=WHY_NO_SLURM),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with a_slurm(tmp_path_factory.mktemp("slurm-manager") / "cluster") as cluster:
        yield cluster


def manager_of(cluster: Slurm, job: Job) -> tuple[str, str]:
    """Return number and state of the batch job of a job's manager; empty: there is none."""
    said = cluster.ask("squeue", "-h", f"--name=spottrain-manager-{job.name}", "-o", "%i %T")
    number, _, state = said.strip().partition(" ")
    return number, state


def test_the_manager_is_a_batch_job_that_is_reached_stopped_and_begun_again(
    cluster: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with slurm_job(tmp_path, cluster, manager_partition="urgent") as job:
        job.pace(1.0)
        launched = job.launch("--manager-vm", "--detach")
        assert launched.code == 0, launched.err
        number, state = manager_of(cluster, job)
        assert state == "RUNNING"
        both = job.until("two train", lambda s: trained_on(s) if trains(s) > 2 else None)
        status = job.run("status", job.name, "-o", "json")
        assert status.code == 0, status.err
        assert status.report["state"] == "running"

        # As at its time limit: it is queued again, and takes over what trains meanwhile.
        cluster.ask("scancel", "--batch", "--signal=USR1", number)
        until("it was ended", lambda: not job.dir.is_managed())
        until("it runs again", job.dir.is_managed)
        assert manager_of(cluster, job) == (number, "RUNNING")
        step = View(job.state()).step
        job.until("the same train on", lambda s: trains(s) > step + 2 and trained_on(s) == both)

        stopped = job.run("stop", job.name)
        assert stopped.code == 0, stopped.err
        until("its batch job has ended", lambda: cluster.jobs() == [])
        job.pace(0.0)
        resumed = job.resume()
        assert resumed.code == 0, resumed.err
        assert weights(job.checkpoint_root) == undisturbed(tmp_path_factory).weights
        assert View(job.state()).tally.vms_launched == 4, "none was lost with the manager"


def test_a_manager_that_waits_in_the_queue_says_so_and_begins_by_itself(
    cluster: Slurm, tmp_path: Path
) -> None:
    others = cluster.occupy("urgent", NODES)
    with slurm_job(tmp_path, cluster, manager_partition="urgent") as job:
        job.pace(1.0)
        launched = job.launch("--manager-vm", "--detach")
        assert launched.code == 0, launched.err
        assert "its manager waits in the queue" in launched.err
        assert manager_of(cluster, job)[1] == "PENDING"
        assert job.run("status", job.name).code == 0
        assert "waits in the queue" in job.run("stop", job.name).error
        cluster.ask("scancel", others)
        job.until("it trains", lambda s: trains(s) > 1)
        assert manager_of(cluster, job)[1] == "RUNNING"
        ended = job.run("down", job.name)
        assert ended.code == 0, ended.err
        assert cluster.jobs() == []
        assert job.run("status", job.name, "-o", "json").report["state"] == "down"


def test_a_manager_that_waits_in_the_queue_can_be_withdrawn(cluster: Slurm, tmp_path: Path) -> None:
    others = cluster.occupy("urgent", NODES)
    with slurm_job(tmp_path, cluster, manager_partition="urgent") as job:
        assert job.launch("--manager-vm", "--detach").code == 0
        ended = job.run("down", job.name)
        assert ended.code == 0, ended.err
        cluster.ask("scancel", others)
        assert manager_of(cluster, job) == ("", "")


def test_a_manager_whose_batch_job_ends_says_why(cluster: Slurm, tmp_path: Path) -> None:
    with slurm_job(
        tmp_path, cluster, manager_partition="urgent", before="echo no quota; exit 3"
    ) as job:
        launched = job.launch("--manager-vm", "--detach")
        assert launched.code != 0
        assert launched.error.endswith(" ended: no quota")
        assert job.run("down", job.name).code == 0


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_laptop_starts_the_manager_on_the_cluster_and_may_go_away(
    cluster: Slurm, tmp_path: Path
) -> None:
    with (
        serve_s3() as s3,
        a_login_node(tmp_path, cluster) as sshd,
        slurm_job(tmp_path, cluster, login=LOGIN, manager_partition="urgent") as job,
    ):
        job.environment["PATH"] = f"{sshd.known_to_ssh(LOGIN)}:{job.environment['PATH']}"
        job.environment |= CREDENTIALS | {"A_SECRET": "hunter2"}
        job.settings["checkpoint"]["path"] = s3.url(job.name)
        job.settings["env"] |= CREDENTIALS
        job.settings["secrets"] = ["A_SECRET"]
        job.file.write_text(json.dumps(job.settings))
        job.pace(1.0)
        launched = job.launch("--manager-vm", "--detach")
        assert launched.code == 0, launched.err
        assert f"{LOGIN}: the manager of job {job.name} runs there" in launched.err
        assert manager_of(cluster, job)[1] == "RUNNING"
        assert not job.dir.is_managed(), "not here"

        def status() -> dict[str, Any]:
            answer = job.run("status", job.name, "-o", "json")
            assert answer.code == 0, answer.err
            return answer.report

        until("it trains", lambda: status()["step"] > 2)
        assert "agent of slurm." in job.run("logs", job.name).out
        stopped = job.run("stop", job.name)
        assert stopped.code == 0, stopped.err
        until("nothing runs", lambda: cluster.jobs() == [])
        assert not job.dir.remote_manager_file.exists(), "it can go on here"
        assert job.run("status", job.name, "-o", "json").report["state"] == "stopped"
        (root,) = job.folder.glob("shared/*")
        left = {path.name.partition("-")[0] for path in root.iterdir()}
        assert left == {"software", "run", "state"}, "what the next job uses, too"
        ended = job.run("down", job.name)
        assert ended.code == 0, ended.err
