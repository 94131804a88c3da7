from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.builders import a_plan, a_run
from tests.fakes.machines import connections_to, is_dead
from tests.fakes.metadata import running as metadata_service
from tests.integration.jobs import until

from spottrain.cloud.notices.hear import URL_VARIABLE
from spottrain.cloud.ssh.on_vm.relay import Relay
from spottrain.codec import decode
from spottrain.varuna_manager.agent import main
from spottrain.varuna_manager.agent.client import TAIL_BYTES, AgentError, Backoff
from spottrain.varuna_manager.agent.supervisor import (
    STOPPED_LOOKS,
    Outbox,
    StoppedProcesses,
)
from spottrain.wire import messages
from spottrain.wire.plan import Slot

Manager = Any
"""The class behind the ``manager`` fixture (conftest files cannot be imported)."""


def test_a_batch_is_no_longer_than_the_manager_accepts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_BATCH_BYTES", 1000)
    short, long = (messages.UserCodeFailed(message="x" * size, traceback="") for size in (10, 2000))

    outbox = Outbox()
    for report in (long, *(short,) * 30):
        outbox.add(report)

    def posted() -> messages.ReportBatch:
        text = main.encode_batch(outbox, "vm-1")
        batch: messages.ReportBatch = decode(messages.ReportBatch, text)
        assert len(text) <= 1000 or len(batch.reports) == 1
        received = batch.first + len(batch.reports)
        outbox.acknowledge(messages.ReportAnswer(received=received, measured=0, next_measurement=0))
        return batch

    assert posted().reports == (long,)  # it cannot be shorter
    following = posted()
    assert (following.first, set(following.reports)) == (1, {short})
    assert len(following.reports) > 1


STUB = """
import json, subprocess, sys
from spottrain.wire import messages
from spottrain.codec import decode, encode
def say(report):
    print(encode(report), flush=True)
greeting = json.loads(sys.stdin.readline())
worker = subprocess.Popen(["sleep", "600"])
with open("heard", "w", buffering=1) as heard:
    heard.write(json.dumps(greeting | {"worker": worker.pid}) + "\\n")
    say(messages.SupervisorReady(num_slots=greeting["num_slots"], torch_version="none"))
    print("a stray line of the user's code", flush=True)
    for line in sys.stdin:
        heard.write(line)
        match decode(messages.Command, line):
            case messages.Initialise():
                for step in range(1000):
                    say(messages.CheckpointSaved(name=f"c{step}", step=step))
            case messages.StopGeneration(generation=g):
                say(messages.GenerationStopped(generation=g, slot=1, step=3, done=False))
            case messages.TraceMinibatches(number=n):
                open("trace", "wb").write(b"recorded")
                say(messages.TraceWritten(
                    number=n, rank=0, first_step=0, last_step=1, path="trace"))
                say(messages.CheckpointSaved(name="after the trace", step=1))
            case messages.OpenStore():
                say(messages.UserCodeFailed(message="boom", traceback="tb"))
                sys.exit(1)
    say(messages.CheckpointSaved(name="last", step=7))
worker.kill()
"""
PLAN = a_plan(
    microbatch_size=2,
    num_sections=2,
    virtual_nodes=2,
    slots=(Slot(vm_id="vm-1", index=1),),
)
RUN = a_run(PLAN, generation=4, checkpoint="c0")


class VmUnderTest:
    """The agent's process in a VM folder, with a stub for its supervisor."""

    def __init__(
        self, manager: Manager, folder: Path, notices: dict[str, str] | None = None
    ) -> None:
        folder.mkdir()
        self.folder = folder
        bootstrap = {
            "vm_id": "vm-1",
            "manager_url": manager.url,
            "ca_pem": manager.identity.ca_pem,
            "token": manager.admit("vm-1"),
            "private_address": "10.1.2.3",
            "num_slots": 2,
            "notices": notices or {"kind": "none"},
        }
        (folder / "agent.json").write_text(json.dumps(bootstrap))
        (folder / "stub.py").write_text(STUB)
        command = [
            sys.executable,
            "-m",
            "spottrain.varuna_manager.agent.main",
            "agent.json",
        ]
        with (folder / "agent.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, sys.executable, "stub.py"], cwd=folder, stderr=log
            )

    def heard(self) -> list[Any]:
        """What the supervisor got on its stdin."""
        lines = (self.folder / "heard").read_text().splitlines()
        return [lines[0], *(decode(messages.Command, line) for line in lines[1:])]

    def worker_is_gone(self, within_s: float = 20.0) -> bool:
        return is_dead(json.loads(self.heard()[0])["worker"], within_s)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        if (self.folder / "heard").exists() and not self.worker_is_gone(0.0):
            pid = json.loads(self.heard()[0])["worker"]
            subprocess.run(["kill", "-9", str(pid)], check=True)


