"""The ``spottrain`` command, in forks of a process that has imported all commands.

To import one takes a second of a core, which is more than most of them do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from threading import Thread

from spottrain.varuna_manager.cli.main import COMMANDS, PoolTools, main

_CONTEXT = multiprocessing.get_context("forkserver")
_PLACES = (*COMMANDS.values(), *PoolTools.places.values())
_CONTEXT.set_forkserver_preload(
    [__name__, *{place.partition(":")[0] for place in _PLACES}]
)


def run(
    arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> tuple[int, str, str]:
    """Run a command to its end, and until nobody else holds its stdout or stderr.

    Args:
        arguments: After ``spottrain``.
        environment: All of it.
        timeout_s: Bound on the time of the command, and on that of others.

    Returns:
        Its exit code, what it wrote to stdout, and what to stderr.

    Raises:
        TimeoutError: It takes longer; it is killed.
    """
    (out, their_out), (err, their_err) = (_CONTEXT.Pipe(duplex=False) for _ in "oe")
    given = tuple(arguments), dict(environment), their_out, their_err
    process = _CONTEXT.Process(target=_become, args=given)
    process.start()
    for end in (their_out, their_err):
        end.close()
    texts = [_read(out), _read(err)]
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{arguments} has not ended after {timeout_s:g} s")
    code = process.exitcode
    process.close()
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
    arguments: Sequence[str],
    environment: Mapping[str, str],
    out: Connection,
    err: Connection,
) -> None:
    """Become the command."""
    os.environ.clear()
    os.environ.update(environment)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.argv = ["spottrain", *arguments]
    main()
