"""Jobs that share a pool, with its daemon, their managers and VMs as processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import STEPS, Job, trains, until, weights
from tests.integration.undisturbed import undisturbed
from tests.local_cloud import bill
from tests.view import View

from spottrain.varuna_manager.pool.core.model import PoolState
from spottrain.varuna_manager.pool.report.document import read_pool
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.pool.store.journal import PoolJournal

MAX_USD = 30.0
"""Pays for all VMs for as long as a grant: so much is set aside."""
PRICE = 3.6
"""A tenth of a cent a second for each VM."""
LEASE_S = 8.0


class Lab:
    """A pool of three VMs with two jobs."""

    def __init__(self, folder: Path, lease_s: float = LEASE_S) -> None:
        self.file = folder / "lab.yaml"
        zone = {"name": "a", "capacity": 3, "spot_usd_per_hour": PRICE}
        self.settings: dict[str, Any] = {
            "name": "lab",
            "max_vms": 3,
            "policy": "priority",
            "budget": {"max_usd": MAX_USD},
            "teams": {"vision": {"max_usd": 20.0}},
            "min_stay_s": 0.5,
            "lease_s": lease_s,
            "local": {"zones": [zone]},
        }
        self.write()
        self.dir = PoolDir(folder / "home" / "pools" / "lab")
        options: dict[str, Any] = {
            "manager": {"lease_s": lease_s},
            "resources": {"max_vms": 2},
        }
        self.first = Job(folder, "first", **options)
        self.urgent = Job(folder, "urgent", **options)
        for job in (self.first, self.urgent):
            job.environment["SPOTTRAIN_TEST_JOB"] = self.first.environment["SPOTTRAIN_TEST_JOB"]
        self.first.pace(0.3)  # the daemon has its environment, and so have all jobs

    def write(self) -> None:
        self.file.write_text(json.dumps(self.settings))

    def run(self, *arguments: str) -> Any:
        return self.first.run("pool", *arguments)

    def launch(self, job: Job, *options: str) -> Any:
        return job.launch("--pool", "lab", *options)

    def kill_daemon(self) -> None:
        os.kill(int(self.dir.lock.read_text()), signal.SIGKILL)
        until("the daemon is gone", lambda: not self.dir.is_managed())

    def has(self, **vms: int) -> None:
        """Wait until jobs hold so many VMs, and train on them."""

        def hold() -> bool:
            jobs = read_pool(self.dir).jobs
            return all(
                sum(jobs[name].held) == n and trains(self.state_of(name)) > 0
                for name, n in vms.items()
            )

        until(f"{vms}", hold, lambda: self.dir.log.read_text()[-3000:])

    def state_of(self, name: str) -> Any:
        return (self.first if name == "first" else self.urgent).state()

    def states(self) -> list[PoolState]:
        with closing(PoolJournal(self.dir.journal, read_only=True)) as journal:
            return [step.after for _, step in journal.steps()]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    try:
        yield lab
    finally:
        lab.first.kill_everything()


def refused(answer: Any, code: int, words: str) -> None:
    assert answer.code == code, answer.err
    assert words in answer.error


def submit_both(lab: Lab) -> None:
    first, urgent = lab.first, lab.urgent
    refused(lab.launch(first), 2, "no pool lab on this machine")
    assert lab.run("create", str(lab.file)).code == 0
    refused(lab.launch(first, "--team", "poets"), 2, "the pool has vision")
    assert not first.dir.path.exists(), "what is refused leaves nothing"
    assert lab.launch(first, "--team", "vision").code == 0
    refused(lab.launch(first), 2, "name: a job first")
    lab.has(first=2)
    before = {slot.vm_id for slot in View(first.state()).generation.plan.slots}
    planned = urgent.run("plan", str(urgent.file), "--pool", "lab", "-o", "json")
    assert planned.report["others"][0]["vms_before"] == {"local/cpu": 2}
    assert lab.launch(urgent, "--priority", "9").code == 0
    lab.has(first=1, urgent=2)
    until("one VM is left", lambda: len(View(first.state()).vms) == 1)
    (left,) = View(first.state()).vms
    assert left in before, "it shrank: what trains is one of the same VMs"
    refused(lab.run("down", "lab"), 2, "--yes ends them")


def check_money(lab: Lab) -> None:
    """Held and spent was never more than the caps, as the clouds' bills say."""
    document = lab.run("status", "lab", "-o", "json").report
    assert {job["state"] for job in document["jobs"]} == {"succeeded"}
    assert document["usd_spent"] <= MAX_USD
    bills = sum(bill(job.cloud, job.name) for job in (lab.first, lab.urgent))
    assert document["usd_spent"] == pytest.approx(bills, abs=3e-6)
    vms = [vm for j in (lab.first, lab.urgent) for vm in j.cloud.list_vms(j.name)]
    for vm in vms:  # most are there when one comes
        at_s = vm.launched_at_s
        ends = [o.ended_at_s for o in vms if o.launched_at_s <= at_s]
        assert sum(end is None or end > at_s for end in ends) <= 3
    for state in lab.states():
        assert sum(job.spent for job in state.jobs.values()) <= MAX_USD * 1e6


