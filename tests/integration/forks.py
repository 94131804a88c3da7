"""Commands and managers, in forks of a process that has imported all that they run.

To import it takes a second of a core, which is more than most of them do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

from spottrain.varuna_manager.cli.main import COMMANDS, PoolTools, main

Stream = Connection | Path

_CONTEXT = multiprocessing.get_context("forkserver")
_PLACES = (*COMMANDS.values(), *PoolTools.places.values())
_CONTEXT.set_forkserver_preload(
    [
        __name__,
        *{place.partition(":")[0] for place in _PLACES},
        "tests.integration.stub_manager",
        "tests.integration.cloud_manager",
    ]
)


class Fork:
    """A process of its own.

    Args:
        body: Its main function, of a module; returns its exit code if it does not exit.
        arguments: ``sys.argv`` from 1 on.
        environment: All of it.
        out: Its stdout: a pipe, or a file that is appended to.
        err: Its stderr.
    """

    def __init__(
        self,
        body: Callable[[], int | None],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        out: Stream,
        err: Stream,
    ) -> None:
        given = body, tuple(arguments), dict(environment), out, err
        self._process = _CONTEXT.Process(target=_become, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout_s: float | None = None) -> int:
        """Return its exit code once it has ended, ``-number`` if by a signal.

        Raises:
            TimeoutError: It takes longer.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
        return self._process.exitcode

    def kill(self) -> None:
        """Send it SIGKILL, unless it has ended."""
        self._process.kill()

    def terminate(self) -> None:
        """Send it SIGTERM, unless it has ended."""
        self._process.terminate()


def run(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> tuple[int, str, str]:
    """Run ``spottrain`` to its end, and until nobody else holds its stdout or stderr.

    Args:
        arguments: After the command's name.
        environment: All of it.
        timeout_s: Bound on the time of the command, and on that of others.

    Returns:
        Its exit code, what it wrote to stdout, and what to stderr.

    Raises:
        TimeoutError: It takes longer; it is killed.
    """
    (out, their_out), (err, their_err) = (_CONTEXT.Pipe(duplex=False) for _ in "oe")
    command = Fork(main, arguments, environment, their_out, their_err)
    for end in (their_out, their_err):
        end.close()
    texts = [_read(out), _read(err)]
    try:
        code = command.wait(timeout_s)
    finally:
        command.kill()
    return code, texts[0].result(timeout_s), texts[1].result(timeout_s)


def _read(pipe: Connection) -> Future[str]:
    """Read all that comes out of a pipe."""
    text: Future[str] = Future()

    def read() -> None:
        with pipe, open(pipe.fileno(), closefd=False) as file:
            text.set_result(file.read())

    Thread(target=read, daemon=True).start()
    return text


def _become(
    body: Callable[[], int | None],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: Stream,
    err: Stream,
) -> None:
    """Become the process."""
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, stream in ((1, out), (2, err)):
        file = stream.open("ab") if isinstance(stream, Path) else stream
        with file:
            os.dup2(file.fileno(), number)
    # Anew: the streams of the server remember that what they wrote to could seek.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.argv = ["spottrain", *arguments]
    sys.exit(body())