@pytest.fixture
def start_vm(manager: Manager, tmp_path: Path) -> Iterator[Callable[[], VmUnderTest]]:
    vms: list[VmUnderTest] = []

    def start() -> VmUnderTest:
        vms.append(VmUnderTest(manager, tmp_path / f"vm{len(vms)}"))
        return vms[-1]

    yield start
    for vm in vms:
        vm.end()


@pytest.fixture
def vm(manager: Manager, start_vm: Callable[[], VmUnderTest]) -> VmUnderTest:
    started = start_vm()
    manager.handler.wait_for(lambda: manager.handler.reports)
    return started


def test_agent_goes_where_its_calls_are_taken_from_now_on(
    manager: Manager, vm: VmUnderTest
) -> None:
    relay = Relay("127.0.0.1", urlsplit(manager.url).port or 0)
    draft = vm.folder / "draft"
    draft.write_text(f"127.0.0.1:{relay.port}")
    draft.replace(vm.folder / main.MANAGER_ADDRESS)
    until("a call by way of the relay", lambda: connections_to(relay.port))
    manager.send("vm-1", messages.Initialise())
    manager.handler.wait_for(lambda: len(manager.handler.reports) > 1)


def test_agent_joins_with_the_users_code_and_a_ready_supervisor(
    manager: Manager, vm: VmUnderTest
) -> None:
    registered = manager.handler.registrations
    assert [(r.vm_id, r.num_slots, r.private_address) for r in registered] == [
        ("vm-1", 2, "10.1.2.3")
    ]
    ready = messages.SupervisorReady(num_slots=2, torch_version="none")
    assert manager.handler.reports == [ready]
    greeting = json.loads(vm.heard()[0])
    assert greeting["spec"]["name"] == "job"
    assert greeting["vm_id"] == "vm-1"
    assert greeting["private_address"] == "10.1.2.3"
    assert (Path(greeting["workdir"]) / "train.py").read_text() == "x = 1\n"


def test_commands_go_down_and_reports_come_up_in_order_and_once(
    manager: Manager, vm: VmUnderTest
) -> None:
    sent = [messages.Calibrate(), messages.Initialise(), RUN]
    for command in sent:
        manager.send("vm-1", command)
    manager.send("vm-1", messages.StopGeneration(generation=4, checkpoint=False))
    manager.handler.wait_for(lambda: len(manager.handler.reports) == 1002)
    assert [r.step for r in manager.handler.reports[1:-1]] == list(range(1000))
    assert vm.heard()[1:4] == sent


def test_nothing_is_lost_or_repeated_while_the_manager_does_not_answer(
    manager: Manager, vm: VmUnderTest
) -> None:
    manager.send("vm-1", messages.Initialise())
    manager.handler.wait_for(lambda: len(manager.handler.reports) > 1)
    manager.stop()
    manager.start()
    manager.send("vm-1", messages.StopGeneration(generation=1, checkpoint=False))
    manager.handler.wait_for(lambda: len(manager.handler.reports) == 1002)
    assert [r.step for r in manager.handler.reports[1:-1]] == list(range(1000))
    kinds = [command.kind for command in vm.heard()[1:]]
    assert kinds == ["initialise", "stop_generation"]


def test_a_trace_goes_before_the_reports_that_follow_it_and_its_file_is_removed(
    manager: Manager, vm: VmUnderTest
) -> None:
    for number in (4, 5):  # the manager waits for the first one only
        asked = messages.TraceMinibatches(generation=2, number=number, minibatches=1)
        manager.send("vm-1", asked)
    manager.handler.wait_for(lambda: len(manager.handler.reports) == 3)
    ((vm_id, trace, content, reports_before),) = manager.handler.traces
    assert (vm_id, trace.number, content) == ("vm-1", 4, b"recorded")
    assert reports_before == 1
    assert not (vm.folder / "trace").exists()


