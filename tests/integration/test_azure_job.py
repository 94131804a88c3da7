"""A job on Azure's fake from the command line: rented, evicted without and with notice,
refilled, ended, empty.

As on AWS's (test_aws_job.py): VMs are OpenSSH servers on loopback with homes of their
own, and checkpoints are in a bucket.
"""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

import pytest
from tests.fakes.azure import CPU_KIND, CREDENTIALS, REGION, FakeAzure, running
from tests.fakes.azure_world import SUBSCRIPTION
from tests.fakes.metadata import running as metadata_service
from tests.fakes.object_store import CREDENTIALS as KEYS
from tests.fakes.object_store import S3, bucket
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import free_port
from tests.integration.jobs import STEPS, Job, until, weights
from tests.integration.rented_jobs import full_and_training, take_with_notice
from tests.integration.undisturbed import Undisturbed, undisturbed
from tests.view import View

from spottrain.manifest import list_checkpoints
from spottrain.pricing.prices.sources.registry import AZURE_URL
from spottrain.storage.open import open_store

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


class AzureJob(Job):
    """A job that rents from the fake."""

    def __init__(self, folder: Path, fake: FakeAzure, port: int, s3: S3) -> None:
        super().__init__(
            folder,
            "on-azure",
            resources={"provider": "azure", "device": "cpu", "max_vms": 2},
            azure={
                "subscription": SUBSCRIPTION,
                "regions": [REGION],
                "instance_types": [CPU_KIND],
                "endpoint_url": fake.url,
                "authority_url": fake.url,
                "user": getpass.getuser(),
                "ssh_port": port,
                "ssh_from": ["192.0.2.0/24"],
                "python": sys.executable,
            },
            checkpoint={"every_steps": 10, "path": s3.url("jobs/on-azure")},
            secrets=list(KEYS),
            env={"PACE_FILE": str(folder / "on-azure" / "pace")},
            manager={"suspect_s": 30.0},
        )
        self.environment |= {name: os.environ[name] for name in CREDENTIALS}
        self.environment[AZURE_URL] = fake.ask("prices_url")
        self.environment["REQUESTS_CA_BUNDLE"] = fake.ca_file


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory)


def test_a_job_outlives_evictions_and_leaves_an_empty_cloud(
    tmp_path: Path, reference: Undisturbed
) -> None:
    port = free_port()
    with running() as fake, metadata_service("azure") as metadata:
        fake.reset()
        machines = {"folder": str(tmp_path / "disks"), "port": port}
        fake.ask("rent_machines", **machines, metadata_url=metadata.url_of(""))
        with bucket() as s3, AzureJob(tmp_path, fake, port, s3) as job:
            job.pace(0.1)
            launched = job.launch("--detach")
            assert launched.code == 0, launched.err
            before = set(View(job.until("two VMs", full_and_training)).vms)
            job.pace(0.3)  # so that it is not over before all has happened to it
            evicted = min(before)
            fake.ask("evict", name=evicted.split(".")[1])
            state = job.until(
                "another VM in its place",
                lambda s: None if evicted in View(s).vms else full_and_training(s),
            )
            assert len(before & set(View(state).vms)) == 1
            take_with_notice(job, metadata, lead_s=120.0)
            job.pace(0.0)
            until(
                "its end",
                lambda: not job.dir.is_managed(),
                lambda: job.tail(job.state()),
            )
            end = job.state()
            assert end.outcome is not None
            assert end.outcome.kind == "succeeded", end.outcome
            assert View(end).tally.preemptions_unnoticed == 1
            assert View(end).tally.preemptions_noticed == 1
            assert list_checkpoints(open_store(job.checkpoint_root))[0].step == STEPS
            assert weights(job.checkpoint_root) == reference.weights
        assert fake.ask("left") + fake.ask("switched_on") == []
        assert fake.ask("drifts") + metadata.ask("drifts") == []
        bill = fake.ask("bill")
        assert len(bill) == 4
        assert all(row["ended_at"] for row in bill)
