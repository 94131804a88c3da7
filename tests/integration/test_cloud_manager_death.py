"""The manager dies at every step of a launch on each fake: nothing is rented twice.

Requests die on each cloud. Around events, which know no cloud, it dies on AWS.
"""

from __future__ import annotations

import json
import os
import signal
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.sshd import WHY_NOT
from tests.integration import cloud_manager
from tests.integration.cloud_vms import FAKES, CloudVms, cloud_vms
from tests.integration.forks import Fork
from tests.integration.test_manager_process import settings
from tests.unit.varuna_manager.invariants import check_invariants
from tests.view import View

from spottrain.varuna_manager.core.model.events import JobSubmitted
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal

pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

END_S = 900.0
STEPS = 100
KILLED = -signal.SIGKILL


class CloudJob:
    """A submitted job on the fake, and its managers, one after another."""

    def __init__(self, job: JobDir, cloud: CloudVms, steps: int) -> None:
        self.dir = job
        self.home = job.path.parent.parent
        self.cloud = cloud
        tarfile.open(self.dir.workdir, "w:gz").close()
        wanted = settings(self.dir.path, steps=steps, max_vms=2)
        journal = Journal(self.dir.journal)
        journal.record(JobSubmitted(at_s=time.time(), settings=wanted))
        journal.close()
        (self.dir.path / "cloud.json").write_text(json.dumps(cloud.known()))
        self.managers: list[Fork] = []

    def start(self, *dies_at: str) -> Fork:
        """Start a manager; see ``cloud_manager.py``."""
        arguments = (str(self.dir.path), *dies_at)
        environment = {**os.environ, "SPOTTRAIN_HOME": str(self.home)}
        log = self.dir.log
        manager = Fork(cloud_manager.main, arguments, environment, log, log)
        self.managers.append(manager)
        return manager

    def dies_at(self, operation: str, kind: str) -> None:
        """Let the next manager die as it asks the cloud for something; wait until it did."""
        victim = str(self.dir.path / "manager.json")
        self.cloud.fake.ask("fail", operation=operation, kind=kind, victim=victim)
        assert self.start().wait(END_S) == KILLED, self.log()

    def dies_around(self, event: str) -> None:
        """Let two managers die, one before it keeps an event and one after."""
        for when in ("before", "after"):
            assert self.start(event, when).wait(END_S) == KILLED, self.log()
            check_invariants(self.state())

    def state(self) -> State:
        journal = Journal(self.dir.journal, read_only=True)
        try:
            return journal.replay()
        finally:
            journal.close()

    def log(self) -> str:
        return self.dir.log.read_text()[-4000:]

    def ended_well(self, manager: Fork) -> None:
        """Check that the job came to its end on two VMs, and that nothing is left."""
        assert manager.wait(END_S) == 0, self.log()
        state = self.state()
        check_invariants(state)
        assert state.phase is JobPhase.ENDED
        assert View(state).step == state.job.spec.steps
        assert View(state).tally.vms_launched == 2
        provider = self.cloud.fake.provider()
        provider.release("job")
        bill: list[dict[str, Any]] = self.cloud.fake.ask("bill")
        assert len(bill) == 2, bill
        assert all(one["ended_at"] for one in bill)
        assert self.cloud.fake.ask("switched_on") == []
        assert self.cloud.fake.ask("left") == []
        assert self.cloud.fake.ask("drifts") == []

    def end(self) -> None:
        for manager in self.managers:
            manager.kill()
            manager.wait()


@pytest.fixture(params=FAKES)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CloudJob]:
    made = JobDir(tmp_path / "home" / "jobs" / "job")
    made.path.mkdir(parents=True)
    with cloud_vms(request.param, tmp_path, made.cloud) as cloud:
        if cloud.name == "gcp":
            gpus = "NVIDIA_A100_GPUS"
            for metric in (gpus, f"PREEMPTIBLE_{gpus}", "GPUS_ALL_REGIONS"):
                cloud.fake.ask("quota", metric=metric, limit=8)
        job = CloudJob(made, cloud, STEPS)
        yield job
        job.end()


REQUESTS = {
    "aws": ("ImportKeyPair", "RunInstances", "GetConsoleOutput", "TerminateInstances"),
    "azure": (
        "PUT virtualNetworks",
        "PUT virtualMachines",
        "GET networkInterfaces",
        "DELETE virtualMachines",
    ),
    "gcp": (
        "networks.insert",
        "instances.bulk_insert",
        "instances.get_guest_attributes",
        "instances.delete",
    ),
}
"""What is shared, the launch itself, the address of a VM that is there, its end."""


@pytest.mark.rotated
def test_a_manager_that_dies_at_any_step_rents_nothing_twice(job: CloudJob) -> None:
    shared, launch, address, end = REQUESTS[job.cloud.name]
    on_aws = job.cloud.name == "aws"
    if on_aws:
        job.dies_around("OffersSeen")
    job.dies_at(shared, "late kill")
    job.dies_at(launch, "kill")  # the request was never read
    job.dies_at(launch, "late kill")  # its reply was never written
    if on_aws:
        job.dies_around("VmsLaunched")
    job.dies_at(address, "kill")
    if on_aws:
        job.dies_around("AgentRegistered")
    job.dies_at(end, "kill")
    job.dies_at(end, "late kill")
    job.ended_well(job.start())
