"""The supervisor as a process: what it does with what it is told."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tests.builders import a_run
from tests.fakes.gpus import facts
from tests.integration.fleet import (
    DEADLINE_S,
    HERE,
    Fleet,
    MachineGone,
    Zygote,
    make_plan,
)
from tests.integration.struck_runs import NUM_SECTIONS, job_spec

from spottrain.codec import decode, encode
from spottrain.machine import SUPERVISOR_VARIABLES
from spottrain.pipeline.process.greeting import Greeting
from spottrain.wire import messages


@pytest.fixture
def fleet(zygote: Zygote, tmp_path: Path) -> Iterator[Fleet]:
    slow = {"TINY_SLEEP_S": "0.1"}
    with Fleet(job_spec(tmp_path), "a", tmp_path / "log", zygote, slow) as fleet:
        fleet.ready()
        yield fleet


def test_a_command_that_comes_twice_is_obeyed_once(fleet: Fleet) -> None:
    checkpoint = fleet.initialise()
    fleet.generation = 1
    first = fleet.open_store("a")
    assert fleet.open_store("a") == first
    plan = make_plan(fleet.spec, 1, 1, "a", NUM_SECTIONS)
    command = a_run(plan, store=first, checkpoint=checkpoint)

    fleet.machines["a"].send(command)
    fleet.machines["a"].send(command)

    assert fleet.wait_for_end({"a"})
    fleet.machines["a"].send(messages.Calibrate())  # its answer comes after any other
    fleet.wait_for("profile", lambda _, r: isinstance(r, messages.Calibrated) or None)
    started = [r for _, r in fleet.history if isinstance(r, messages.GenerationStarted)]
    assert len(started) == 1


def test_a_store_is_reached_at_its_address_alone_and_ends_once_training_runs(
    fleet: Fleet,
) -> None:
    checkpoint = fleet.initialise()
    fleet.generation = 1
    host, port = fleet.open_store("a")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    plan = make_plan(fleet.spec, 1, 1, "a", NUM_SECTIONS)
    with socket.create_connection((host, port), timeout=DEADLINE_S) as stranger:
        fleet.machines["a"].send(a_run(plan, store=(host, port), checkpoint=checkpoint))
        fleet.wait_for_step(1)

        assert stranger.recv(1) == b""  # its other end is gone


def test_abandoned_workers_die_and_their_memory_stays(fleet: Fleet) -> None:
    checkpoint = fleet.initialise()
    plan = make_plan(fleet.spec, 1, 1, "a", NUM_SECTIONS)
    fleet.run(plan, checkpoint)
    fleet.wait_for_step(1)

    fleet.machines["a"].send(messages.AbandonGeneration(generation=1))
    fleet.wait_for("death", lambda _, r: isinstance(r, messages.WorkerDied) or None)
    fleet.generation = 2
    fleet.open_store("a")
    leader = fleet.machines["a"].pid
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    assert len(children) >= 2, "beside the store a successor waits"
    fleet.run(plan, "step-0-g0-00000000")  # which does not exist: memory must do
    assert fleet.wait_for_end({"a"})

    last = [r for _, r in fleet.history if isinstance(r, messages.GenerationStarted)][-1]
    assert (last.sections_loaded, last.step >= 1) == (0, True)


@pytest.mark.rotated
def test_an_abandoned_generation_never_begins(fleet: Fleet) -> None:
    checkpoint = fleet.initialise()
    fleet.machines["a"].send(messages.AbandonGeneration(generation=1))

    fleet.run(make_plan(fleet.spec, 1, 1, "a", NUM_SECTIONS), checkpoint)

    assert not fleet.wait_for_end({"a"})
    assert not any(isinstance(r, messages.GenerationStarted) for _, r in fleet.history)


def test_a_checkpoint_that_cannot_be_read_is_named(fleet: Fleet, tmp_path: Path) -> None:
    checkpoint = fleet.initialise()
    damaged = tmp_path / "checkpoints" / checkpoint / "section-2.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])

    fleet.run(make_plan(fleet.spec, 1, 1, "a", NUM_SECTIONS), checkpoint)
    fleet.wait_for_end({"a"})

    reports = [r for _, r in fleet.history if isinstance(r, messages.CheckpointDamaged)]
    assert [r.name for r in reports] == [checkpoint]
    assert "section-2.safetensors" in reports[0].reason


def test_retiring_ends_every_process(fleet: Fleet) -> None:
    fleet.run(make_plan(fleet.spec, 1, 1, "a", NUM_SECTIONS), fleet.initialise())
    fleet.wait_for_step(1)

    fleet.machines["a"].send(messages.Retire())

    fleet.wait_for("end", lambda _, r: isinstance(r, MachineGone) or None)


def test_killing_the_supervisor_ends_its_workers_and_stores(fleet: Fleet) -> None:
    fleet.run(make_plan(fleet.spec, 1, 1, "a", NUM_SECTIONS), fleet.initialise())
    fleet.wait_for_step(1)
    fleet.generation = 2
    fleet.open_store("a")
    leader = fleet.machines["a"].pid
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    assert len(children) >= 2  # the store before may still be ending

    pidfds = [os.pidfd_open(int(pid)) for pid in children]
    fleet.machines["a"].kill_leader()

    for pidfd in pidfds:
        assert select.select([pidfd], [], [], DEADLINE_S)[0], "a child lives on"
        os.close(pidfd)


def greeting_of(spec: messages.JobSpec, **more: object) -> str:
    greeting = {
        **more,
        "spec": json.loads(encode(spec)),
        "workdir": str(HERE),
        "num_slots": 1,
        "private_address": "127.0.0.1",
        "vm_id": "a",
    }
    return json.dumps(greeting)


SPEAKING_AND_DYING = """
import json, os, select, signal, sys
from spottrain.pipeline.process.greeting import Greeting
from spottrain.pipeline.process.supervisor import Supervisor
from spottrain.wire import messages
from spottrain.codec import decode, encode

