"""The manager dies at every step of a launch on AWS's fake: nothing is rented twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.aws import ROOT
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import AwsVms, aws_vms
from tests.integration.test_manager_process import settings

from spottrain.cloud.provider import ReleasesJob
from spottrain.cloud.ssh.keys import ensure_key
from spottrain.varuna_manager.events import JobSubmitted
from spottrain.varuna_manager.jobs import JobDir
from spottrain.varuna_manager.journal import Journal
from spottrain.varuna_manager.state import JobPhase, State, check_invariants

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

SCRIPT = Path(__file__).with_name("aws_manager.py")
END_S = 90.0
KILLED = -signal.SIGKILL


class AwsJob:
    """A submitted job on the fake, and its managers, one after another."""

    def __init__(self, folder: Path, cloud: AwsVms, steps: int) -> None:
        self.dir = JobDir(folder / "home" / "jobs" / "job")
        self.dir.path.mkdir(parents=True)
        self.home = folder / "home"
        self.cloud = cloud
        tarfile.open(self.dir.workdir, "w:gz").close()
        wanted = settings(self.dir.path, steps=steps, max_vms=2)
        journal = Journal(self.dir.journal)
        journal.append(JobSubmitted(at_s=time.time(), settings=wanted))
        journal.close()
        key_file, public_key = ensure_key(self.dir.cloud)
        known = {
            "port": int(cloud.fake.url.rpartition(":")[2]),
            "settings": {**cloud.settings(), "public_key": public_key},
            "key_file": str(key_file),
        }
        (self.dir.path / "aws.json").write_text(json.dumps(known))
        self.managers: list[subprocess.Popen[bytes]] = []

    def start(self, *dies_at: str) -> subprocess.Popen[bytes]:
        """Start a manager; see ``aws_manager.py``."""
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        with self.dir.log.open("ab") as log:
            manager = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.dir.path), *dies_at],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "SPOTTRAIN_HOME": str(self.home),
                },
            )
        self.managers.append(manager)
        return manager

    def dies_at(self, operation: str, kind: str) -> None:
        """Let the next manager die as it asks AWS for something; wait until it did."""
        victim = str(self.dir.path / "manager.json")
        self.cloud.fake.ask("fail", operation=operation, kind=kind, victim=victim)
        assert self.start().wait(END_S) == KILLED, self.log()

    def state(self) -> State:
        journal = Journal(self.dir.journal, read_only=True)
        try:
            return journal.replay()
        finally:
            journal.close()

    def log(self) -> str:
        return self.dir.log.read_text()[-4000:]

    def ended_well(self, manager: subprocess.Popen[bytes]) -> None:
        """Check that the job came to its end on two VMs, and that nothing is left."""
        assert manager.wait(END_S) == 0, self.log()
        state = self.state()
        check_invariants(state)
        assert state.phase is JobPhase.ENDED
        assert state.progress.step == state.job.spec.steps
        bill: list[dict[str, Any]] = self.cloud.fake.ask("bill")
        assert len(bill) == 2, [one["tags"] for one in bill]
        assert all(one["ended_at"] for one in bill)
        assert state.tally.vms_launched == 2
        assert self.cloud.fake.ask("switched_on") == []
        provider = self.cloud.provider()
        assert isinstance(provider, ReleasesJob)
        provider.release("job")
        assert self.cloud.fake.ask("left") == []
        assert self.cloud.fake.ask("drifts") == []

    def end(self) -> None:
        for manager in self.managers:
            manager.kill()
            manager.wait()


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[[int], AwsJob]]:
    jobs = []
    with aws_vms(tmp_path / "aws") as cloud:

        def make(steps: int) -> AwsJob:
            jobs.append(AwsJob(tmp_path, cloud, steps))
            return jobs[-1]

        yield make
        for job in jobs:
            job.end()


def test_a_manager_that_dies_at_any_step_of_a_launch_rents_nothing_twice(
    make_job: Callable[[int], AwsJob],
) -> None:
    job = make_job(300)
    for event in ("LaunchIntended", "VmsLaunched", "AgentStarting", "AgentRegistered"):
        for when in ("before", "after"):
            assert job.start(event, when).wait(END_S) == KILLED, job.log()
            check_invariants(job.state())
    job.ended_well(job.start())


def test_a_manager_that_dies_while_it_asks_rents_nothing_twice(
    make_job: Callable[[int], AwsJob],
) -> None:
    job = make_job(300)
    for operation, kind in (
        ("ImportKeyPair", "kill"),
        ("ImportKeyPair", "late kill"),
        ("RunInstances", "kill"),  # the request was never read
        ("RunInstances", "late kill"),  # its reply was never written
        ("GetConsoleOutput", "kill"),  # the VMs are there
        ("TerminateInstances", "kill"),
        ("TerminateInstances", "late kill"),
    ):
        job.dies_at(operation, kind)
    job.ended_well(job.start())
