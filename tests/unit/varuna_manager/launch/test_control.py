"""Ending a job whose manager cannot be asked: nothing but that manager is killed."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.builders import a_vm, an_offer
from tests.unit.varuna_manager.jobs.test_folder import FACTS, config_for

from spottrain import machine
from spottrain.cloud.port.errors import NoCapacityError
from spottrain.cloud.port.provider import (
    CloudProvider,
    LaunchRequest,
    LaunchResult,
    Offer,
    Vm,
    VmState,
)
from spottrain.errors import ConfigError
from spottrain.manifest import (
    FileRecord,
    Manifest,
    config_fingerprint,
    read_owner,
    write_manifest,
)
from spottrain.storage.open import open_store
from spottrain.varuna_manager.core.model.events import OffersSeen, VmsListed
from spottrain.varuna_manager.core.model.settings import PoolGrant
from spottrain.varuna_manager.core.step import step
from spottrain.varuna_manager.jobs import manager_location
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import lag_line, read_state
from spottrain.varuna_manager.jobs.identity import ensure_identity
from spottrain.varuna_manager.jobs.journal import Journal, Step
from spottrain.varuna_manager.launch import asking, control, submit
from spottrain.varuna_manager.launch.asking import ManagerUnreachableError
from spottrain.varuna_manager.launch.control import end_job
from spottrain.wire.numerics import Numerics

STARTING = """
import signal, sys
from pathlib import Path
from spottrain.varuna_manager.daemon.main import ManagerError
from spottrain.varuna_manager.jobs.folder import JobDir
with JobDir(Path(sys.argv[1])).locked(ManagerError("there is another one")):
    print("held", flush=True)
    signal.pause()
"""
"""A manager that reads its journal, and answers nobody."""


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    (tmp_path / "train.py").touch()
    return submit.submit(config_for(tmp_path), FACTS)[0]


def test_a_job_without_a_manager_is_told_in_its_journal(job: JobDir) -> None:
    control.allow_from_scratch(job)
    assert read_state(job).preparation.from_scratch
    grant = PoolGrant(pool="lab", serial=1)
    control.give_grant(job, grant)
    assert read_state(job).job.grant == grant
    with pytest.raises(ConfigError, match=f"pool resume lab {job.name}"):
        control.resume_job(job)


def test_an_exact_job_does_not_go_on_on_another_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    place, cpu = str(tmp_path / "place"), tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPU_INFO", cpu)
    changes = {"reduction": "exact", "resources": {"device": "cpu"}, "checkpoint": {"path": place}}
    config = config_for(tmp_path, **changes)
    saved = Manifest(
        name="step-2-g1-00000000",
        step=2,
        num_sections=1,
        model_fingerprint=FACTS.fingerprint,
        config_fingerprint=config_fingerprint(config.job_spec(place)),
        seed=config.seed,
        minibatch_size=config.minibatch_size,
        files=(FileRecord(section=0, file="section-0.safetensors", num_bytes=0, sha256=""),),
        uid="",
        numerics=Numerics(kernels="EPYC with torch 2.13.0"),
    )
    write_manifest(open_store(place), saved)
    refused = "computed on EPYC with torch 2.13.0, others round differently: this machine has Xeon;"

    cpu.write_text("model name : Xeon\n")
    with pytest.raises(ConfigError, match=refused):
        submit.submit(config, FACTS, adopt=True)
    assert read_owner(open_store(place)) is None
    cpu.write_text("model name : EPYC\n")
    job, _ = submit.submit(config, FACTS, adopt=True)
    cpu.write_text("model name : Xeon\n")
    with pytest.raises(ConfigError, match=refused):
        control.resume_job(job)


@pytest.fixture
def stranger(job: JobDir) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the pid of a manager that was killed."""
    with subprocess.Popen(["sleep", "600"]) as stranger:
        address = {"pid": stranger.pid, "url": "https://127.0.0.1:9"}
        (job.path / "manager.json").write_text(json.dumps(address))
        (job.path / "manager.lock").write_text(str(stranger.pid))
        yield stranger
        stranger.kill()


