"""A job whose manager is no machine of the cluster, over a login that a person has opened."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.slurm import LOGIN, WHY_NO_SLURM, Slurm, a_login_node, a_slurm
from tests.fakes.sshd import WHY_NOT, Sshd
from tests.integration.jobs import trained_on, trains, until, weights
from tests.integration.slurm_jobs import slurm_job
from tests.integration.undisturbed import undisturbed
from tests.view import View

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NO_SLURM or WHY_NOT), reason=WHY_NO_SLURM or WHY_NOT),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with a_slurm(tmp_path_factory.mktemp("slurm-login") / "cluster") as cluster:
        yield cluster


class Person:
    """Logs in by hand; nobody else can, for the key is not known to ``ssh`` of jobs."""

    def __init__(self, sshd: Sshd) -> None:
        self._socket, self._key = sshd.folder / "master", sshd.key_file
        self.programs = sshd.known_to_ssh(
            LOGIN, f"ControlPath {self._socket}", key_file=sshd.folder / "none"
        )

    def logs_in(self) -> None:
        self._ssh("-M", "-f", "-N", "-i", str(self._key))

    def logs_out(self) -> None:
        self._ssh("-O", "exit")

    def _ssh(self, *options: str) -> None:
        argv = [str(self.programs / "ssh"), *options, LOGIN]
        nowhere = subprocess.DEVNULL
        subprocess.run(argv, check=True, stdin=nowhere, stdout=nowhere, stderr=nowhere)


def test_a_job_trains_over_a_login_that_a_person_opened_and_opens_again(
    cluster: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with a_login_node(tmp_path, cluster) as sshd, slurm_job(tmp_path, cluster, login=LOGIN) as job:
        person = Person(sshd)
        job.environment["PATH"] = f"{person.programs}:{job.environment['PATH']}"
        refused = job.launch("--detach")
        assert refused.code != 0
        assert f"'ssh -o BatchMode=yes {LOGIN} true' must work on this machine" in refused.err
        person.logs_in()
        job.pace(1.0)
        launched = job.launch("--detach")
        assert launched.code == 0, launched.err
        first = job.until("two train", lambda s: trained_on(s) if trains(s) > 2 else None)
        person.logs_out()
        until("it is told", lambda: "Permission denied" in job.dir.log.read_text())
        person.logs_in()
        step = View(job.state()).step
        job.until("they train on", lambda s: trains(s) > step + 2)
        job.pace(0.0)
        until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
        end = job.state()
        assert end.outcome is not None
        assert end.outcome.kind == "succeeded", end.outcome
        assert View(end).tally.vms_launched == len(first), "none was lost meanwhile"
        assert weights(job.checkpoint_root) == undisturbed(tmp_path_factory).weights
        assert cluster.jobs() == []
        assert list(job.folder.glob("shared/*")) == []
        person.logs_out()
