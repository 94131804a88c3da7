"""Losses, notices and stops while something beside a manager takes without end.

Nobody ever lets it go: whatever waited for it would never happen.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.builders import model_facts
from tests.fakes.held_s3 import HeldS3
from tests.integration.test_manager_process import (
    ENDLESS,
    TERMINATED,
    Job,
    is_training,
    trainer,
)
from tests.local_cloud import inject
from tests.view import View

from spottrain.cloud.local.market import MarketEvent
from spottrain.codec import encode
from spottrain.manifest import Owner, write_owner
from spottrain.storage.open import open_store
from spottrain.varuna_manager.agent.client import ManagerClient, NoManagerError
from spottrain.varuna_manager.config.job import parse_config
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.launch.asking import request_stop
from spottrain.wire.messages import LogTail, LogTails

WRITERS = 16
"""More than the threads that a manager on a small machine has for its own work."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "job", ENDLESS, 3, suspect_s=10.0)
    yield job
    job.end()


def keep_in(job: Job, s3: HeldS3) -> None:
    """Have a manager copy the journal and what is measured to a bucket."""
    asked = {
        "name": "job",
        "entrypoint": "train:job",
        "minibatch_size": 1,
        "steps": ENDLESS,
        "checkpoint": {"path": s3.url("job")},
    }
    job.dir.write(parse_config(asked, "job.yaml"), model_facts(fingerprint="stub"))
    write_owner(open_store(s3.url("job")), Owner(uid=uid_of(job.dir), name="job"))


def assert_goes_on(job: Job) -> None:
    """A VM is lost, another one gets a notice, and the job is stopped."""
    state = job.state()
    for kind in ("kill", "notice"):
        taken: tuple[str, ...] = ()
        while trainer(state) not in taken:
            step = View(state).step
            taken += inject(job.cloud, MarketEvent(at_s=0, kind=kind, count=1, lead_s=20.0))
        state = job.wait_for(trains_without(taken, step))
    request_stop(job.dir, checkpoint=True, now=False)
    state = job.wait_for(lambda now: now.phase is JobPhase.ENDED)
    assert state.outcome is not None
    assert state.outcome.kind == "stopped"
    assert state.newest_checkpoint is not None
    assert state.newest_checkpoint.step == View(state).step > step
    assert View(state).minibatches_recomputed == 0
    assert all(vm.state is TERMINATED for vm in job.rented())


def trains_without(taken: tuple[str, ...], step: int) -> Callable[[State], bool]:
    def trains(state: State) -> bool:
        view = View(state)
        generation = view.current_generation
        return (
            view.step > step
            and generation is not None
            and generation.committed
            and trainer(state) not in taken
        )

    return trains


@pytest.mark.rotated
def test_a_tracker_that_never_ends_holds_nothing_up(job: Job, s3: HeldS3) -> None:
    keep_in(job, s3)
    s3.hold(lambda method, key: key.endswith("metrics.jsonl"))
    job.start()
    s3.until_held("metrics.jsonl")
    job.wait_for(is_training)
    assert_goes_on(job)
    assert s3.waiting, "nothing was let go"


@pytest.mark.rotated
@pytest.mark.parametrize("methods", ["PUT", "GET PUT DELETE POST HEAD"])
def test_a_bucket_that_takes_no_copy_of_the_journal_holds_nothing_up(
    job: Job, s3: HeldS3, methods: str
) -> None:
    keep_in(job, s3)
    job.start()
    job.wait_for(is_training)
    s3.hold(lambda method, key: method in methods.split())
    s3.until_held("")
    assert_goes_on(job)
    assert s3.waiting, "nothing was let go"


@pytest.mark.rotated
def test_logs_that_cannot_be_written_hold_nothing_up(job: Job, tmp_path: Path) -> None:
    """As VMs elsewhere send them, to a disk that does not take them."""
    job.start()
    state = job.wait_for(is_training)
    (vm_id, *_) = (vm for vm in View(state).vms if vm != trainer(state))
    folder = job.dir.cloud / "vms" / vm_id
    agent = json.loads((folder / "agent.json").read_text())
    (folder / "agent.json").unlink()  # its logs are not here
    os.mkfifo(tmp_path / "slow")
    os.link(tmp_path / "slow", folder / "slow")
    logs = LogTails(vm_id=vm_id, logs=(LogTail(name="slow", text="said"),))

    def send() -> None:
        client = ManagerClient(agent["manager_url"], agent["ca_pem"], agent["token"])
        with closing(client), suppress(NoManagerError):
            client.call("POST", "/v1/logs", encode(logs))

    senders = [threading.Thread(target=send) for _ in range(WRITERS)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert_goes_on(job)
    assert (tmp_path / "slow").read_bytes() == b"said", "somebody still waits to write"