def worker(connection):
    select.select([connection], [], [])  # a command that nobody will read
    report = messages.Evaluated(generation=1, step=2, loss=3.0)
    connection.sendall(json.dumps({"report": encode(report)}).encode())
    connection.sendall(json.dumps({"open": "control", "bytes": 8}).encode())
    os.kill(os.getpid(), signal.SIGKILL)

supervisor = Supervisor(decode(Greeting, sys.argv[1]), 1, None)
child = supervisor._fork("worker of slot 0", worker, 0)
child.connection.sendall(b"{}")
select.select([child.pidfd], [], [])
supervisor._receive(child, died=True)
"""


def test_a_dead_worker_is_heard_to_the_end_and_takes_nobody_with_it(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPEAKING_AND_DYING, greeting_of(job_spec(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        check=True,
    )

    reports = [decode(messages.Report, line) for line in done.stdout.splitlines()]
    assert [report.kind for report in reports] == ["evaluated", "worker_died"]


def run_supervisor(
    spec: messages.JobSpec,
    folder: Path,
    commands: list[messages.Command],
    **greeting: object,
) -> list[messages.Report]:
    """Start a real supervisor, send commands, close its stdin once they are done."""
    lines = [greeting_of(spec, **greeting), *map(encode, commands)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "spottrain.pipeline.process.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **SUPERVISOR_VARIABLES},
        )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        process.stdin.flush()
        reports = []
        for line in process.stdout:
            report = decode(messages.Report, line)
            if isinstance(report, messages.SectionPrepared):
                continue
            reports.append(report)
            if len(reports) == 1 + len(commands):
                # Nothing is awaited any more.
                process.stdin.close()
    assert process.returncode == 0
    return reports


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("threaded_job", "starts threads"),
        pytest.param("poisoned_job", "asks torch about GPUs", marks=pytest.mark.rotated),
        pytest.param("cuda_job", "uses CUDA", marks=pytest.mark.rotated),
    ],
)
def test_a_module_that_makes_forks_unsafe_is_loaded_in_workers_only(
    tmp_path: Path, module: str, why: str
) -> None:
    spec = replace(job_spec(tmp_path), entrypoint=f"{module}:job")

    reports = run_supervisor(spec, tmp_path, [messages.Initialise()])

    assert [report.kind for report in reports] == [
        "supervisor_ready",
        "checkpoint_saved",
    ]
    assert isinstance(reports[0], messages.SupervisorReady)
    (warning,) = reports[0].warnings
    assert warning.startswith(f"{module}:job {why} when it is loaded: each worker loads it by")


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ("nothing_here:job", "nothing_here"),
        pytest.param("tiny_job:nothing", "nothing", marks=pytest.mark.rotated),
    ],
)
def test_an_entrypoint_that_cannot_be_loaded_is_the_users_error(
    tmp_path: Path, entrypoint: str, message: str
) -> None:
    spec = replace(job_spec(tmp_path), entrypoint=entrypoint)

    (report,) = run_supervisor(spec, tmp_path, [])

    assert isinstance(report, messages.UserCodeFailed)
    assert message in report.message


@pytest.mark.rotated
@pytest.mark.skipif(bool(torch.version.cuda), reason="this torch is built for GPUs")
def test_a_torch_for_cpus_makes_a_vm_with_gpus_unfit(tmp_path: Path) -> None:
    gpu = asdict(facts())
    devices = ["cuda:" + gpu["uuid"]]

    (report,) = run_supervisor(job_spec(tmp_path), tmp_path, [], gpus=[gpu], devices=devices)

    assert isinstance(report, messages.VmUnfit)
    assert "this torch is built for CPUs: install PyPI's torch" in report.reason


@pytest.mark.rotated
def test_a_greeting_says_what_each_slot_drives(tmp_path: Path) -> None:
    spec = job_spec(tmp_path)
    plain = decode(Greeting, greeting_of(spec))
    assert (plain.devices, plain.memory_shares, plain.threads) == (("cpu",), (1.0,), 1)
    assert plain.slot_memory_bytes() == 0
    gpu = facts(memory_bytes=1000)
    text = greeting_of(
        spec,
        devices=[f"cuda:{gpu.uuid}"],
        memory_shares=[0.25],
        threads=4,
        gpus=[asdict(gpu)],
    )
    greeting = decode(Greeting, text)
    assert (greeting.gpus, greeting.threads) == ((gpu,), 4)
    assert greeting.slot_memory_bytes() == 250


@pytest.mark.rotated
def test_workers_on_a_gpu_that_erred_end_and_their_memory_stays(fleet: Fleet) -> None:
    fleet.run(make_plan(fleet.spec, 1, 1, "a", NUM_SECTIONS), fleet.initialise())
    fleet.wait_for_step(1)

    fleet.machines["a"].send(messages.EndWorkers(slots=(7,), reason="XID 31"))
    fleet.machines["a"].send(messages.EndWorkers(slots=(0,), reason="XID 31"))

    died = fleet.wait_for("death", lambda _, r: r if isinstance(r, messages.WorkerDied) else None)
    assert died.slot == 0
    assert died.reason == "worker of slot 0 was ended: XID 31"
    assert not died.hung
