"""A job on GCP's fake from the command line: rented, preempted without and with notice,
refilled, ended, empty.

As on AWS's (test_aws_job.py): VMs are OpenSSH servers on loopback with homes of their
own, and checkpoints are in a bucket.
"""

from __future__ import annotations

import getpass
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gcp import (
    CPU_KIND,
    PROJECT,
    REGION,
    VARIABLES,
    FakeGcp,
    running,
)
from tests.fakes.metadata import FakeMetadata
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
from tests.integration.undisturbed import Undisturbed, undisturbed
from tests.view import View

from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store
from spottrain.varuna_manager.core.model.state import State

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]


class GcpJob(Job):
    """A job that rents from the fake."""

    def __init__(self, folder: Path, name: str, fake: FakeGcp, port: int, s3: S3) -> None:
        super().__init__(
            folder,
            name,
            resources={"provider": "gcp", "device": "cpu", "max_vms": 2},
            gcp={
                "project": PROJECT,
                "regions": [REGION],
                "instance_types": [CPU_KIND],
                "endpoint": fake.url,
                "user": getpass.getuser(),
                "ssh_port": port,
                "ssh_from": ["192.0.2.0/24"],
                "python": sys.executable,
            },
            checkpoint={"every_steps": 10, "path": s3.url("jobs/on-gcp")},
            secrets=list(KEYS),
            env={"PACE_FILE": str(folder / name / "pace")},
            manager={"suspect_s": 30.0},
        )
        self.environment |= {name: os.environ[name] for name in VARIABLES}
        know_gcp_prices(Path(self.environment["SPOTTRAIN_HOME"]))


@dataclass
class Story:
    """What came of the job."""

    job: GcpJob
    vms: list[set[str]] = field(default_factory=list)
    """After the start and after each refill."""
    end: State | None = None
    told: dict[str, Any] = field(default_factory=dict)
    """What the fake says afterwards."""
    report: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder, port = tmp_path_factory.mktemp("gcp"), free_port()
    with running() as fake, metadata_service("gcp") as metadata:
        fake.reset()
        fake.ask("quota", metric="N2_CPUS", limit=8)
        machines = {"folder": str(folder / "disks"), "port": port}
        fake.ask("rent_machines", **machines, metadata_url=metadata.url_of(""))
        with bucket() as s3, GcpJob(folder, "on-gcp", fake, port, s3) as job:
            story = lived_through(job, fake, metadata)
            story.end = job.state()
            story.report = job.run("report", job.name, "-o", "json").report
            calls = ("bill", "left", "switched_on", "drifts")
            story.told = {call: fake.ask(call) for call in calls}
            story.told["drifts"] += metadata.ask("drifts")
            yield story
        fake.reset()


def lived_through(job: GcpJob, fake: FakeGcp, metadata: FakeMetadata) -> Story:
    """Launch the job, have the cloud take two VMs, and let it end."""
    job.pace(0.1)
    launched = job.launch("--detach")
    assert launched.code == 0, launched.err
    story = Story(job)
    state = job.until("two VMs", full_and_training)
    story.vms.append(set(View(state).vms))
    job.pace(0.3)  # so that the job is not over before all has happened to it
    evicted = min(View(state).vms)
    _, name, zone = evicted.split(".")
    fake.ask("preempt", zone=zone, name=name)
    state = job.until(
        "another VM in its place",
        lambda s: None if evicted in View(s).vms else full_and_training(s),
    )
    story.vms.append(set(View(state).vms))
    story.vms.append(set(View(take_with_notice(job, metadata)).vms))
    job.pace(0.0)
    until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
    return story


def test_it_trains_to_its_end_as_if_nothing_had_happened(
    story: Story, reference: Undisturbed
) -> None:
    assert story.end is not None
    assert story.end.outcome is not None
    assert story.end.outcome.kind == "succeeded", story.end.outcome
    assert list_checkpoints(open_store(story.job.checkpoint_root))[0].step == STEPS
    assert weights(story.job.checkpoint_root) == reference.weights
    expected = reference.answer.report["heldout_loss"]
    assert story.report["heldout_loss"] == expected


def test_the_fleet_refills_by_itself(story: Story) -> None:
    for before, after in itertools.pairwise(story.vms):
        assert len(before & after) == 1
        assert len(before) == len(after) == 2
    assert story.end is not None
    assert View(story.end).tally.preemptions_unnoticed == 1
    assert View(story.end).tally.preemptions_noticed == 1


def test_the_cloud_is_empty_afterwards(story: Story) -> None:
    assert story.told["left"] == []
    assert story.told["switched_on"] == []
    assert story.told["drifts"] == []
    assert len(story.told["bill"]) == 4
    assert all(one["ended_at"] for one in story.told["bill"])