def test_a_retired_vm_delivers_its_last_reports_and_ends(manager: Manager, vm: VmUnderTest) -> None:
    manager.send("vm-1", messages.Retire())
    assert vm.process.wait(600) == main.RETIRED
    assert manager.handler.reports[-1] == messages.CheckpointSaved(name="last", step=7)
    assert vm.worker_is_gone()


def test_a_fenced_vm_ends_at_once_and_takes_its_workers_along(
    manager: Manager, vm: VmUnderTest
) -> None:
    manager.on_loop(lambda: manager.sessions.revoke("vm-1"))
    assert vm.process.wait(600) == main.FENCED
    assert vm.worker_is_gone()


def test_a_vm_that_was_silent_and_wakes_is_fenced(manager: Manager, vm: VmUnderTest) -> None:
    vm.process.send_signal(signal.SIGSTOP)
    manager.on_loop(lambda: manager.sessions.revoke("vm-1"))
    vm.process.send_signal(signal.SIGCONT)
    assert vm.process.wait(600) == main.FENCED
    assert vm.worker_is_gone()


def test_sigterm_ends_the_agent_and_its_workers(vm: VmUnderTest) -> None:
    vm.process.terminate()
    assert vm.process.wait(600) == main.TERMINATED
    assert vm.worker_is_gone()


def test_when_the_supervisor_dies_its_last_words_arrive_and_the_vm_ends(
    manager: Manager, vm: VmUnderTest
) -> None:
    manager.send("vm-1", messages.OpenStore(generation=1))
    assert vm.process.wait(600) == main.FAILED
    failed = messages.UserCodeFailed(message="boom", traceback="tb")
    *_, told, last = manager.handler.reports
    assert told == failed
    assert isinstance(last, messages.VmFailed)
    assert "supervisor has ended" in last.reason
    assert vm.worker_is_gone()


def test_the_last_words_of_a_vm_that_fails_are_kept(manager: Manager, vm: VmUnderTest) -> None:
    """Nobody can fetch its logs once it is off."""
    (vm.folder / "setup.log").write_bytes(b"x" * 40_000 + b"\xff the wheel is there\n")
    (vm.folder / "agent.1.log").write_text("from before")
    manager.send("vm-1", messages.OpenStore(generation=1))
    assert vm.process.wait(600) == main.FAILED
    logs = manager.handler.logs
    assert "supervisor has ended" in logs["agent.log"]
    assert logs["setup.log"].endswith("x\ufffd the wheel is there\n")
    assert len(logs["setup.log"]) <= TAIL_BYTES
    assert "agent.1.log" not in logs


def test_the_ends_of_logs_are_sent_while_a_vm_runs(
    manager: Manager, start_vm: Callable[[], VmUnderTest]
) -> None:
    """Of a VM that is killed nothing else is left."""
    vm = start_vm()
    manager.handler.wait_for(lambda: "agent.log" in manager.handler.logs)
    assert vm.process.poll() is None


def test_a_second_agent_of_the_same_vm_is_fenced(
    manager: Manager, vm: VmUnderTest, start_vm: Callable[[], VmUnderTest]
) -> None:
    manager.send("vm-1", messages.Calibrate())
    assert start_vm().process.wait(600) == main.FENCED
    assert vm.process.poll() is None


def test_without_a_manager_a_vm_checkpoints_and_returns_itself(
    manager: Manager, start_vm: Callable[[], VmUnderTest]
) -> None:
    manager.use(replace(manager.channel.spec, lease_s=0.5))
    vm = start_vm()
    manager.send("vm-1", RUN)
    manager.send("vm-1", messages.Initialise())
    manager.handler.wait_for(lambda: len(manager.handler.reports) == 1001)
    manager.stop()
    assert vm.process.wait(600) == main.RETIRED
    assert vm.heard()[-1] == messages.StopGeneration(generation=4, checkpoint=True)
    assert vm.worker_is_gone()


def test_unreadable_bootstrap_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    path.write_text('{"vm_id": 1}')
    with pytest.raises(AgentError, match=r"agent\.json"):
        main.Bootstrap.load(path)
    assert main.main([str(path)]) == main.FAILED


