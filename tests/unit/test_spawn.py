"""A process that was forked ahead becomes what it is told to become."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from spottrain import spawn

LONG = "x" * 300_000
"""More than a socket takes at once."""


def become(connection: socket.socket) -> None:
    """In a child: tell what it has become, on its new standard output."""
    received = spawn.receive(connection)
    connection.close()
    assert received is not None
    received.take_over()
    (shared,) = received.program.fds
    told = [os.getcwd(), *sorted(os.environ), os.read(0, 9).decode()]
    told += [str(len(os.environ["LONG"])), os.pread(shared, 9, 0).decode()]
    os.write(1, "|".join([*received.program.argv, *told]).encode())


def test_it_gets_folder_variables_and_files_under_their_numbers(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        ours.close()
        try:
            become(theirs)
        finally:
            os._exit(0)
    theirs.close()
    stdin, our_end = os.pipe()
    its_stdout, stdout = os.pipe()
    os.write(our_end, b"in")
    (tmp_path / "page").write_text("shared")
    page = os.open(tmp_path / "page", os.O_RDONLY)
    program = spawn.Program(["a", "b"], str(tmp_path), {"LONG": LONG, "B": "1"}, [page])
    spawn.send(ours, program, (stdin, stdout, stdout))
    for fd in (stdin, our_end, stdout, page):
        os.close(fd)
    with ours, os.fdopen(its_stdout) as answer:
        told = f"a|b|{tmp_path.resolve()}|B|LONG|in|{len(LONG)}|shared"
        assert answer.read() == told
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_it_learns_that_nobody_will_tell_it() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert spawn.receive(theirs) is None
