"""A job on AWS's fake from the command line: rented, evicted without and with notice,
refilled, ended, empty.

The fake's VMs are OpenSSH servers on loopback, each with a home of its own. They share no
folder with each other or the manager: checkpoints are in a bucket.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from tests.fakes.aws import CREDENTIALS, REGION
from tests.fakes.metadata import FakeMetadata
from tests.fakes.metadata import running as metadata_service
from tests.fakes.object_store import CREDENTIALS as KEYS
from tests.fakes.object_store import S3, bucket
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import AwsVms, aws_vms
from tests.integration.jobs import STEPS, Answer, Job, until, weights
from tests.integration.rented_jobs import full_and_training, take_with_notice
from tests.integration.undisturbed import Undisturbed
from tests.view import View

from spottrain.codec import encode
from spottrain.manifest import list_checkpoints
from spottrain.storage.open import open_store
from spottrain.varuna_manager.agent.client import ManagerClient, VmFencedError
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.identity import load_identity
from spottrain.wire import messages

pytestmark = [
    pytest.mark.rotated(parts=[0]),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

SECRET = "hunter2-hunter2-hunter2"
SETUP = """
[ ${#A_SECRET} = 23 ]
[ -f tiny_job.py ]
echo "$GREETING from setup"
"""


class AwsJob(Job):
    """A job that rents from the fake."""

    def __init__(self, folder: Path, name: str, cloud: AwsVms, s3: S3) -> None:
        super().__init__(
            folder,
            name,
            resources={"provider": "aws", "device": "cpu", "max_vms": 2},
            aws=cloud.section,
            checkpoint={"every_steps": 10, "path": s3.url("jobs/on-aws")},
            setup=SETUP,
            secrets=["A_SECRET", *KEYS],
            env={"GREETING": "hello", "PACE_FILE": str(folder / name / "pace")},
            manager={"suspect_s": 30.0},
        )
        self.environment |= CREDENTIALS | {"A_SECRET": SECRET}


@dataclass
class Story:
    """What came of the job."""

    job: AwsJob
    cloud: AwsVms
    launched: Answer
    vms: list[set[str]] = field(default_factory=list)
    """After the start, the refill, the manager's death and another refill."""
    dead_token: str = ""
    """How a manager answers a VM that was evicted."""
    foreign_token: str = ""
    """How it answers a VM that speaks for another."""
    argvs: list[bytes] = field(default_factory=list)
    """Command lines seen while VMs trained."""
    end: State | None = None
    bill: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    switched_on: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    drifts: list[str] = field(default_factory=list)
    """Of the cloud and its metadata service."""
    report: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("aws")
    with (
        metadata_service("aws") as metadata,
        aws_vms(folder / "aws", metadata_url=metadata.url_of("")) as cloud,
        bucket() as s3,
        AwsJob(folder, "on-aws", cloud, s3) as job,
    ):
        story = lived_through(job, cloud, metadata)
        job.pace(0.0)
        until("its end", lambda: not job.dir.is_managed(), lambda: job.tail(job.state()))
        story.end = job.state()
        story.report = job.run("report", job.name, "-o", "json").report
        ask = cloud.fake.ask
        story.bill, story.left = ask("bill"), ask("left")
        story.switched_on = ask("switched_on")
        story.drifts = ask("drifts") + metadata.ask("drifts")
        bodies = [dict(parse_qsl(one["body"])) for one in ask("requests")]
        story.requests = [text for body in bodies for text in body.values()]
        yield story


def lived_through(job: AwsJob, cloud: AwsVms, metadata: FakeMetadata) -> Story:
    """Launch the job, have the cloud take a VM, the manager die, and another VM go."""
    job.pace(0.1)
    story = Story(job, cloud, job.launch("--detach"))
    assert story.launched.code == 0, story.launched.err
    state = job.until("two VMs", full_and_training)
    story.vms.append(set(View(state).vms))

    job.pace(0.3)  # so that the job is not over before all has happened to it
    story.argvs = command_lines()
    evicted, survivor = sorted(View(state).vms)
    instance_id = evicted.split(".")[1]
    cloud.fake.ask("interrupt", region=REGION, instance_id=instance_id)
    state = job.until(
        "another VM in its place",
        lambda s: None if evicted in View(s).vms else full_and_training(s),
    )
    story.vms.append(set(View(state).vms))
    story.dead_token = answer_to(job, evicted, evicted)
    story.foreign_token = answer_to(job, survivor, evicted)

    job.kill_manager()
    step = View(job.state()).step
    assert job.resume("--detach").code == 0
    state = job.until("more steps", lambda s: s if View(s).step > step + 3 else None)
    story.vms.append(set(View(state).vms))

    job.pace(0.5)
    story.vms.append(set(View(take_with_notice(job, metadata, lead_s=120.0)).vms))
    return story


def answer_to(job: AwsJob, caller: str, named: str) -> str:
    """Return how the manager answers a VM that speaks for one."""
    identity, address = load_identity(job.dir.path), job.dir.manager()
    assert address is not None
    token = identity.vm_token(caller)
    client = ManagerClient(address.url, identity.ca_pem, token)
    batch = messages.ReportBatch(vm_id=named, first=0, reports=())
    try:
        client.call("POST", "/v1/reports", encode(batch))
    except VmFencedError as error:
        return str(error)
    finally:
        client.close()
    return "let in"


def command_lines() -> list[bytes]:
    """Return those of all processes of this machine."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    found = []
    for pid in pids:
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue  # it has ended
    return found


def test_it_trains_to_its_end(story: Story) -> None:
    assert story.end is not None
    assert story.end.outcome is not None
    assert story.end.outcome.kind == "succeeded", story.end.outcome
    assert list_checkpoints(open_store(story.job.checkpoint_root))[0].step == STEPS


def test_it_ends_as_if_nothing_had_happened(story: Story, reference: Undisturbed) -> None:
    assert weights(story.job.checkpoint_root) == reference.weights
    expected = reference.answer.report["heldout_loss"]
    assert story.report["heldout_loss"] == expected


def test_the_fleet_refills_by_itself(story: Story) -> None:
    for before, after in (story.vms[:2], story.vms[2:]):
        assert len(before & after) == 1
        assert len(before) == len(after) == 2
    assert story.end is not None
    assert View(story.end).tally.preemptions_noticed == 1
    assert View(story.end).tally.preemptions_unnoticed == 1


def test_a_manager_that_is_resumed_finds_its_vms_again(story: Story) -> None:
    assert story.vms[2] == story.vms[1]


def test_the_cloud_is_empty_afterwards(story: Story) -> None:
    assert story.left == []
    assert story.switched_on == []
    assert len(story.bill) == 4
    assert all(one["ended_at"] for one in story.bill)


def test_every_request_fits_the_model(story: Story) -> None:
    assert story.drifts == []


def test_the_bill_is_what_the_ledger_says(story: Story) -> None:
    lives_s = [one["ended_at"] - one["launched_at"] for one in story.bill]
    billed_s = sum(max(60, math.ceil(life_s)) for life_s in lives_s)  # AWS's terms
    said_s = story.report["cost"]["vm_seconds"]["billed"]
    # EC2 tells an end to the second, and that of a VM given back is when it agreed.
    assert abs(said_s - billed_s) <= 2 * len(story.bill)


def test_a_token_works_for_its_vm_alone_and_dies_with_it(story: Story) -> None:
    assert "another VM" in story.foreign_token
    assert story.dead_token not in ("", "let in")


def test_setup_ran_once_a_vm_and_logs_are_kept(story: Story) -> None:
    logs = sorted(story.job.dir.cloud.glob("vms/*/setup.log"))
    # On a busy machine a slow VM may have been replaced.
    assert {log.parent.name for log in logs} >= story.vms[2] | story.vms[3]
    assert {log.read_text() for log in logs} == {"hello from setup\n"}


def secrets_of(story: Story) -> list[str]:
    identity = load_identity(story.job.dir.path)
    private_key = (story.job.dir.cloud / "ssh_key").read_text().splitlines()
    vms = set.union(*story.vms)
    return [
        SECRET,
        private_key[2],
        identity.admin_token(),
        *(identity.vm_token(vm_id) for vm_id in vms),
    ]


def test_no_secret_is_in_what_the_cloud_or_other_processes_see(story: Story) -> None:
    assert len(story.argvs) > 10
    assert any("spottrain-job" in text for text in story.requests)
    for secret in secrets_of(story):
        assert not any(secret.encode() in words for words in story.argvs)
        assert not any(secret in text for text in story.requests)


def test_no_secret_is_in_logs_or_state(story: Story) -> None:
    own = {"ssh_key", "identity.pem"}
    files = [x for x in story.job.dir.path.rglob("*") if x.is_file()]
    files = [x for x in files if x.name not in own]
    assert len(files) > 5
    for secret in secrets_of(story):
        holders = [x.name for x in files if secret.encode() in x.read_bytes()]
        assert holders == []