def test_a_notice_reaches_the_manager_and_is_acknowledged_once_nothing_is_left(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with metadata_service("azure") as service:
        monkeypatch.setenv(URL_VARIABLE, service.url_of("x"))
        vm = VmUnderTest(manager, tmp_path / "vm", {"kind": "azure"})
        try:
            manager.handler.wait_for(lambda: manager.handler.reports)
            service.ask("preempt", vm="x", lead_s=29.5)
            manager.handler.wait_for(lambda: len(manager.handler.reports) == 2)
            noticed = manager.handler.reports[1]
            assert noticed.kind == "interruption_noticed"
            assert 20 < noticed.lead_s <= 30  # both dates are in whole seconds
            service.ask("withdraw", vm="x")
            manager.handler.wait_for(lambda: len(manager.handler.reports) == 3)
            assert manager.handler.reports[2] == messages.InterruptionCancelled()
            event_id = service.ask("preempt", vm="x", lead_s=29.5)
            manager.handler.wait_for(lambda: len(manager.handler.reports) == 4)
            assert service.ask("acknowledged") == []
            vm.process.terminate()
            assert vm.process.wait(600) == main.TERMINATED
            assert service.ask("acknowledged") == [event_id]
            assert service.ask("drifts") == []
        finally:
            vm.end()


def test_notices_from_nowhere_are_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "agent.json"
    known = dict.fromkeys(("vm_id", "manager_url", "ca_pem", "token"), "x")
    bootstrap = {**known, "private_address": "x", "num_slots": 1}
    path.write_text(json.dumps({**bootstrap, "notices": {"kind": "moon"}}))
    assert main.main([str(path)]) == main.FAILED


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> Any:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "evil",
    [
        [member("../escaped")],
        [member("/tmp/spottrain-escaped")],
        [member("a/../../escaped")],
        [member("link", tarfile.SYMTYPE, "/etc")],
        [member("link", tarfile.SYMTYPE, "../..")],
        [member("a/link", tarfile.SYMTYPE, "../../escaped")],
        [member("hard", tarfile.LNKTYPE, "/etc/passwd")],
        [member("device", tarfile.CHRTYPE)],
        [member("pipe", tarfile.FIFOTYPE)],
    ],
)
def test_workdir_cannot_reach_outside_of_its_folder(
    tmp_path: Path, evil: list[tarfile.TarInfo]
) -> None:
    archive = tmp_path / "workdir.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for info in evil:
            tar.addfile(info)
    with pytest.raises(AgentError, match="not a plain file"):
        main.unpack(archive, tmp_path / "workdir")
    assert not (tmp_path / "escaped").exists()


def test_workdir_comes_out_as_it_was_packed(tmp_path: Path) -> None:
    archive = tmp_path / "workdir.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        script = member("sub/run.sh")
        script.size, script.mode = 2, 0o755
        tar.addfile(script, io.BytesIO(b"hi"))
        tar.addfile(member("sub/link", tarfile.SYMTYPE, "run.sh"))
    main.unpack(archive, tmp_path / "workdir")
    assert (tmp_path / "workdir/sub/link").read_text() == "hi"
    assert (tmp_path / "workdir/sub/run.sh").stat().st_mode & 0o777 == 0o755


def test_damaged_archive_is_named(tmp_path: Path) -> None:
    archive = tmp_path / "workdir.tar.gz"
    archive.write_bytes(b"junk")
    with pytest.raises(AgentError, match="cannot be unpacked"):
        main.unpack(archive, tmp_path / "workdir")


def saved(step: int) -> messages.CheckpointSaved:
    return messages.CheckpointSaved(name="c", step=step)


def committed(step: int) -> messages.MinibatchAdopted:
    return messages.MinibatchAdopted(generation=1, step=step, loss=0.0, grad_norm=0.0)


def answer(received: int, measured: int = 0, next_measurement: int = 0) -> messages.ReportAnswer:
    return messages.ReportAnswer(
        received=received, measured=measured, next_measurement=next_measurement
    )


def test_outbox_keeps_facts_until_they_are_acknowledged() -> None:
    outbox = Outbox()
    reports = tuple(saved(step) for step in range(5))
    for report in reports:
        outbox.add(report)
    batch = outbox.batch("vm", 2)
    assert (batch.vm_id, batch.first, batch.reports) == ("vm", 0, reports[:2])
    outbox.acknowledge(answer(2))
    outbox.acknowledge(answer(1))
    batch = outbox.batch("vm", 9)
    assert (batch.first, batch.reports) == (2, reports[2:])
    assert not outbox.wait_empty(0.0)
    outbox.acknowledge(answer(5))
    assert outbox.wait_empty(0.0)