def ended(lab: Lab, name: str) -> bool:
    return read_pool(lab.dir).jobs[name].phase.value == "ended"


@pytest.mark.rotated(parts=[4, 9])
def test_two_jobs_share_three_vms_through_every_death(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, urgent = lab.first, lab.urgent
    submit_both(lab)
    lab.kill_daemon()
    refused(lab.launch(first), 1, "pool resume lab")
    os.kill(urgent.manager_pid(), signal.SIGKILL)
    assert lab.run("resume", "lab").code == 0
    urgent.market("kill", zone="a")
    lab.has(first=1, urgent=2)

    assert lab.run("pause", "lab", "urgent").code == 0
    lab.has(first=2)
    until("no manager", lambda: not urgent.dir.is_managed())
    assert lab.run("resume", "lab", "urgent").code == 0
    first.pace(0.0)
    for job in (first, urgent):
        until("its end", lambda job=job: ended(lab, job.name))  # type: ignore[misc]
    reference = undisturbed(tmp_path_factory).weights
    assert weights(first.checkpoint_root) == reference
    assert weights(urgent.checkpoint_root) == reference

    check_money(lab)
    page = lab.run("report", "lab")
    assert page.code == 0, page.err
    assert "VMs that each job held" in lab.dir.page.read_text()
    assert lab.run("down", "lab").code == 0
    assert not lab.dir.is_managed()


@pytest.mark.rotated(parts=[8])
def test_a_job_that_has_failed_goes_on_once_it_is_mended(
    lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = lab.first
    assert lab.run("create", str(lab.file)).code == 0
    assert lab.launch(job).code == 0
    lab.has(first=2)
    job.pace(-1.0)  # its loss raises
    until("its end", lambda: ended(lab, "first"))
    document = lab.run("status", "lab", "-o", "json").report
    assert [one["state"] for one in document["jobs"]] == ["failed"]
    refused(job.resume(), 2, "'spottrain pool resume lab first' continues it")
    job.pace(0.0)
    assert lab.run("resume", "lab", "first").code == 0
    until("its end", lambda: job.checkpoints()[0].step == STEPS and ended(lab, "first"))
    assert weights(job.checkpoint_root) == undisturbed(tmp_path_factory).weights
    document = lab.run("status", "lab", "-o", "json").report
    assert [one["state"] for one in document["jobs"]] == ["succeeded"]


@pytest.mark.rotated(parts=[6])
def test_a_sweep_submits_a_job_for_each_value_or_none(lab: Lab) -> None:
    job = lab.first
    job.pace(0.0)
    (words := job.folder / "words.txt").write_text("hello")
    job.settings |= {"entrypoint": "tiny_job:reading_job", "data": {"words": {"path": str(words)}}}
    job.save()
    assert lab.run("create", str(lab.file)).code == 0
    refused(job.run("sweep", str(job.file), "seed=1,2,x", "--pool", "lab"), 2, "seed: must be")
    refused(
        job.run("sweep", str(job.file), "seed=1", "--pool", "lab", "--team", "poets"),
        2,
        "the pool has vision",
    )
    assert not read_pool(lab.dir).jobs
    answer = job.run("sweep", str(job.file), "seed=1,2", "--pool", "lab", "--steps", "12")
    assert (answer.code, answer.out.split()) == (0, ["first-seed-1", "first-seed-2"]), answer.err
    for name in answer.out.split():
        until("its end", lambda name=name: ended(lab, name))  # type: ignore[misc]
    document = lab.run("status", "lab", "-o", "json").report
    assert {one["state"] for one in document["jobs"]} == {"succeeded"}


@pytest.mark.rotated(parts=[1])
def test_the_jobs_of_a_pool_file_train_until_the_last_has_ended(lab: Lab) -> None:
    first, urgent = lab.first, lab.urgent
    for job in (first, urgent):
        job.save()
    lab.settings["jobs"] = [
        {"file": str(first.file), "team": "vision"},
        {"file": str(urgent.file), "priority": 9, "after_steps": 1},
    ]
    lab.write()
    first.pace(0.0)
    done = lab.run("create", str(lab.file), "--until-done", "-o", "json")
    assert done.code == 0, done.err
    assert {job["state"] for job in done.report["jobs"]} == {"succeeded"}
    assert not lab.dir.is_managed()
