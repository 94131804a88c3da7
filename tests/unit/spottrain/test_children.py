from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spottrain import children

SURVIVOR = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid)"


def run(code: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-c", code]
    return children.run(argv, env=os.environ, given=b"read", timeout_s=timeout_s)


def wait_for_end(pid: int) -> None:
    """Return once a process has ended; it never does by itself."""
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        select.select([pidfd], [], [])
        os.close(pidfd)


def test_what_a_program_leaves_behind_is_neither_waited_for_nor_left() -> None:
    done = run(SURVIVOR)

    assert done.returncode == 0
    wait_for_end(int(done.stdout))


def test_a_program_and_what_it_started_end_if_their_command_is_killed() -> None:
    told, note = os.pipe()
    program = (
        "import os, signal, subprocess;"
        "pids = os.getpid(), subprocess.Popen(['sleep', '1000']).pid;"
        f"os.write(os.open({f'/proc/{os.getpid()}/fd/{note}'!r}, os.O_WRONLY), b'%d %d' % pids);"
        "signal.pause()"
    )
    code = (
        "import os, sys; from spottrain import children;"
        "children.run([sys.executable, '-c', sys.argv[1]], env=os.environ)"
    )
    with subprocess.Popen([sys.executable, "-c", code, program]) as command:
        pids = os.read(told, 100).split()
        command.kill()
    for pid in pids:
        wait_for_end(int(pid))
    os.close(told)
    os.close(note)


def test_a_program_reads_writes_and_ends_as_it_does_elsewhere() -> None:
    code = "import sys; sys.stderr.write(sys.stdin.read()); print(1); sys.exit(7)"
    done = run(code)

    assert (done.returncode, done.stdout, done.stderr) == (7, b"1\n", b"read")


def test_a_program_that_takes_too_long_is_ended() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("import signal; signal.pause()", timeout_s=0.0)


@pytest.mark.rotated
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count it")
def test_time_in_which_others_have_the_cores_does_not_count() -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os, time; os.sched_setaffinity(0, [{core}])\n"
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            busy = [sys.executable, "-S", "-c", pinned + "while True: pass"]
            stack.callback(stack.enter_context(subprocess.Popen(busy)).kill)
        done = run(pinned + "while time.process_time() < 1.0: pass", timeout_s=3.0)
    assert done.returncode == 0


def test_a_program_that_is_missing_is_told() -> None:
    with pytest.raises(FileNotFoundError):
        children.run(["/nowhere/program"], env={})


def test_an_interrupt_ends_the_program_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        f"import os, signal; open({str(note)!r}, 'w').write(str(os.getpid()));"
        "os.kill(os.getppid(), signal.SIGINT); signal.pause()"
    )
    with pytest.raises(KeyboardInterrupt):
        run(code)
    wait_for_end(int(note.read_text()))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
