"""Jobs that share the nodes of a Slurm cluster: by a pool over one account, or by its queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.slurm import WHY_NO_SLURM, Slurm, a_slurm
from tests.integration.jobs import Job, trained_on, trains, until, weights
from tests.integration.slurm_jobs import slurm_job
from tests.integration.undisturbed import undisturbed

from spottrain.varuna_manager.pool.report.document import read_pool
from spottrain.varuna_manager.pool.store.folder import PoolDir

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NO_SLURM), reason=WHY_NO_SLURM),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with a_slurm(tmp_path_factory.mktemp("slurm-pool") / "cluster") as cluster:
        yield cluster


def holds(job: Job, vms: int) -> None:
    """Wait until a job trains on so many VMs, and has no others."""

    def does() -> bool:
        if not job.dir.journal.exists():
            return False
        state = job.state()
        return len(trained_on(state)) == len(state.fleet.vms) == vms and trains(state) > 0

    until(f"{job.name} holds {vms}", does)


def test_a_pool_divides_the_nodes_of_an_account(
    cluster: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        slurm_job(tmp_path, cluster, "first") as first,
        slurm_job(tmp_path, cluster, "urgent") as urgent,
    ):
        said = first.settings["slurm"]
        for job in (first, urgent):
            job.environment["SPOTTRAIN_TEST_JOB"] = first.environment["SPOTTRAIN_TEST_JOB"]
            del job.settings["slurm"], job.settings["resources"]["provider"]
            job.settings["env"] = first.settings["env"]
            job.save()
        file = tmp_path / "lab.yaml"
        pool = {"name": "lab", "clouds": "slurm", "max_vms": 3, "policy": "priority"}
        file.write_text(json.dumps({**pool, "min_stay_s": 0.5, "slurm": said}))
        folder = PoolDir(tmp_path / "home" / "pools" / "lab")
        first.pace(1.0)
        created = first.run("pool", "create", str(file))
        assert created.code == 0, created.err
        launched = first.launch("--pool", "lab")
        assert launched.code == 0, launched.err
        holds(first, 2)
        launched = urgent.launch("--pool", "lab", "--priority", "9")
        assert launched.code == 0, launched.err
        holds(urgent, 2)
        holds(first, 1)
        assert len(cluster.jobs()) == 3
        first.pace(0.0)
        for name in ("first", "urgent"):
            until("its end", lambda name=name: read_pool(folder).jobs[name].phase.value == "ended")  # type: ignore[misc]
        for job in (first, urgent):
            assert weights(job.checkpoint_root) == undisturbed(tmp_path_factory).weights
        assert first.run("pool", "down", "lab").code == 0
        assert cluster.jobs() == []


def test_two_jobs_of_one_user_leave_each_other_alone(
    cluster: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        slurm_job(tmp_path, cluster, "one") as one,
        slurm_job(tmp_path, cluster, "other") as other,
    ):
        for job in (one, other):
            job.pace(1.0)
            launched = job.launch("--detach")
            assert launched.code == 0, launched.err
        holds(one, 2)
        holds(other, 2)
        before = trained_on(other.state())
        assert one.run("down", one.name, "--yes").code == 0
        until("its nodes are free", lambda: len(cluster.jobs()) == 2)
        assert trained_on(other.state()) == before
        other.pace(0.0)
        until("its end", lambda: not other.dir.is_managed())
        assert weights(other.checkpoint_root) == undisturbed(tmp_path_factory).weights
        assert cluster.jobs() == []
