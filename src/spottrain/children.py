"""Runs programs that may leave processes behind: all end with the call.

Code of the user's may start what outlives it, and holds what it was given. So output goes
to files, of which nobody waits for the end, and the program's process group is killed: by
a process of its own where this one is killed before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

_LEAST_S = 0.1
"""Less than this is not waited for once more."""
ASKED_S = 5.0
"""How long a program may take to say where it is."""
WHERE_SIGNAL = signal.SIGUSR1
"""Has ``spottrain.start`` write to stderr where its main thread is."""
_KEEPER = """
import os, signal, sys
group = sys.stdin.readline().strip()
if sys.stdin.readline() != "done\\n" and group:
    os.killpg(int(group), signal.SIGKILL)
"""


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    given: bytes = b"",
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its own end, whatever it has started.

    Args:
        argv: The program.
        given: What it reads.
        timeout_s: Bound on its time; ``None``: none. On Linux, time in which its main
            thread could not run because others had the cores does not count.

    Raises:
        OSError: It cannot be started.
        TimeoutExpired: It took longer; with what it has written until then.
    """
    with contextlib.ExitStack() as stack:
        stdin, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        stdin.write(given)
        stdin.seek(0)
        keeper = stack.enter_context(_keeper())
        process = subprocess.Popen(
            argv, stdin=stdin, stdout=stdout, stderr=stderr, env=env, process_group=0
        )
        try:
            keeper.write(str(process.pid).encode())
            in_time = _ends(process, timeout_s)
            if not in_time:
                process.send_signal(WHERE_SIGNAL)
                _ends(process, ASKED_S)
        finally:
            # Not reaped yet, its id cannot be reused: the group is still its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written = []
        for stream in (stdout, stderr):
            stream.seek(0)
            written.append(stream.read())
        if not in_time:
            raise subprocess.TimeoutExpired(argv, timeout_s or 0.0, *written)
        return subprocess.CompletedProcess(argv, process.returncode, *written)


@contextlib.contextmanager
def _keeper() -> Iterator[IO[bytes]]:
    """Start a process that is told a group, and kills it if this process ends before the
    block does."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _KEEPER],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # an interrupt is for us
    ) as process:
        assert process.stdin is not None, "it is a pipe"
        try:
            yield process.stdin
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"\ndone\n")


def _ends(process: subprocess.Popen[bytes], timeout_s: float | None) -> bool:
    """Wait for a process's end, without reaping it where the system has handles of
    processes; return whether it came in time."""
    if sys.platform != "linux":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.returncode is not None
    pidfd, began_s, left_s = os.pidfd_open(process.pid), time.monotonic(), timeout_s
    try:
        while not select.select([pidfd], [], [], left_s)[0]:
            assert timeout_s is not None, "else it ends first"
            used_s = time.monotonic() - began_s - _kept_waiting_s(process.pid)
            left_s = timeout_s - used_s
            if left_s < _LEAST_S:
                return False
        return True
    finally:
        os.close(pidfd)


def _kept_waiting_s(pid: int) -> float:
    """Return how long a process's main thread has waited for a core (sched-stats.rst)."""
    try:
        _, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):  # the kernel does not count it
        return 0.0
    return int(waited_ns) / 1e9
