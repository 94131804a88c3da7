"""Runs programs that may leave processes behind: all end with the call.

Code of the user's may start what outlives it, and holds what it was given. So output goes
to files, of which nobody waits for the end, and the program's process group is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

ASKED_S = 5.0
"""How long a program may take to say where it is."""
WHERE_SIGNAL = signal.SIGUSR1
"""Has ``spottrain.start`` write to stderr where its main thread is."""


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
        env: Its environment.
        given: What it reads.
        timeout_s: Bound on its time; ``None``: none.

    Raises:
        OSError: It cannot be started.
        TimeoutExpired: It took longer; with what it has written until then.
    """
    with contextlib.ExitStack() as stack:
        stdin, stdout, stderr = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)
        )
        stdin.write(given)
        stdin.seek(0)
        process = subprocess.Popen(
            argv, stdin=stdin, stdout=stdout, stderr=stderr, env=env, process_group=0
        )
        try:
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


def _ends(process: subprocess.Popen[bytes], timeout_s: float | None) -> bool:
    """Wait for a process's end, without reaping it where the system has handles of
    processes; return whether it came in time."""
    if sys.platform != "linux":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        return process.returncode is not None
    pidfd = os.pidfd_open(process.pid)
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)
