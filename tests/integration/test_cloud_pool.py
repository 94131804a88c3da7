"""Jobs that share a pool on AWS's fake: VMs go from one to the other through the cloud."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.aws import CREDENTIALS, REGION
from tests.fakes.object_store import CREDENTIALS as KEYS
from tests.fakes.object_store import S3, bucket
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import AwsVms, aws_vms
from tests.integration.jobs import Answer, Job, trained_on, until, weights
from tests.integration.test_pool_hand_over import kill_at
from tests.integration.undisturbed import undisturbed
from tests.view import View

from spottrain.varuna_manager.core.model.records import OrderPhase
from spottrain.varuna_manager.pool.report.document import read_pool
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.pool.store.journal import PoolJournal

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

MAX_VMS = 3


class PooledJob(Job):
    """A job whose VMs come from a pool on AWS."""

    def __init__(self, folder: Path, name: str, s3: S3) -> None:
        super().__init__(
            folder,
            name,
            resources={"device": "cpu", "max_vms": 2},
            checkpoint={"every_steps": 10, "path": s3.url(f"jobs/{name}")},
            secrets=[*KEYS],
            env={"PACE_FILE": str(folder / name / "pace")},
            manager={"suspect_s": 30.0},
        )
        self.environment |= CREDENTIALS


@dataclass
class Story:
    """What came of two jobs."""

    first: PooledJob
    urgent: PooledJob
    pool: PoolDir
    refused: Answer | None = None
    """What a shell was told that had no secrets."""
    bill: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    drifts: list[str] = field(default_factory=list)

    def has(self, **vms: int) -> None:
        """Wait until jobs hold so many VMs, and train on all of them."""

        def hold() -> bool:
            jobs = read_pool(self.pool).jobs
            return all(
                sum(jobs[name].held) == len(trained_on(getattr(self, name).state())) == n
                for name, n in vms.items()
            )

        until(f"{vms}", hold, lambda: self.pool.log.read_text()[-3000:])

    def ended(self) -> bool:
        jobs = read_pool(self.pool).jobs.values()
        return all(job.phase.value == "ended" for job in jobs)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("pool")
    with aws_vms(folder / "aws") as cloud, bucket() as s3:
        pool = PoolDir(folder / "home" / "pools" / "lab")
        first, urgent = (PooledJob(folder, name, s3) for name in ("first", "urgent"))
        with first, urgent:
            yield lived_through(Story(first, urgent, pool), folder, cloud)


def lived_through(story: Story, folder: Path, cloud: AwsVms) -> Story:
    """Have an urgent job displace the first, the pool die, and the cloud take a VM."""
    first, urgent = story.first, story.urgent
    file = folder / "lab.yaml"
    file.write_text(json.dumps(pool_file(cloud)))
    for job in (first, urgent):
        job.pace(0.6)  # so that none is over before all has happened to it
    done = first.run("pool", "create", str(file))
    assert done.code == 0, done.err
    done = first.launch("--pool", "lab")
    assert done.code == 0, done.err
    story.has(first=2)
    done = urgent.launch("--pool", "lab", "--priority", "9")
    assert done.code == 0, done.err
    kill_at("first keeps a VM", first.manager_pid(), lambda: keeps(first))
    story.has(first=1, urgent=2)

    os.kill(int(story.pool.lock.read_text()), signal.SIGKILL)
    until("the daemon is gone", lambda: not story.pool.is_managed())
    instance_id = min(View(urgent.state()).vms).split(".")[1]
    cloud.fake.ask("interrupt", region=REGION, instance_id=instance_id)
    until("it is known", lambda: instance_id not in ids_of(urgent))
    ours = first.environment
    first.environment = {k: v for k, v in ours.items() if k not in KEYS}
    story.refused = first.run("pool", "resume", "lab")
    first.environment = ours
    assert first.run("pool", "resume", "lab").code == 0
    story.has(first=1, urgent=2)

    urgent.pace(0.0)
    kill_at("first asks for a VM", first.manager_pid(), lambda: asks(first))
    first.pace(0.0)
    until("the end of both", story.ended)
    story.bill, story.left = cloud.fake.ask("bill"), cloud.fake.ask("left")
    story.drifts = cloud.fake.ask("drifts")
    return story


def keeps(job: Job) -> bool:
    return any(vm.reserved_at_s is not None for vm in View(job.state()).vms.values())


def asks(job: Job) -> bool:
    orders = View(job.state()).orders.values()
    return any(order.phase is OrderPhase.ASKED for order in orders)


def ids_of(job: Job) -> list[str]:
    """Return the instances that a job holds."""
    return [vm_id.split(".")[1] for vm_id in View(job.state()).vms]


def pool_file(cloud: AwsVms) -> dict[str, Any]:
    return {
        "name": "lab",
        "clouds": "aws",
        "max_vms": MAX_VMS,
        "policy": "priority",
        "budget": {"max_usd": 100.0},
        "min_stay_s": 0.5,
        "aws": cloud.section,
    }


def test_both_end_as_if_each_had_been_alone(
    story: Story, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reference = undisturbed(tmp_path_factory).weights
    for job in (story.first, story.urgent):
        outcome = job.state().outcome
        assert outcome is not None
        assert outcome.kind == "succeeded", outcome
        assert weights(job.checkpoint_root) == reference


def test_a_pool_goes_on_only_with_the_secrets_of_its_jobs(story: Story) -> None:
    assert story.refused is not None
    assert story.refused.code == 2
    assert "secrets: " in story.refused.error


def test_the_cloud_never_has_more_vms_than_the_pool_may(story: Story) -> None:
    moments = [(one["launched_at"], 1) for one in story.bill]
    moments += [(one["ended_at"], -1) for one in story.bill]
    held = most = 0
    for _, change in sorted(moments):
        held += change
        most = max(most, held)
    assert most == MAX_VMS
    with closing(PoolJournal(story.pool.journal, read_only=True)) as journal:
        for _, step in journal.steps():
            jobs = step.after.jobs.values()
            # One that has moved counts twice until the job that kept it has looked.
            assert sum(sum(job.granted) for job in jobs) <= MAX_VMS


def test_the_bill_is_what_the_ledgers_say(story: Story) -> None:
    reports = [
        job.run("report", job.name, "-o", "json").report for job in (story.first, story.urgent)
    ]
    said_s = sum(report["cost"]["vm_seconds"]["billed"] for report in reports)
    lives_s = [one["ended_at"] - one["launched_at"] for one in story.bill]
    billed_s = sum(max(60, math.ceil(life_s)) for life_s in lives_s)  # AWS's terms
    # EC2 tells an end to the second, and that of a VM given back is when it agreed.
    assert abs(said_s - billed_s) <= 2 * len(story.bill)
    document = story.first.run("pool", "status", "lab", "-o", "json").report
    spent = sum(report["cost"]["usd_spent"] for report in reports)
    assert document["usd_spent"] == pytest.approx(spent, abs=3e-6)


def test_vms_moved_and_both_bills_meet_at_one_moment(story: Story) -> None:
    ledgers = [View(job.state()).ledger for job in (story.first, story.urgent)]
    lines = {vm_id: line for one in ledgers for vm_id, line in one.closed.items()}
    lives_s = {one["instance_id"]: one["ended_at"] - one["launched_at"] for one in story.bill}
    moved = [vm_id for vm_id in lines if vm_id.count(".") == 3]
    assert moved
    for vm_id in moved:
        machine, _, hops = vm_id.rpartition(".")
        before = machine if hops == "1" else f"{machine}.{int(hops) - 1}"
        assert lines[before].ended_us == lines[vm_id].from_us
    for machine in {vm_id.rpartition(".")[0] for vm_id in moved}:
        parts = [line for vm_id, line in lines.items() if vm_id.startswith(machine)]
        # The end of one that is given back is when EC2 agreed, to the second.
        billed_s = max(60.0, lives_s[machine.split(".")[1]])
        said_s = sum(line.billed_us(0) for line in parts) / 1e6
        assert said_s == pytest.approx(billed_s, abs=2.0)


def test_the_cloud_is_empty_afterwards(story: Story) -> None:
    assert story.left == []
    assert story.drifts == []
    assert len(story.bill) >= 4
    assert all(one["ended_at"] for one in story.bill)