def test_measurements_have_numbers_of_their_own_and_a_place_among_the_facts() -> None:
    outbox = Outbox()
    for report in (saved(0), committed(1), committed(2), saved(2), committed(3)):
        outbox.add(report)
    batch = outbox.batch("vm", 9)
    assert batch.reports == (saved(0), saved(2))
    assert batch.first_measurement == batch.oldest_measurement == 0
    assert [(m.after, m.report.step) for m in batch.measurements] == [
        (1, 1),
        (1, 2),
        (2, 3),
    ]
    outbox.acknowledge(answer(2, 0, 3))
    outbox.add(saved(4))
    batch = outbox.batch("vm", 9)
    assert (batch.first, batch.reports) == (2, (saved(4),))
    assert (batch.first_measurement, batch.oldest_measurement) == (3, 0)
    assert not outbox.wait_empty(0.0), "they are not written yet"
    outbox.acknowledge(answer(3, 3, 3))
    assert outbox.wait_empty(0.0)


def test_a_manager_that_begins_anew_is_sent_what_is_not_written() -> None:
    outbox = Outbox()
    for step in range(4):
        outbox.add(committed(step))
    outbox.batch("vm", 9)
    outbox.acknowledge(answer(0, 1, 4))
    assert outbox.batch("vm", 9).measurements == (), "it only asks"
    outbox.add(committed(4))
    assert [m.report.step for m in outbox.batch("vm", 9).measurements] == [4]
    outbox.acknowledge(answer(0, 1, 1))
    batch = outbox.batch("vm", 9)
    assert (batch.first_measurement, batch.oldest_measurement) == (1, 1)
    assert [m.report.step for m in batch.measurements] == [1, 2, 3, 4]


def test_outbox_wakes_who_waits_for_a_report() -> None:
    outbox = Outbox()
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(outbox.batch("vm", 1)))
    waiting.start()
    outbox.add(saved(1))
    waiting.join(600)
    assert [batch.reports for batch in got] == [(saved(1),)]


def test_waits_grow_and_stay_bounded() -> None:
    backoff = Backoff()
    waits = [backoff.next_s() for _ in range(50)]
    assert 0.05 <= waits[0] <= 0.1
    assert max(waits) <= 2.0
    assert min(waits[20:]) >= 1.0
    backoff.reset()
    assert backoff.next_s() <= 0.1


def test_a_supervisor_that_is_stopped_is_told_and_ended(manager: Manager, vm: VmUnderTest) -> None:
    worker = json.loads(vm.heard()[0])["worker"]
    stat = Path(f"/proc/{worker}/stat").read_text()
    supervisor = int(stat.rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGSTOP)
    assert vm.process.wait(600) == main.FAILED
    last = manager.handler.reports[-1]
    assert isinstance(last, messages.VmFailed)
    assert "has been stopped" in last.reason
    assert vm.worker_is_gone()
    assert is_dead(supervisor, 20.0)


def test_a_process_counts_as_stopped_once_it_was_so_at_many_looks_in_a_row() -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            watch = StoppedProcesses(parent.pid)

            def looks(times: int) -> list[int]:
                return [pid for _ in range(times) for pid in watch.look()]

            assert looks(STOPPED_LOOKS) == []
            os.kill(child, signal.SIGSTOP)
            until("it is stopped", lambda: is_stopped(child))
            assert looks(STOPPED_LOOKS - 1) == []
            os.kill(child, signal.SIGCONT)
            until("it goes on", lambda: not is_stopped(child))
            assert looks(1) == []
            for pid in (child, parent.pid):
                os.kill(pid, signal.SIGSTOP)
                until("it is stopped", partial(is_stopped, pid))
            assert sorted(looks(2 * STOPPED_LOOKS)) == sorted([child, parent.pid])
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()


def is_stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def test_code_that_the_manager_cannot_serve_is_what_the_vm_says_last(
    manager: Manager, start_vm: Callable[[], VmUnderTest]
) -> None:
    aside = manager.channel.workdir.rename(manager.channel.workdir.with_name("aside"))
    try:
        assert start_vm().process.wait(600) == main.FAILED
    finally:
        aside.rename(manager.channel.workdir)
    (said,) = manager.handler.reports
    assert isinstance(said, messages.VmFailed)
    assert "cannot be read" in said.reason
