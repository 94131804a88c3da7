"""``launch --manager-vm`` on AWS's fake: the machine that launched the job may go away.

The manager's VM is an OpenSSH server on loopback with a home of its own, like those that
train; what lies in its home is gone when it ends.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.aws import CREDENTIALS, ZONE
from tests.fakes.object_store import S3, serve_s3
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import AwsVms, aws_vms
from tests.integration.jobs import Answer, Job, until

from spottrain.manifest import list_checkpoints
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.storage.open import open_store
from spottrain.varuna_manager.config.manager_vm import DEFAULTS, ManagerVmConfig
from spottrain.varuna_manager.jobs import manager_location

pytestmark = [
    pytest.mark.rotated(parts=[3]),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

STEPS = 80
SMALL = DEFAULTS["aws"].instance_type


class RemoteJob(Job):
    """A job whose manager goes to a VM of the fake."""

    def __init__(self, folder: Path, name: str, cloud: AwsVms, s3: S3) -> None:
        self.store = s3.url(name)
        super().__init__(
            folder,
            name,
            steps=STEPS,
            resources={"provider": "aws", "device": "cpu", "max_vms": 1},
            aws=cloud.section,
            manager_vm={
                "identity": "spottrain-manager",
                "image": "Deep Learning OSS *",
                "python": sys.executable,
            },
            checkpoint={"every_steps": 10, "path": self.store},
            secrets=["A_SECRET"],
            env={**CREDENTIALS, "PACE_FILE": str(folder / name / "pace")},
            manager={"suspect_s": 30.0},
        )
        self.environment |= CREDENTIALS | {"A_SECRET": "hunter2"}

    def status(self) -> dict[str, Any]:
        """Return what the manager says of the job, wherever it is."""
        answer = self.run("status", self.name, "-o", "json")
        assert answer.code == 0, answer.err
        return answer.report

    def there(self) -> str:
        """Return the VM of its manager."""
        found = manager_location.read(self.dir)
        assert found is not None
        return found.vm_id


@dataclass
class Story:
    """What came of the job."""

    cloud: AwsVms
    job: RemoteJob
    launched: Answer
    manager: str = ""
    """The VM of its manager."""
    training: dict[str, Any] = field(default_factory=dict)
    """Its status meanwhile."""
    url: str = ""
    """Where its agents called it."""
    log: str = ""
    held: list[str] = field(default_factory=list)
    """Files on its VM that hold a secret's value."""
    stopped: Answer | None = None
    left: list[str] = field(default_factory=list)
    """What was in the cloud after that."""
    cost: dict[str, Any] = field(default_factory=dict)
    bill: dict[str, Any] = field(default_factory=dict)
    resumed: Answer | None = None
    end: dict[str, Any] = field(default_factory=dict)
    left_at_last: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("far")
    with (
        serve_s3() as s3,
        aws_vms(folder / "aws") as cloud,
        RemoteJob(folder, "far", cloud, s3) as job,
    ):
        cloud.fake.ask("stock", zone=ZONE, instance_type=SMALL, count=1)
        cloud.fake.ask("instance_profile", name="spottrain-manager")
        job.pace(1.0)  # four losses a mini-batch: it is not over before it is stopped
        story = Story(cloud, job, job.launch("--manager-vm", "--detach"))
        assert story.launched.code == 0, story.launched.err
        train_and_stop(story)
        resume_elsewhere(story)
        assert cloud.fake.ask("drifts") == []
        yield story


def train_and_stop(story: Story) -> None:
    job, cloud = story.job, story.cloud
    story.manager = job.there()
    story.training = until("mini-batch 1", lambda: trains(job.status()))
    home = cloud.disks / story.manager.split(".")[1] / "home"
    there = home / ".spottrain" / "manager" / "state" / "jobs" / "far"
    story.url = json.loads((there / "manager.json").read_text())["url"]
    story.log = job.run("logs", "far").out
    files = [path for path in home.rglob("*") if path.is_file()]
    story.held = [str(path) for path in files if b"hunter2" in path.read_bytes()]
    story.stopped = job.run("stop", "far")
    story.left = cloud.fake.ask("left")
    story.cost = job.run("cost", "far", "-o", "json").report
    (story.bill,) = (
        one for one in cloud.fake.ask("bill") if one["tags"]["spottrain-intent"] == "manager"
    )


def trains(status: dict[str, Any]) -> dict[str, Any] | None:
    return status if status["step"] else None


def resume_elsewhere(story: Story) -> None:
    """Go on from the store, on a machine that never heard of the job."""
    job = story.job
    shutil.rmtree(job.environment["SPOTTRAIN_HOME"])
    job.pace(0.0)
    untrusted = job.run("resume", job.store.replace("?", "/job?"), "--detach")
    assert "is not known to be yours" in untrusted.err
    (line,) = (x for x in story.launched.err.splitlines() if "on another machine" in x)
    number = line.rpartition("--trust ")[2].strip()
    url = job.store.replace("?", "/job?")
    story.resumed = job.run("resume", url, "--trust", number, "--detach")
    assert story.resumed.code == 0, story.resumed.err
    until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
    story.end = job.run("report", "far", "-o", "json").report
    story.left_at_last = story.cloud.fake.ask("left")


def test_the_manager_is_on_a_vm_and_trains_though_its_launcher_has_ended(
    story: Story,
) -> None:
    assert "the manager of job far runs there" in story.launched.err
    assert "this machine may sleep" in story.launched.err
    assert story.training["state"] == "running"


def test_agents_reach_it_directly(story: Story) -> None:
    assert story.url.startswith("https://127.77.")  # the VM's own address
    assert "agent of aws.i-" in story.log
    assert "relays the calls" not in story.log


def test_values_of_secrets_are_written_down_nowhere_there(story: Story) -> None:
    assert story.held == []


def test_it_ends_its_own_vm_when_it_stops_and_nothing_is_left(story: Story) -> None:
    assert story.stopped is not None
    assert story.stopped.code == 0, story.stopped.err
    assert story.left == []


def test_its_vm_is_paid_for_to_the_second(story: Story) -> None:
    lived_s = story.bill["ended_at"] - story.bill["launched_at"]
    billed_s = max(60.0, lived_s)  # AWS's terms
    assert abs(story.cost["vm_seconds"]["manager"] - billed_s) <= 2.0
    (row,) = (one for one in story.cost["by_vm"] if one["vm"] == story.manager)
    usd_per_hour = DEFAULTS["aws"].usd_per_hour + catalogue().attached_usd_per_hour(
        "aws", ManagerVmConfig().disk_gib, public_address=True
    )
    usd = usd_per_hour * row["manager"] / 3600
    assert row["usd"] == pytest.approx(usd, rel=1e-3)


def test_it_goes_on_from_its_store_on_any_machine(story: Story) -> None:
    assert story.end["state"] == "succeeded"
    assert any(one["vm"] == story.manager for one in story.end["cost"]["by_vm"])
    store = open_store(story.job.store)
    assert list_checkpoints(store)[0].step == STEPS
    assert story.left_at_last == []
