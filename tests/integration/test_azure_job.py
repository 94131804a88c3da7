"""A job on Azure's fake from the command line: rented, evicted, refilled, ended, empty.

As on AWS's (test_aws_job.py): VMs are OpenSSH servers on loopback with homes of their
own, and a folder stands for the network folder of checkpoints.
"""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

import pytest
from tests.fakes.azure import CREDENTIALS, KIND, REGION, FakeAzure, running
from tests.fakes.azure_world import SUBSCRIPTION
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import free_port
from tests.integration.jobs import STEPS, Job, trains, until, weights
from tests.integration.undisturbed import Undisturbed, undisturbed

from spottrain.manifest import list_checkpoints
from spottrain.pricing.sources import AZURE_URL
from spottrain.varuna_manager.records import VmPhase
from spottrain.varuna_manager.state import State

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


class AzureJob(Job):
    """A job that rents from the fake."""

    def __init__(self, folder: Path, fake: FakeAzure, port: int) -> None:
        super().__init__(
            folder,
            "on-azure",
            resources={"provider": "azure", "max_vms": 2},
            azure={
                "subscription": SUBSCRIPTION,
                "regions": [REGION],
                "instance_types": [KIND],
                "endpoint_url": fake.url,
                "authority_url": fake.url,
                "user": getpass.getuser(),
                "ssh_port": port,
                "ssh_from": ["192.0.2.0/24"],
                "python": sys.executable,
            },
            checkpoint={"every_steps": 10, "path": str(folder / "network-folder")},
            env={"PACE_FILE": str(folder / "on-azure" / "pace")},
            manager={"suspect_s": 30.0},
        )
        self.environment |= {name: os.environ[name] for name in CREDENTIALS}
        self.environment[AZURE_URL] = fake.ask("prices_url")
        self.environment["REQUESTS_CA_BUNDLE"] = fake.ca_file


def full_and_training(state: State) -> State | None:
    ready = [vm for vm in state.vms.values() if vm.phase is VmPhase.READY]
    return state if len(ready) == 2 and trains(state) else None


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory)


def test_a_job_outlives_an_eviction_and_leaves_an_empty_cloud(
    tmp_path: Path, reference: Undisturbed
) -> None:
    port = free_port()
    with running() as fake:
        fake.reset()
        fake.ask("rent_machines", folder=str(tmp_path / "disks"), port=port)
        with AzureJob(tmp_path, fake, port) as job:
            job.pace(0.02)
            launched = job.launch("--detach")
            assert launched.code == 0, launched.err
            before = set(job.until("two VMs", full_and_training).vms)
            job.pace(0.3)  # so that it is not over before all has happened to it
            evicted = min(before)
            fake.ask("evict", name=evicted.partition(".")[0])
            state = job.until(
                "another VM in its place",
                lambda s: None if evicted in s.vms else full_and_training(s),
            )
            assert len(before & set(state.vms)) == 1
            job.pace(0.0)
            until(
                "its end",
                lambda: not job.dir.is_managed(),
                lambda: job.tail(job.state()),
            )
            end = job.state()
            assert end.outcome is not None
            assert end.outcome.kind == "succeeded", end.outcome
            assert end.tally.preemptions_unnoticed == 1
            assert list_checkpoints(job.checkpoint_root)[0].step == STEPS
            assert weights(job.checkpoint_root) == reference.weights
        assert fake.ask("left") == []
        assert fake.ask("switched_on") == []
        assert fake.ask("drifts") == []
        bill = fake.ask("bill")
        assert len(bill) == 3
        assert all(row["ended_at"] for row in bill)
