"""The manager's process over the local cloud: real time, real processes, no torch."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import tarfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_spec, model_facts
from tests.integration import stub_manager
from tests.integration.forks import Fork
from tests.integration.stub_supervisor import MAY_END
from tests.local_cloud import inject
from tests.unit.varuna_manager.invariants import check_invariants
from tests.view import View, settings_with

from spottrain.cloud.local.market import EventKind, MarketEvent, MarketSpec, ZoneSpec
from spottrain.cloud.port.provider import Vm, VmState
from spottrain.codec import encode
from spottrain.manifest import (
    MANIFEST_FILE,
    new_name,
    read_manifest,
    write_manifest,
)
from spottrain.storage.open import open_store
from spottrain.varuna_manager.core.model.events import JobSubmitted, VmsLaunched
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.starts import MAX_FAILED
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.daemon.main import ManagerError
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch.asking import request_stop
from spottrain.wire import messages

END_S = 900.0
ENDLESS = 100_000
"""Steps that no test waits for: ``Job.may_end`` ends them."""
TERMINATED = VmState.TERMINATED


class Job:
    """A submitted job, its manager processes and its cloud."""

    def __init__(
        self,
        path: Path,
        steps: int,
        max_vms: int,
        home: Path | None = None,
        device: messages.DeviceChoice = "auto",
        store: Path | None = None,
        suspect_s: float = END_S,
    ) -> None:
        path.mkdir(parents=True)
        self.store = store or path / "store"
        self.home = home or path / "home"
        self.dir = JobDir(path)
        tarfile.open(self.dir.workdir, "w:gz").close()
        zone = ZoneSpec(
            name="a",
            slot_memory_bytes=10**9,
            capacity=8,
            spot_usd_per_hour=1.0,
            on_demand_usd_per_hour=3.0,
        )
        (path / "market.json").write_text(encode(MarketSpec(zones=(zone,))))
        journal = Journal(self.dir.journal)
        wanted = settings(path, steps=steps, max_vms=max_vms)
        spec = replace(wanted.spec, device=device, checkpoint_path=str(self.store))
        wanted = settings_with(wanted, spec=spec, suspect_s=suspect_s)
        journal.record(JobSubmitted(at_s=time.time(), settings=wanted))
        journal.close()
        self.cloud = stub_manager.open_cloud(path)
        self.managers: list[Fork] = []

    def start(self, crash_at: int | None = None, **environment: str) -> Fork:
        """Start a manager; see ``stub_manager.py``."""
        arguments = [str(self.dir.path)]
        if crash_at is not None:
            arguments.append(str(crash_at))
        environment = {
            **os.environ,
            "SPOTTRAIN_HOME": str(self.home),
            **environment,
        }
        log = self.dir.log
        manager = Fork(stub_manager.main, arguments, environment, log, log)
        self.managers.append(manager)
        return manager

    def state(self) -> State:
        journal = Journal(self.dir.journal, read_only=True)
        try:
            return journal.replay()
        finally:
            journal.close()

    def wait_for(self, met: Callable[[State], bool]) -> State:
        """Follow the journal until ``met``."""
        follower = Follower(self.dir)
        try:
            give_up_at_s = time.monotonic() + END_S
            while time.monotonic() < give_up_at_s:
                for _ in follower.advance():
                    check_invariants(follower.state)
                    if met(follower.state):
                        return follower.state
                time.sleep(0.02)
            pytest.fail(f"{follower.state}\n{self.dir.log.read_text()[-4000:]}")
        finally:
            follower.close()

    def may_end(self) -> None:
        """Make the next step the last, however many are left."""
        (self.store / MAY_END).touch()

    def save_again(self, name: str) -> str:
        """Put a checkpoint into the store that nobody reports; return its name."""
        store = open_store(self.store)
        files = self.store / name
        again = replace(read_manifest(store, name), name=new_name(1, 1), step=1)
        shutil.copytree(files, files.with_name(again.name))
        (files.with_name(again.name) / MANIFEST_FILE).unlink()
        write_manifest(store, again)
        return again.name

    def progress(self) -> int:
        return int((self.store / "progress").read_text())

    def rented(self) -> list[Vm]:
        return list(self.cloud.list_vms("job"))

    def launched(self) -> list[str]:
        """VMs that the journal knows to have been rented, in order."""
        journal = Journal(self.dir.journal, read_only=True)
        events = [e for _, e in journal.read() if isinstance(e, VmsLaunched)]
        journal.close()
        return [vm.vm_id for event in events for vm in event.vms]

    def end(self) -> None:
        for manager in self.managers:
            manager.kill()
            manager.wait()
        self.cloud.shut_down()


def settings(path: Path, *, steps: int, max_vms: int) -> JobSettings:
    spec = a_spec(
        steps=steps,
        minibatch_size=1,
        microbatch_size=1,
        reduction="exact",
        checkpoint_path=str(path / "store"),
        checkpoint_every_steps=1000,
        lease_s=60.0,
        heartbeat_s=0.3,
    )
    facts = model_facts(fingerprint="stub", dataset_len=100)
    settings = JobSettings(uid=path.parent.name, spec=spec, facts=facts)
    return settings_with(settings, max_vms=max_vms, suspect_s=END_S, debounce_s=0.2)


MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[MakeJob]:
    jobs: list[Job] = []

    def make(steps: int = 50, max_vms: int = 2, **more: Any) -> Job:
        jobs.append(Job(tmp_path / f"{len(jobs)}" / "job", steps, max_vms, **more))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def is_training(state: State) -> bool:
    return View(state).step >= 5


def goes_on_without(taken: Collection[str], step: int) -> Callable[[State], bool]:
    """Whether two other VMs are all that is there, and one of them trains."""

    def goes_on(state: State) -> bool:
        view = View(state)
        return (
            view.step > step
            and view.current_generation is not None
            and view.generation.committed
            and len(view.vms) == 2
            and view.vms.keys().isdisjoint(taken)
        )

    return goes_on


def trainer(state: State) -> str:
    return View(state).generation.plan.slots[0].vm_id


def assert_ended_well(job: Job, manager: Fork) -> State:
    code = manager.wait(END_S)
    assert code == 0, job.dir.log.read_text()[-4000:]
    state = job.state()
    check_invariants(state)
    assert state.phase is JobPhase.ENDED
    assert View(state).step == state.job.spec.steps == job.progress()
    assert all(vm.state is TERMINATED for vm in job.rented())
    assert sorted(job.launched()) == sorted(vm.vm_id for vm in job.rented())
    return state


def trained(make_job: MakeJob, **options: float) -> tuple[Job, Fork]:
    """Return a job without an end once it trains, and its manager."""
    job = make_job(steps=ENDLESS, **options)
    manager = job.start()
    job.wait_for(is_training)
    return job, manager


def test_a_job_runs_to_its_end_and_leaves_nothing(make_job: MakeJob) -> None:
    job = make_job()
    state = assert_ended_well(job, job.start())
    assert len(job.rented()) == 2
    assert state.outcome is not None
    assert state.outcome.kind == "succeeded"
    assert View(state).progress.heldout_last == 0.5
    assert job.dir.manager() is None
    assert not job.dir.is_managed()
    port = int((job.dir.path / "port").read_text())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.rotated
def test_a_second_job_of_a_model_trains_without_measuring(
    make_job: MakeJob, tmp_path: Path
) -> None:
    measured, reused = "measured: forward", "profile of stub reused, measured "
    for kept in (False, True):
        job = make_job(steps=5, home=tmp_path / "home")
        assert_ended_well(job, job.start())
        log = job.dir.log.read_text()
        assert (measured in log, reused in log) == (not kept, kept)


@pytest.mark.rotated
def test_training_goes_on_whatever_the_market_takes(make_job: MakeJob) -> None:
    job = make_job(steps=ENDLESS, suspect_s=10.0)
    manager = job.start()
    state = job.wait_for(is_training)
    assert state.newest_checkpoint is not None
    unheard = job.save_again(state.newest_checkpoint.name)
    kinds: tuple[EventKind, ...] = ("notice", "kill", "silence")
    for kind in kinds:
        taken = inject(job.cloud, MarketEvent(at_s=0, kind=kind, count=2, lead_s=20.0))
        assert trainer(state) in taken
        state = job.wait_for(goes_on_without(taken, View(state).step))
        if kind == "kill":
            job.wait_for(lambda state: unheard in {c.name for c in View(state).checkpoints})
    job.may_end()
    state = assert_ended_well(job, manager)
    assert {i.interruption for i in View(state).interruptions} == set(kinds)
    assert View(state).tally.vms_launched == 2 * 4
    assert View(state).minibatches_recomputed == 0


def test_vms_train_on_without_a_manager_and_the_next_one_finds_them(make_job: MakeJob) -> None:
    job, first = trained(make_job)
    first.kill()
    first.wait()
    at_death = job.progress()
    while job.progress() < at_death + 50:
        time.sleep(0.02)
    job.may_end()
    state = assert_ended_well(job, job.start())
    assert len(job.rented()) == 2, "nothing was rented twice"
    assert len(View(state).generations) == 1, "training was not interrupted"


@pytest.mark.rotated
def test_kill_9_of_everything_is_resumed_from_the_newest_checkpoint(make_job: MakeJob) -> None:
    job, first = trained(make_job)
    first.kill()
    first.wait()
    job.cloud.shut_down()
    job.may_end()
    state = assert_ended_well(job, job.start())
    assert len(View(state).generations) == 2


@pytest.mark.rotated
def test_a_stopped_job_returns_its_vms_and_can_be_resumed(make_job: MakeJob) -> None:
    job, first = trained(make_job)
    request_stop(job.dir, checkpoint=True, now=False)
    first.wait(END_S)
    state = job.state()
    assert state.outcome is not None
    assert state.outcome.kind == "stopped"
    newest = state.newest_checkpoint
    assert newest is not None
    assert newest.step == View(state).step > 0
    assert all(vm.state is TERMINATED for vm in job.rented())
    job.may_end()
    assert_ended_well(job, job.start())


@pytest.mark.rotated
def test_a_job_whose_software_was_changed_on_disk_ends_with_the_reason(make_job: MakeJob) -> None:
    job = make_job(max_vms=1)
    manager = job.start(STUB_PATIENCE_S="60", STUB_VERSION="0.1.0+before")
    assert manager.wait(END_S) == 6
    outcome = job.state().outcome
    assert outcome is not None
    assert "was changed on this machine" in outcome.reason
    assert len(job.rented()) == MAX_FAILED
    assert all(vm.state is TERMINATED for vm in job.rented())


@pytest.mark.rotated
def test_stop_now_returns_vms_without_a_checkpoint(make_job: MakeJob) -> None:
    job, manager = trained(make_job)
    request_stop(job.dir, checkpoint=False, now=True)
    manager.wait(END_S)
    assert all(vm.state is TERMINATED for vm in job.rented())
    newest = job.state().newest_checkpoint
    assert newest is not None
    assert newest.step == 0


@pytest.mark.rotated
def test_sigterm_lets_vms_train_on(make_job: MakeJob) -> None:
    job, manager = trained(make_job)
    manager.terminate()
    assert manager.wait(END_S) == 128 + signal.SIGTERM
    at_death = job.progress()
    while job.progress() < at_death + 10:
        time.sleep(0.02)
    assert {vm.state for vm in job.rented()} == {VmState.RUNNING}


@pytest.mark.rotated
def test_a_manager_that_was_paused_blames_nobody(make_job: MakeJob) -> None:
    suspect_s = 10.0
    job, manager = trained(make_job, suspect_s=suspect_s)
    os.kill(manager.pid, signal.SIGSTOP)
    at_pause = job.progress()
    time.sleep(suspect_s + 1)  # what is tested is time that passes
    assert job.progress() > at_pause
    os.kill(manager.pid, signal.SIGCONT)
    job.may_end()
    state = assert_ended_well(job, manager)
    assert View(state).interruptions == ()
    assert len(job.rented()) == 2


@pytest.mark.rotated
def test_a_manager_that_dies_at_every_append_rents_nothing_twice(make_job: MakeJob) -> None:
    job = make_job(steps=600)
    for crash_at in itertools.count(1):
        manager = job.start(crash_at)
        if manager.wait(END_S) != -signal.SIGKILL:
            break
        check_invariants(job.state())
    assert crash_at > 10
    assert_ended_well(job, manager)
    assert len(job.rented()) == 2


@pytest.mark.rotated
def test_a_disk_that_refuses_the_journal_for_a_while_costs_nothing(make_job: MakeJob) -> None:
    job, manager = trained(make_job)
    with sqlite3.connect(job.dir.journal, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        while "trying again" not in job.dir.log.read_text():
            time.sleep(0.02)
        other.execute("ROLLBACK")
    other.close()
    job.may_end()
    state = assert_ended_well(job, manager)
    assert View(state).interruptions == ()


def test_a_job_never_has_two_managers(tmp_path: Path) -> None:
    job = JobDir(tmp_path)
    with job.locked(ManagerError("there is another one")):
        second = subprocess.run(job.command(), capture_output=True, text=True, check=False)
    assert second.returncode == ManagerError.exit_code
    assert "already has a manager" in second.stderr
