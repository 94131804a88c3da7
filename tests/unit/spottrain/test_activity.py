"""What an agent sees of a worker, whatever that is up to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from spottrain.activity import Activity, ActivityPage, ProcessLook, state_between
from spottrain.wire.model import ProcessState

WORKER = """
import sys
from spottrain.activity import Activity
activity = Activity.of_slot(int(sys.argv[1]), 1)
activity.begin(7)
with activity.during("data"):
    activity.note("compute")
activity.note("wait", 3)
print("waits", flush=True)
sys.stdin.read()
"""


@contextmanager
def worker(page: ActivityPage) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says that it waits for rank 3, and does."""
    argv = [sys.executable, "-c", WORKER, str(page.fd)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(page.fd,)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        yield process
        process.kill()


def test_a_worker_is_seen_waiting_stopped_and_gone() -> None:
    page = ActivityPage(os.memfd_create("page"), 2)
    with worker(page) as process:
        (seen,) = page.inspect(7, pause=bool)
        assert (seen.slot, seen.doing, seen.waits_for) == (1, "wait", 3)
        assert seen.still_s >= 0
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert [one.process for one in page.inspect(8, pause=bool)] == ["stopped"]
        (again,) = page.inspect(7, pause=bool)
        assert (again.process, again.tasks) == ("stopped", seen.tasks)
        process.kill()
        process.wait()
        (gone,) = page.inspect(7, pause=bool)
        assert gone.process == "gone"


def test_only_workers_of_the_generation_are_seen_unless_they_are_stopped() -> None:
    page = ActivityPage(os.memfd_create("page"), 2)
    activity = Activity.of_slot(page.fd, 0)
    activity.begin(7)
    assert page.inspect(8, pause=bool) == ()
    assert [one.doing for one in page.inspect(7, pause=bool)] == ["start"]
    activity.end()
    assert page.inspect(7, pause=bool) == ()


def test_what_was_done_before_goes_on_after_a_wait() -> None:
    page = ActivityPage(os.memfd_create("page"), 1)
    activity = Activity.of_slot(page.fd, 0)
    activity.begin(1)
    activity.note("evaluate")
    (before,) = page.inspect(1, pause=bool)
    with activity.waiting():
        (within,) = page.inspect(1, pause=bool)
    (after,) = page.inspect(1, pause=bool)
    assert [one.doing for one in (before, within, after)] == [
        "evaluate",
        "wait",
        "evaluate",
    ]
    assert before.tasks < within.tasks < after.tasks


def look(states: str, at_s: float, cpu_s: float = 0.0, faults: int = 0) -> ProcessLook:
    return ProcessLook(at_s, tuple(states), cpu_s, faults)


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [
        (look("SS", 0), look("SS", 1, 0.01), "idle"),
        (look("SS", 0), look("SS", 1, 0.2), "busy"),
        (look("SR", 0), look("SR", 1), "busy"),
        (look("SR", 0), look("SS", 1), "idle"),
        (look("D", 0), look("D", 1), "blocked"),
        (look("D", 0), look("D", 1, faults=9), "busy"),
        (look("D", 0), look("S", 1), "idle"),
        (look("TT", 0), look("TT", 1), "stopped"),
        (look("T", 0), look("S", 1), "idle"),
        (look("S", 0), look("", 1), "gone"),
        (look("S", 0), look("Z", 1), "gone"),
    ],
)
def test_two_looks_tell_what_a_process_does(
    first: ProcessLook, second: ProcessLook, state: ProcessState
) -> None:
    """One that waits for a core is busy, as is one that swaps."""
    assert state_between(first, second) == state
