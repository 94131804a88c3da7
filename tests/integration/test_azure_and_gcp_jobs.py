"""A job on the fakes of Azure and GCP from the command line: rented, evicted without and with
notice, refilled, ended, empty.

As on AWS's (test_aws_job.py): VMs are OpenSSH servers on loopback with homes of their
own, and checkpoints are in a bucket.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import azure, gcp
from tests.fakes.azure_world import SUBSCRIPTION
from tests.fakes.metadata import running as metadata_service
from tests.fakes.object_store import CREDENTIALS as KEYS
from tests.fakes.object_store import S3, bucket
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import free_port
from tests.integration.jobs import STEPS, Job, until, weights
from tests.integration.rented_jobs import (
    full_and_training,
    know_gcp_prices,
    take_with_notice,
)
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.manifest import list_checkpoints
from spottrain.pricing.prices.sources.registry import AZURE_URL
from spottrain.storage.open import open_store

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


class CloudJob(Job):
    """A job that rents two VMs of a cloud's fake."""

    def __init__(
        self, folder: Path, provider: str, section: dict[str, Any], port: int, s3: S3
    ) -> None:
        name = f"on-{provider}"
        machines = {
            "user": getpass.getuser(),
            "ssh_port": port,
            "ssh_from": ["192.0.2.0/24"],
            "python": sys.executable,
        }
        super().__init__(
            folder,
            name,
            resources={"provider": provider, "device": "cpu", "max_vms": 2},
            checkpoint={"every_steps": 10, "path": s3.url(f"jobs/{name}")},
            secrets=list(KEYS),
            env={"PACE_FILE": str(folder / name / "pace")},
            manager={"suspect_s": 30.0},
            **{provider: section | machines},
        )


@dataclass(frozen=True)
class Rented:
    """A job, the fake that it rents from, and how that evicts a VM."""

    job: Job
    fake: azure.FakeAzure | gcp.FakeGcp
    evict: Callable[[str], Any]
    notice: dict[str, float]


@contextmanager
def on_azure(folder: Path, port: int, s3: S3) -> Iterator[Rented]:
    with azure.running() as fake:
        section = {
            "subscription": SUBSCRIPTION,
            "regions": [azure.REGION],
            "instance_types": [azure.CPU_KIND],
            "endpoint_url": fake.url,
            "authority_url": fake.url,
        }
        with CloudJob(folder, "azure", section, port, s3) as job:
            job.environment |= {name: os.environ[name] for name in azure.CREDENTIALS}
            job.environment[AZURE_URL] = fake.ask("prices_url")
            job.environment["REQUESTS_CA_BUNDLE"] = fake.ca_file
            fake.reset()
            yield Rented(
                job,
                fake,
                lambda vm_id: fake.ask("evict", name=vm_id.split(".")[1]),
                {"lead_s": 120.0},
            )


@contextmanager
def on_gcp(folder: Path, port: int, s3: S3) -> Iterator[Rented]:
    with gcp.running() as fake:
        section = {
            "project": gcp.PROJECT,
            "regions": [gcp.REGION],
            "instance_types": [gcp.CPU_KIND],
            "endpoint": fake.url,
        }

        def preempt(vm_id: str) -> None:
            _, name, zone = vm_id.split(".")
            fake.ask("preempt", zone=zone, name=name)

        with CloudJob(folder, "gcp", section, port, s3) as job:
            job.environment |= {name: os.environ[name] for name in gcp.VARIABLES}
            know_gcp_prices(Path(job.environment["SPOTTRAIN_HOME"]))
            fake.reset()
            fake.ask("quota", metric="N2_CPUS", limit=8)
            yield Rented(job, fake, preempt, {})


CLOUDS = {"azure": on_azure, "gcp": on_gcp}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_job_outlives_evictions_and_leaves_an_empty_cloud(
    tmp_path: Path, reference: Undisturbed, cloud: str
) -> None:
    port = free_port()
    with (
        metadata_service(cloud) as metadata,
        bucket() as s3,
        CLOUDS[cloud](tmp_path, port, s3) as rented,
    ):
        job, fake = rented.job, rented.fake
        machines = {"folder": str(tmp_path / "disks"), "port": port}
        fake.ask("rent_machines", **machines, metadata_url=metadata.url_of(""))
        job.pace(0.1)
        launched = job.launch("--detach")
        assert launched.code == 0, launched.err
        before = set(View(job.until("two VMs", full_and_training)).vms)
        job.pace(0.3)  # so that it is not over before all has happened to it
        evicted = min(before)
        rented.evict(evicted)
        state = job.until(
            "another VM in its place",
            lambda s: None if evicted in View(s).vms else full_and_training(s),
        )
        assert len(before & set(View(state).vms)) == 1
        take_with_notice(job, metadata, **rented.notice)
        job.pace(0.0)
        until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
        end = job.state()
        assert end.outcome is not None
        assert end.outcome.kind == "succeeded", end.outcome
        assert View(end).tally.preemptions_unnoticed == 1
        assert View(end).tally.preemptions_noticed == 1
        assert list_checkpoints(open_store(job.checkpoint_root))[0].step == STEPS
        assert weights(job.checkpoint_root) == reference.weights
        report = job.run("report", job.name, "-o", "json").report
        assert report["heldout_loss"] == reference.answer.report["heldout_loss"]
        assert fake.ask("left") + fake.ask("switched_on") == []
        assert fake.ask("drifts") + metadata.ask("drifts") == []
        bill = fake.ask("bill")
        assert len(bill) == 4
        assert all(row["ended_at"] for row in bill)
        fake.reset()
