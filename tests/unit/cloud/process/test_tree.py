from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from spottrain.cloud.process.tree import groups, kill_all, signal_groups, stop_all

if TYPE_CHECKING:
    from tests.unit.cloud.conftest import Machine

FORKER = """
import os, signal, time
print("forking", flush=True)
for _ in range(100):
    if os.fork() == 0:
        os.setsid()
        signal.pause()
    time.sleep(0.005)
signal.pause()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(machine: Machine) -> Iterator[Start]:
    """Starts a marked process in a session of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(marker: str, program: str, *args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", program, *args],
            env={"SPOTTRAIN_VM": marker},
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def marker() -> Iterator[str]:
    """A marker that nobody else uses."""
    marker = f"job-{uuid.uuid4().hex}/vm-1"
    yield marker
    kill_all([marker])


def family(start: Start, machine: Machine, marker: str) -> list[int]:
    process = start(marker, machine.family, "/dev/stdout")
    assert process.stdout is not None
    pids: list[int] = json.loads(process.stdout.readline())["pids"]
    return pids


def test_killing_a_vm_leaves_none_of_its_processes(
    start: Start, machine: Machine, marker: str
) -> None:
    pids = family(start, machine, marker)
    assert len(pids) == 5
    assert all(machine.runs(pid) for pid in pids)
    kill_all([marker])
    assert not any(machine.runs(pid) for pid in pids)


def test_a_session_is_killed_although_its_leader_and_its_marks_are_gone(
    start: Start, machine: Machine, marker: str
) -> None:
    agent, _, _, unmarked, escaped = family(start, machine, marker)
    os.kill(agent, signal.SIGKILL)
    machine.await_exit(agent)
    kill_all([marker], [agent])
    assert not machine.runs(unmarked)
    os.kill(escaped, signal.SIGKILL)  # neither mark, session nor parent: out of reach


def test_all_processes_of_a_stopped_vm_stop_and_can_be_killed(
    start: Start, machine: Machine, marker: str
) -> None:
    pids = family(start, machine, marker)
    stop_all([marker])
    assert [machine.state(pid) for pid in pids] == ["T"] * 5
    kill_all([marker])
    assert not any(machine.runs(pid) for pid in pids)


def test_processes_of_other_vms_are_left_alone(start: Start, machine: Machine, marker: str) -> None:
    other = start(f"{marker}0", "import signal; print(flush=True); signal.pause()")
    assert other.stdout is not None
    other.stdout.readline()
    kill_all([marker])
    stop_all([marker])
    assert machine.state(other.pid) in ("S", "R"), "neither dead nor stopped"


@pytest.mark.parametrize("act", [kill_all, stop_all])
def test_children_forked_meanwhile_are_killed_too(
    start: Start,
    machine: Machine,
    marker: str,
    act: Callable[[list[str]], None],
) -> None:
    process = start(marker, FORKER)
    assert process.stdout is not None
    process.stdout.readline()
    act([marker])
    job = marker.partition("/")[0]
    assert {machine.state(pid) for pid in machine.marked(job)} <= {"T"}


def test_the_process_groups_of_a_vm_stop_and_continue_together(
    start: Start, machine: Machine, marker: str
) -> None:
    pids = family(start, machine, marker)
    found = groups([marker])
    assert found == {os.getpgid(pid) for pid in pids}
    signal_groups(found, signal.SIGSTOP)
    machine.eventually(lambda: {machine.state(pid) for pid in pids} == {"T"})
    signal_groups(found, signal.SIGCONT)
    machine.eventually(lambda: "T" not in {machine.state(pid) for pid in pids})
    kill_all([marker])
    signal_groups(found, signal.SIGSTOP)  # nobody is left


def test_killing_a_vm_without_processes_is_no_error() -> None:
    kill_all([])
    kill_all([f"job-{uuid.uuid4().hex}/vm-1"])