def test_down_ends_a_manager_that_is_starting_and_nobody_else(
    job: JobDir, stranger: subprocess.Popen[bytes]
) -> None:
    with ExitStack() as stack:
        starting = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", STARTING, str(job.path)], stdout=subprocess.PIPE
            )
        )
        stack.callback(starting.kill)
        assert starting.stdout is not None
        assert starting.stdout.readline() == b"held\n"

        end_job(job)

        assert starting.wait() == -signal.SIGKILL
    assert job.is_down
    assert stranger.poll() is None


def test_down_kills_nobody_for_a_pid_that_the_holder_of_the_lock_did_not_write(
    job: JobDir,
    stranger: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 0.2)
    with open(job.path / "manager.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ManagerUnreachableError, match="by hand"):
            end_job(job)

    assert stranger.poll() is None
    end_job(job)
    assert job.is_down
    assert stranger.poll() is None


class LateCloud(CloudProvider):
    """A cloud that lists what was asked for only after a while."""

    name = "late"

    def __init__(self) -> None:
        self._vms = [a_vm("late", an_offer(), intent="intent-0")]
        self._times_listed = 0

    def offers(self) -> Sequence[Offer]:
        return ()

    def launch(self, request: LaunchRequest) -> LaunchResult:
        raise NoCapacityError("none")

    def list_vms(self, job: str) -> Sequence[Vm]:
        self._times_listed += 1
        return tuple(self._vms) if self._times_listed > 1 else ()

    def terminate(self, vm_ids: Collection[str]) -> None:
        self._vms = [
            replace(vm, state=VmState.TERMINATED, ended_at_s=time.time())
            if vm.vm_id in vm_ids
            else vm
            for vm in self._vms
        ]


def test_down_returns_vms_of_a_launch_that_was_never_answered(
    job: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Journal(job.journal)) as journal:
        state = journal.replay()
        for event in (
            VmsListed(at_s=time.time(), asked_at_s=time.time(), vms=()),
            OffersSeen(at_s=time.time(), offers=(an_offer(),)),
        ):
            before, (state, commands) = state, step(state, event)
            journal.append(Step(before, event, state, commands))
        assert journal.replay().launches.intents
    monkeypatch.setattr(control, "SETTLE_S", 0.0)
    monkeypatch.setattr(control, "LIST_S", 0.0)
    monkeypatch.setattr(control, "open_provider", lambda _: LateCloud())
    assert end_job(job) == 1
    assert read_state(job).history.ledger.closed.keys() == {"late"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": null, "url": 1}', "1e999"])
def test_an_address_that_is_damaged_is_none(job: JobDir, text: str) -> None:
    (job.path / "manager.json").write_text(text)

    assert job.manager() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"requests": 3}', "\\xff"])
def test_a_damaged_note_of_where_the_manager_runs_is_told(job: JobDir, text: str) -> None:
    job.remote_manager_file.write_text(text)
    with pytest.raises(ConfigError, match=r"away\.json is damaged"):
        manager_location.read(job)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}'])
def test_a_damaged_note_of_the_journals_copy_is_told(job: JobDir, text: str) -> None:
    job.copy_status.write_text(text)
    assert "copy.json is damaged" in lag_line(job, 0.0)


DYING = """
import json, os, sys
folder = sys.argv[1]
with open(folder + "/manager.json", "w") as file:
    json.dump({"pid": os.getpid(), "url": "https://127.0.0.1:9"}, file)
with open(folder + "/manager.log", "w") as file:
    file.write("error: no such thing\\n")
"""


def test_a_manager_that_dies_before_it_answers_has_not_started(job: JobDir) -> None:
    ensure_identity(job.path, ("127.0.0.1",))
    with (
        subprocess.Popen([sys.executable, "-c", DYING, str(job.path)]) as manager,
        pytest.raises(ManagerUnreachableError, match="no such thing"),
    ):
        asking.await_manager(job, manager)


def test_a_resume_beside_another_one_is_told_so(job: JobDir) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", STARTING, str(job.path)], stdout=subprocess.PIPE
        ) as first,
        subprocess.Popen(["false"]) as second,
    ):
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == b"held\n"
            with pytest.raises(ConfigError, match="another command"):
                asking.await_manager(job, second)
        finally:
            first.kill()
